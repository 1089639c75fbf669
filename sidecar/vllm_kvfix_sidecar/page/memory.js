// SPDX-License-Identifier: Apache-2.0
// Memory over time: of all processes against the limit, and of one by what it consists of.

import { Chart } from "./chart.js";
import { each, figure, h, set, show, term, write } from "./dom.js";
import { extended, rebased, valueAt, within } from "./series.js";
import { categoryWord, isGoneHelper, memoryOf, nameOf, whyNot } from "./process.js";
import { count, duration, isNumber, SCOPES, size } from "./words.js";

const SHOWN_AT_FIRST = 8;
const MODES = {
  memory: { label: "size", title: "Memory of each process" },
  "limit-usage": { label: "share of the limit", title: "Used of the limit" },
};
const SMAPS = ["heap", "anonymous", "stacks", "shared_memory", "files", "ring", "driver", "rest"];
const STATUS = ["anon", "file", "shmem", "swap"];

/** All processes: how large they are, or how full their limit is; and how they changed. */
export class Overview {
  constructor(section, { pin }) {
    this.mode = "memory";
    this.colours = new Map();
    this.seen = new Set();
    this.chart = new Chart({ name: "memory", title: MODES.memory.title, height: 240, pin });
    this.changes = new Chart({ name: "change", title: "Change since the left edge", height: 240, pin });
    // Who is hidden in one is in both.
    this.changes.hidden = this.chart.hidden;
    this.chart.onToggle = this.changes.onToggle = () => this.update(this.what);
    this.buttons = Object.entries(MODES).map(([mode, { label }]) => this.button(mode, label));
    const modes = h(
      "div",
      { class: "modes", role: "group", "aria-label": "What the first chart shows" },
      ...this.buttons,
    );
    section
      .querySelector(".body")
      .append(modes, h("div", { class: "pair-of-charts" }, this.chart.element, this.changes.element));
  }

  button(mode, label) {
    const button = h(
      "button",
      { type: "button", "data-mode": mode, "aria-pressed": String(mode === this.mode) },
      label,
    );
    button.addEventListener("click", () => {
      this.mode = mode;
      for (const other of this.buttons) set(other, "aria-pressed", String(other === button));
      if (this.what) this.update(this.what);
    });
    return button;
  }

  update(what) {
    this.what = what;
    const { now, overview, view } = what;
    const processes = new Map(now.processes.map((process) => [process.key, process]));
    const isShown = (key) => !processes.has(key) || !isGoneHelper(processes.get(key));
    const keys = [...new Set([...processes.keys(), ...Object.keys(overview?.processes ?? {})])].filter(isShown);
    const told = keys.map((key) => this.about(key, processes.get(key), overview?.processes?.[key]));
    const sizes = told
      .map((about) => ({ ...about, series: within(about.memory, view.from, view.to) }))
      .filter(hasPoints);
    for (const { key } of sizes.slice(SHOWN_AT_FIRST)) this.hideOnce(key);
    const marks = worthDrawing(view.marks, processes);
    const isUsage = this.mode === "limit-usage";
    write(this.chart.title, MODES[this.mode].title);
    set(this.chart.element, "data-chart", this.mode);
    const lines = isUsage
      ? byLimit(told.map((about) => ({ ...about, series: usage(about, view) })).filter(hasPoints))
      : sizes;
    const limit = isUsage ? { value: 1, label: "the limit" } : tightest(sizes);
    this.chart.update({ key: "", unit: isUsage ? "share" : "size", lines, limit, marks, view });
    const changed = sizes.map((line) => ({ ...line, series: rebased(line.series) }));
    this.changes.update({ key: "", unit: "change", lines: changed, marks, view });
  }

  hideOnce(key) {
    if (this.seen.has(key)) return;
    this.seen.add(key);
    this.chart.hidden.add(key);
  }

  /** What is known of a process, up to now. */
  about(key, process, history) {
    const live = process && !isNumber(process.ended_unix_s);
    const extend = (series, value) => (live ? extended(series, this.what.view.now, value) : series);
    if (!this.colours.has(key)) this.colours.set(key, this.colours.size);
    const limit = process?.limit ?? null;
    return {
      key,
      label: process ? nameOf(process) : `pid ${key.split("-")[0]}, ended`,
      colour: this.colours.get(key),
      memory: extend(history?.memory, process && memoryOf(process)),
      used: extend(history?.limit_usage, limit?.usage_bytes),
      limit: limit?.limit_bytes ?? history?.limit_bytes ?? null,
      whose: limit ? `${limit.of} ${limit.limit_bytes} ${limit.of === "host" ? "" : limit.usage_bytes}` : key,
    };
  }
}

const hasPoints = ({ series }) => series.t.length > 0;

function usage({ used, limit }, view) {
  const { t, v } = within(used, view.from, view.to);
  return { t: limit > 0 ? t : [], v: v.map((value) => (isNumber(value) ? value / limit : null)) };
}

function tightest(lines) {
  const limits = lines.map(({ limit }) => limit).filter(isNumber);
  if (!limits.length) return null;
  const value = Math.min(...limits);
  return { value, label: `the limit of ${size(value)}` };
}

/** One line for all processes that count against the same limit. */
function byLimit(lines) {
  const found = new Map();
  for (const line of lines) found.set(line.whose, [...(found.get(line.whose) ?? []), line]);
  return [...found.values()].map((same) => {
    const longest = same.reduce((a, b) => (a.series.t[0] <= b.series.t[0] ? a : b));
    const more = same.length > 1 ? ` and ${same.length - 1} more` : "";
    return { ...same[0], series: longest.series, label: `${same[0].label}${more}` };
  });
}

/** Helpers come and go all the time; what growths and servers do is worth a line across all. */
function worthDrawing(marks, processes) {
  return marks.filter(
    ({ kind, key }) => (kind !== "started" && kind !== "ended") || processes.get(key)?.role !== "child",
  );
}

/** One process. */
export class Composition {
  constructor(section, { pin }) {
    this.parts = new Chart({ name: "categories", title: "Memory by category", height: 240, pin });
    this.malloc = new Chart({ name: "malloc", title: "malloc: in use, and kept of what was freed", height: 180, pin });
    this.figures = h("dl", { class: "scopes" });
    this.body = section.querySelector(".body");
    this.body.append(
      h("div", { class: "pair-of-charts" }, this.parts.element, this.malloc.element),
      h("details", { class: "all-figures" }, h("summary", {}, "All figures of this process"), this.figures),
    );
  }

  update({ process, detail, view }) {
    this.body.hidden = !process;
    if (!process) return;
    const told = withNow(detail?.series ?? {}, process, view);
    const smaps = SMAPS.filter((name) => told[`smaps.${name}`]?.t.length);
    const [scope, names] = smaps.length
      ? ["smaps", smaps]
      : ["status", STATUS.filter((name) => told[`status.${name}`]?.t.length)];
    const why = smaps.length ? "" : `without its maps (${whyNot(process, "smaps")}) the categories are coarse`;
    const lines = names.map((name) => this.line(scope, name, told, view, [...SMAPS, ...STATUS].indexOf(name)));
    const largest = lines.sort((a, b) => (b.last ?? 0) - (a.last ?? 0)).filter(({ last }) => last !== 0);
    this.parts.update({
      key: process.key,
      unit: "size",
      lines: largest,
      stack: true,
      limit: limitOf(process),
      marks: view.marksOf(process.key),
      view,
      note: why,
    });
    this.updateMalloc(process, told, view);
    each(this.figures, figuresOf(process, told, view), ({ name }) => name, makeFigure, writeFigure);
  }

  line(scope, name, told, view, colour) {
    const series = within(told[`${scope}.${name}`], view.from, view.to);
    return { key: name, label: categoryWord(name), series, colour, last: series.v[series.v.length - 1] ?? null };
  }

  updateMalloc(process, told, view) {
    const lines = [
      ["in_use", "in use", 0],
      ["retained", "kept after it was freed", 1],
    ]
      .filter(([name]) => told[`malloc.${name}`]?.t.length)
      .map(([name, label, colour]) => ({
        key: name,
        label,
        colour,
        series: within(told[`malloc.${name}`], view.from, view.to),
      }));
    this.malloc.element.hidden = lines.length === 0;
    if (lines.length)
      this.malloc.update({
        key: process.key,
        unit: "size",
        lines,
        stack: true,
        marks: view.marksOf(process.key),
        view,
      });
  }
}

/** The history with what is known now at its ends. */
function withNow(told, process, view) {
  if (isNumber(process.ended_unix_s)) return told;
  const longer = Object.entries(told).map(([name, series]) => {
    const [scope, figure_] = name.split(".");
    const figures = process.memory?.[scope] ?? {};
    return [name, extended(series, view.now, figures[`${figure_}_bytes`] ?? figures[figure_])];
  });
  return Object.fromEntries(longer);
}

function limitOf(process) {
  const value = process.limit?.limit_bytes;
  return isNumber(value) ? { value, label: `the limit of ${size(value)}` } : null;
}

/** The latest figures of each scope, or those of the moment. */
function figuresOf(process, told, view) {
  const found = [];
  for (const scope of Object.keys(SCOPES)) {
    for (const [name, value] of Object.entries(process.memory?.[scope] ?? {})) {
      const series = told[`${scope}.${name.replace(/_bytes$/, "")}`];
      found.push({
        name: `${scope}.${name}`,
        value: view.at === null ? value : valueAt(series, view.at, view.now, view.range),
      });
    }
  }
  return found;
}

function makeFigure({ name }) {
  return term(
    name
      .replace(/_bytes$/, "")
      .replaceAll("_", " ")
      .replace(".", ": "),
    figure(`all.${name}`),
  );
}

function writeFigure(pair, { name, value }) {
  const words = name.endsWith("_bytes") ? size : name.endsWith("_us") ? (v) => duration(v / 1e6) : count;
  show(pair.querySelector("button"), value ?? null, words(value), "not known of this moment");
}
