// SPDX-License-Identifier: Apache-2.0
// How the sidecar itself is: what it costs, what it could not deliver, and what it could not read.

import { each, figure, h, set, show, str, stranger, term, write, writeStranger } from "./dom.js";
import { isKnownMark } from "./marks.js";
import { nameOf } from "./process.js";
import { count, duration, isNumber, iso, many, moment, SCOPES, size } from "./words.js";

const DELIVERED = { spans: "Spans", events: "Events", metric_exports: "Metric exports" };
const COUNTED = {
  spans: ["exported", "failed", "dropped", "unsampled"],
  events: ["exported", "failed", "dropped"],
  metric_exports: ["exported", "failed"],
};
const OUTCOMES = ["exported", "failed", "dropped", "unsampled"];
const TO = { spans: "traces", events: "events", metric_exports: "metrics" };

export class Sidecar {
  constructor(section) {
    this.health = h("p", { class: "health" });
    this.facts = {
      rss_bytes: [figure("sidecar.rss_bytes"), size],
      cpu_ratio: [
        figure("sidecar.cpu_ratio"),
        (value) => (isNumber(value) ? `${(value * 100).toFixed(value < 0.1 ? 1 : 0)} % of a core` : ""),
      ],
      uptime_s: [figure("sidecar.uptime_s"), (value) => duration(value ?? NaN)],
      errors: [figure("sidecar.errors"), count],
    };
    this.version = stranger();
    this.listen = stranger();
    this.folders = h("ul", { class: "plain" });
    const labels = { rss_bytes: "Its memory", cpu_ratio: "Its CPU", uptime_s: "Up for", errors: "Errors" };
    const facts = h(
      "dl",
      { class: "figures" },
      ...Object.entries(this.facts).map(([name, [button]]) => term(labels[name], button)),
      term("Version", this.version),
      term("Listens at", this.listen),
      h("div", { class: "pair wide" }, h("dt", {}, "Looks for rings in"), h("dd", {}, this.folders)),
    );
    this.cells = {};
    section.querySelector(".body").append(this.health, facts, this.deliveries());
  }

  deliveries() {
    const rows = Object.entries(DELIVERED).map(([name, label]) => {
      const cells = OUTCOMES.map((outcome) => {
        if (!COUNTED[name].includes(outcome)) return h("td", {});
        const button = (this.cells[`${name}.${outcome}`] = figure(`sidecar.${name}.${outcome}`));
        return h("td", { class: "number" }, button);
      });
      const to = (this.cells[`${name}.to`] = stranger("bdi", { class: "quiet" }));
      return h("tr", {}, h("th", { scope: "row" }, label, h("br"), to), ...cells);
    });
    const head = ["", "Delivered", "Failed", "Dropped", "Unsampled"].map((text) =>
      text ? h("th", { scope: "col", class: "number" }, text) : h("td", {}),
    );
    const table = h(
      "table",
      { class: "deliveries" },
      h("caption", {}, "What it sent on"),
      h("thead", {}, h("tr", {}, ...head)),
      h("tbody", {}, ...rows),
    );
    return h("div", { class: "scroll", role: "group", "aria-label": "What the sidecar sent on", tabindex: "0" }, table);
  }

  update({ now }) {
    const { sidecar } = now;
    const ill = sidecar.alive === false || sidecar.ready === false;
    const why = (sidecar.why_not ?? []).map(str).join("; ");
    set(this.health, "data-health", ill ? "ill" : "well");
    write(
      this.health,
      ill
        ? `It is ${sidecar.alive === false ? "not well" : "not ready"}: ${why || "it does not say why"}.`
        : `It is well${why ? `: ${why}` : ""}.`,
    );
    for (const [name, [button, words]] of Object.entries(this.facts))
      show(button, sidecar[name] ?? null, words(sidecar[name]), "it does not know");
    writeStranger(this.version, `${str(sidecar.version)} (pid ${str(sidecar.pid)})`);
    writeStranger(this.listen, sidecar.listen);
    each(
      this.folders,
      (sidecar.folders ?? []).map(str),
      (folder) => folder,
      () => h("li", {}, stranger("bdi", { class: "mono" })),
      (item, folder) => writeStranger(item.firstChild, folder),
    );
    for (const name of Object.keys(DELIVERED)) {
      for (const outcome of OUTCOMES) {
        const button = this.cells[`${name}.${outcome}`];
        if (!button) continue;
        const value = sidecar[name]?.[outcome] ?? null;
        show(button, value, count(value), "it does not count that");
        set(button, "data-bad", (outcome === "failed" || outcome === "dropped") && value > 0 ? "true" : null);
      }
      const to = str(sidecar.destinations?.[TO[name]]);
      writeStranger(this.cells[`${name}.to`], to === "none" || to === "" ? "sent nowhere" : `to ${to}`);
    }
  }
}

/** What could not be read, and why. */
export class Unread {
  constructor(section) {
    this.list = h("ul", { class: "unread" });
    this.none = section.querySelector("[data-testid=empty]");
    this.count = section.querySelector(".of");
    section.querySelector(".body").append(this.list);
  }

  update({ now }) {
    const items = [
      ...this.scopes(now),
      ...this.files(now),
      ...(now.notes ?? []).map((note) => ({ name: "", text: str(note), mark: "data-note", of: "" })),
    ];
    this.none.hidden = items.length > 0;
    write(this.count, items.length ? many(items.length, "entry", "entries") : "");
    each(
      this.list,
      items,
      ({ mark, name, text, of }) => JSON.stringify([mark, name, text, of]),
      makeItem,
      () => undefined,
    );
  }

  /** The same reason of several processes is told once. */
  scopes(now) {
    const found = new Map();
    for (const process of now.processes) {
      for (const [scope, reason] of Object.entries(process.unread ?? {})) {
        const key = JSON.stringify([scope, reason]);
        const item = found.get(key) ?? { mark: "data-scope", of: scope, name: "", text: str(reason), who: [] };
        item.who.push(nameOf(process));
        found.set(key, item);
      }
    }
    return [...found.values()].map(({ who, ...item }) => {
      const few = who.length > 3 ? `${who.slice(0, 3).join(", ")} and ${who.length - 3} more` : who.join(", ");
      const what = Object.hasOwn(SCOPES, item.of) ? SCOPES[item.of] : item.of;
      return { ...item, name: `${few}: ${what}` };
    });
  }

  files(now) {
    return Object.entries(now.not_followed ?? {}).map(([path, reason]) => ({
      mark: "data-not-followed",
      of: path,
      name: path,
      text: str(reason),
    }));
  }
}

function makeItem({ mark, of, name, text }) {
  const item = h("li", { [mark]: of || true });
  if (name) {
    item.append(stranger(), " ");
    writeStranger(item.firstChild, name);
  }
  item.append(h("span", { class: "quiet", dir: "auto" }, text));
  return item;
}

/** What happened, the newest first. */
export class Events {
  constructor(section, { pin }) {
    this.pin = pin;
    this.list = section.querySelector("#marks");
    this.none = section.querySelector("[data-testid=empty]");
  }

  update({ now }) {
    const marks = [...(now.marks ?? [])].sort((a, b) => b.time_unix_s - a.time_unix_s);
    this.none.hidden = marks.length > 0;
    const keyOf = ({ time_unix_s: time, kind, key, text }) => JSON.stringify([time, kind, key, text]);
    each(
      this.list,
      marks,
      keyOf,
      (mark) => this.item(mark),
      (item, mark) => write(item.firstChild, moment(mark.time_unix_s, now.time_unix_s)),
    );
  }

  item({ time_unix_s: time, kind, key, text }) {
    const button = h("button", { type: "button", class: "moment", title: `Look at ${iso(time)}` });
    button.addEventListener("click", () => this.pin(time));
    const badge = h("span", { class: `badge mark-${isKnownMark(kind) ? kind.replace(" ", "-") : "other"}` }, str(kind));
    const item = h("li", { "data-kind": str(kind), "data-key": str(key) }, button, badge, stranger());
    writeStranger(item.lastChild, text);
    return item;
  }
}
