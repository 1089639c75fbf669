// SPDX-License-Identifier: Apache-2.0
// Says whether what is shown is live, how old it is, and asks for the token where one is wanted.

import { byId, set, write } from "./dom.js";
import { hasToken, useToken } from "./feed.js";
import { duration, moment } from "./words.js";

const STALE_TURNS = 3;
const LOST_S = 15;
const LOST_FAILURES = 3;

export class Connection {
  /** retry(): ask at once. */
  constructor({ retry, announce }) {
    this.announce = announce;
    this.heard = null; // milliseconds of the page's own clock
    this.failure = null;
    this.failures = 0;
    this.told = "connecting";
    this.paused = false;
    this.at = null;
    byId("retry").addEventListener("click", retry);
    byId("reload").addEventListener("click", () => location.reload());
    byId("token").addEventListener("submit", (event) => {
      event.preventDefault();
      useToken(byId("token-input").value);
      byId("token-input").value = "";
      write(byId("token-error"), "");
      retry();
    });
    setInterval(() => this.tick(), 1000);
  }

  ok(now) {
    this.heard = performance.now();
    this.now = now;
    this.failures = 0;
    this.failure = null;
    byId("token").hidden = true;
    this.tool ??= now.tool;
    byId("upgraded").hidden = this.tool === now.tool;
    this.tick();
  }

  failed(error, wait) {
    this.failures += 1;
    this.failure = { text: error.message, next: performance.now() + wait * 1000, status: error.status };
    if (error.status === 401) {
      const form = byId("token");
      if (!form.hidden || hasToken()) write(byId("token-error"), hasToken() ? "That token is not the one." : "");
      if (form.hidden) {
        form.hidden = false;
        byId("token-input").focus();
      }
    }
    this.tick();
  }

  hold({ paused, at }) {
    this.paused = paused;
    this.at = at;
    this.tick();
  }

  get age() {
    return this.heard === null ? null : (performance.now() - this.heard) / 1000;
  }

  state() {
    if (this.heard === null) return this.failures ? "lost" : "connecting";
    if (this.paused) return "paused";
    if (document.hidden) return this.at === null ? "live" : "paused";
    if (this.failures >= LOST_FAILURES || (this.failures && this.age > LOST_S)) return "lost";
    if (this.failures || this.age > STALE_TURNS * (this.now.refresh_s ?? 2) + 2) return "stale";
    return this.at === null ? "live" : "paused";
  }

  tick() {
    const state = this.state();
    const live = byId("live");
    set(live, "data-state", state);
    write(live.querySelector(".live-text"), this.words(state));
    const gone = (state === "stale" || state === "lost") && this.failure?.status !== 401;
    byId("banner").hidden = !gone;
    if (gone) write(byId("banner-text"), this.trouble());
    if (state !== this.told) {
      if (state === "lost") this.announce("The sidecar does not answer.");
      else if (this.told === "lost") this.announce("The sidecar answers again.");
      if (state !== "stale") this.told = state;
    }
  }

  words(state) {
    if (state === "connecting") return "connecting";
    if (state === "live") return "live";
    if (state === "paused") return this.paused ? "paused" : "at a moment";
    return "no answer";
  }

  trouble() {
    const left = this.failure ? Math.max(0, Math.ceil((this.failure.next - performance.now()) / 1000)) : 0;
    const next = left >= 1 ? ` Next try in ${duration(left)}.` : " Trying now.";
    const why = this.failure ? `: ${this.failure.text}` : "";
    if (this.heard === null) return `The sidecar does not answer${why}.${next}`;
    const { time_unix_s: time } = this.now;
    return `No answer from the sidecar since ${moment(time, time)}, ${duration(Math.round(this.age))} ago${why}. What stands here is of then.${next}`;
  }
}
