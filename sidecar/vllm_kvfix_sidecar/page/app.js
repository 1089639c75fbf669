// SPDX-License-Identifier: Apache-2.0
// The page: holds what is known and what is looked at, and has each panel show it.

import { read, written } from "./address.js";
import { Connection } from "./connection.js";
import { Containers } from "./containers.js";
import * as copying from "./copying.js";
import { byId, each, h, set, str, turn, write, writeBreakable, writeStranger } from "./dom.js";
import { Engines } from "./engines.js";
import { Poll } from "./feed.js";
import { Composition, Overview } from "./memory.js";
import { Requests } from "./requests.js";
import { Events, Sidecar, Unread } from "./sidecar.js";
import { iconOf, nameOf } from "./process.js";
import { Verdicts } from "./verdicts.js";
import { pace, pinned, query, Window } from "./view.js";
import { clock, duration, isNumber, moment } from "./words.js";

const STEPS = 60; // a window has so many steps of the earlier and later buttons
const ICON_COLOURS = { 0: "%231d6b3a", 1: "%23b3261e", 2: "%23888888" };

class Page {
  constructor() {
    this.address = read(location.hash);
    this.window = new Window();
    this.now = this.overview = this.detail = null;
    this.paused = false;
    const pin = (time) => this.pin(time);
    const sort = (table, order) => this.sort(table, order);
    const choose = (key, isFar) => this.choose(key, isFar);
    const panel = (Kind, id, options) => new Kind(byId(id), options);
    this.panels = [
      [panel(Verdicts, "processes", { choose })],
      [panel(Overview, "memory", { pin })],
      [panel(Composition, "composition", { pin })],
      [panel(Containers, "containers", { pin, sort }), "containers"],
      [panel(Engines, "engines", { pin })],
      [panel(Requests, "requests", { sort }), "requests"],
      [panel(Events, "happened", { pin })],
      [panel(Unread, "unread")],
      [panel(Sidecar, "sidecar")],
    ];
    const announce = (text) => write(byId("announce"), text);
    this.connection = new Connection({ announce, retry: () => this.polls.forEach((poll) => poll.soon()) });
    this.announce = announce;
    this.polls = this.makePolls();
    this.listen();
  }

  makePolls() {
    const quiet = () => undefined; // /api/now says it already
    const history = (path, got) =>
      new Poll({
        path: () => this.now && path(),
        every: () => (this.now ? pace(this.address) : 1),
        got,
        failed: quiet,
      });
    return [
      new Poll({
        path: () => "/api/now",
        every: () => (isNumber(this.now?.refresh_s) ? Math.max(1, this.now.refresh_s) : 2),
        got: (now) => this.gotNow(now),
        failed: (error, wait) => this.connection.failed(error, wait),
      }),
      history(
        () => `/api/history?${this.query}`,
        (overview) => {
          this.overview = overview;
          this.render();
        },
      ),
      history(
        () => this.chosen && `/api/history?process=${encodeURIComponent(this.chosen.key)}&${this.query}`,
        (detail) => {
          this.detail = detail;
          this.render();
        },
      ),
    ];
  }

  start() {
    copying.start();
    this.connection.hold({ paused: false, at: this.address.at });
    this.polls.forEach((poll) => poll.start());
    byId("range").value = String(this.address.range);
    const offset = -new Date().getTimezoneOffset() / 60;
    write(byId("zone"), `Times are of this browser's zone, UTC${offset >= 0 ? "+" : ""}${offset}.`);
  }

  listen() {
    const on = (id, type, act) => byId(id).addEventListener(type, act);
    on("pause", "click", () => this.pause(!this.paused));
    on("range", "change", (event) => this.go({ range: Number(event.target.value) }));
    on("process", "change", (event) => this.choose(event.target.value, false));
    on("go-live", "click", () => this.goLive());
    on("earlier", "click", () => this.step(-1));
    on("later", "click", () => this.step(1));
    on("copy-link", "click", () => this.copyLink());
    addEventListener("hashchange", () => {
      this.window.forget();
      this.address = read(location.hash);
      byId("range").value = String(this.address.range);
      this.refresh();
    });
    document.querySelector(".skip").addEventListener("click", (event) => {
      event.preventDefault(); // the hash is the moment's
      byId("main").focus();
    });
  }

  get view() {
    return this.window.view({ ...this, process: this.chosen?.key ?? null });
  }

  get query() {
    return query(this.view, this.address.range);
  }

  /** The process that is looked at: the one of the address, as long as anything is known of it; else the gravest. */
  get chosen() {
    const { process: key } = this.address;
    const processes = this.now?.processes ?? [];
    const found = processes.find((process) => process.key === key);
    if (!found && key !== null && Object.hasOwn(this.overview?.processes ?? {}, key)) return this.gone(key);
    return found ?? processes[0] ?? null;
  }

  /** A process that ended so long ago that nothing but its history is left. */
  gone(key) {
    const containers =
      this.detail?.process === key ? Object.keys(this.detail.containers ?? {}).map((path) => ({ path })) : [];
    const pid = key.split("-")[0];
    return { key, pid, title: "ended", memory: {}, unread: {}, verdict: { culprits: [] }, containers, ended_unix_s: 0 };
  }

  gotNow(now) {
    this.now = now;
    this.connection.ok(now);
    this.tellChanges(now);
    const there = now.processes
      .map(({ key, ended_unix_s: ended }) => `${key} ${isNumber(ended)}`)
      .sort()
      .join();
    if (there !== this.there) this.polls.slice(1).forEach((poll) => poll.soon());
    this.there = there;
    this.render();
  }

  tellChanges(now) {
    const told = JSON.stringify([
      now.exit_code,
      now.processes.map(({ key, verdict, ended_unix_s: ended }) => [key, verdict.kind, isNumber(ended)]),
    ]);
    if (this.told !== undefined && this.told !== told) this.announce(str(now.answer));
    this.told = told;
  }

  go(changes) {
    if ("range" in changes) this.window.forget();
    Object.assign(this.address, changes);
    this.writeAddress();
    this.refresh();
  }

  refresh() {
    this.connection.hold({ paused: this.paused, at: this.address.at });
    this.render();
    if (!this.paused) this.polls.slice(1).forEach((poll) => poll.soon());
  }

  writeAddress() {
    history.replaceState(null, "", written(this.address));
  }

  pin(time) {
    const view = this.view;
    const at = pinned(time, view.now);
    this.window.hold(at, view, this.address.range);
    this.go({ at });
  }

  step(way) {
    const view = this.view;
    if (view.at !== null) this.pin(view.at + (way * view.range) / STEPS);
  }

  goLive() {
    this.pause(false);
    this.pin(null);
    byId("pause").focus();
  }

  choose(key, isFar) {
    this.go({ process: key });
    if (!isFar) return;
    byId("detail-title").scrollIntoView({ block: "start" });
    byId("process").focus({ preventScroll: true });
  }

  sort(table, order) {
    this.go({ sort: { ...this.address.sort, [table]: order } });
  }

  pause(paused) {
    this.paused = paused;
    set(byId("pause"), "aria-pressed", String(paused));
    write(byId("pause"), paused ? "Go on" : "Pause");
    this.polls.forEach((poll) => (paused ? poll.stop() : poll.start()));
    this.connection.hold({ paused, at: this.address.at });
  }

  copyLink() {
    const { now, process } = this.view;
    const { range, sort, at } = this.address;
    const hash = written({ range, sort, process: this.address.process ?? process, at: at ?? now });
    copying.copy(new URL(hash, location.href).href, "the link to this moment");
  }

  render() {
    if (!this.now) return;
    const chosen = this.chosen;
    const detail = this.detail?.process === chosen?.key ? this.detail : null;
    const what = { now: this.now, overview: this.overview, view: this.view, process: chosen, detail };
    this.renderFrame(what);
    for (const [panel, table] of this.panels) {
      try {
        panel.update(table ? { ...what, order: this.address.sort[table] } : what);
      } catch (error) {
        console.error(error); // one panel that cannot be shown takes no other with it
      }
    }
  }

  renderFrame({ now, view, process }) {
    const gravest = now.processes[0];
    writeBreakable(byId("answer"), str(now.answer));
    const section = document.querySelector(".answer");
    set(section, "data-exit", now.exit_code);
    set(section, "data-kind", str(gravest?.verdict.kind));
    const icon = now.exit_code === 2 || !gravest ? "unknown" : iconOf(gravest);
    turn(byId("answer-icon"), icon);
    this.renderTitle(now);
    write(byId("tool"), `${str(now.tool)}.`);
    set(byId("history-link"), "href", `/api/history?${this.query}`);
    byId("moment").hidden = view.at === null;
    if (view.at !== null) {
      write(
        byId("moment-text"),
        `At ${moment(view.at, now.time_unix_s)}, ${duration(Math.max(0, now.time_unix_s - view.at))} ago.`,
      );
      write(byId("moment-note"), "Verdicts and requests stay those of now.");
    }
    this.renderChoice(now, process);
  }

  renderTitle(now) {
    const words = { 0: "Nothing alarming", 1: "ALARM", 2: "Cannot tell" };
    const title = `${words[now.exit_code] ?? "vLLM"} · ${clock(now.time_unix_s, false)} · vllm-kvfix`;
    if (document.title !== title) document.title = title;
    const colour = ICON_COLOURS[now.exit_code] ?? ICON_COLOURS[2];
    const shape =
      now.exit_code === 1
        ? "%3Cpath d='M7 1h10l6 6v10l-6 6H7l-6-6V7z'/%3E%3Cpath d='M10 5h4v9h-4zM10 16h4v3h-4z' fill='white'/%3E"
        : "%3Ccircle cx='12' cy='12' r='10'/%3E";
    set(
      byId("icon"),
      "href",
      `data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 24 24' fill='${colour}'%3E${shape}%3C/svg%3E`,
    );
  }

  renderChoice(now, process) {
    const select = byId("process");
    const options =
      process && !now.processes.some(({ key }) => key === process.key) ? [...now.processes, process] : now.processes;
    each(
      select,
      options,
      ({ key }) => key,
      ({ key }) => h("option", { value: key }),
      (option, item) => writeStranger(option, `${nameOf(item)}: ${str(item.verdict.kind ?? "ended")}`),
    );
    if (process && select.value !== process.key) select.value = process.key;
    const { process: asked } = this.address;
    const isLost = asked !== null && process?.key !== asked;
    write(
      byId("detail-note"),
      isLost ? "The process of this link is not known any more: this is the gravest one." : "",
    );
  }
}

new Page().start();
