// SPDX-License-Identifier: Apache-2.0
// One chart by uPlot, with what a canvas lacks: a legend of copyable figures, a sentence, a table, and the keyboard.

import { each, figure, h, set, show, stranger, write, writeStranger } from "./dom.js";
import { drawLimit, drawMarks, drawMoment } from "./marks.js";
import { countScale, shareScale, sizeScale, timeLabels } from "./scales.js";
import { aligned, indexAt, stacked, thinned, told, valueAt } from "./series.js";
import { NEWEST } from "./view.js";
import { change, count, iso, isNumber, moment, share, size, UNKNOWN } from "./words.js";

const uPlot = globalThis.uPlot;
const UNITS = {
  size: { words: size, scale: sizeScale },
  change: { words: change, scale: sizeScale },
  count: { words: count, scale: countScale },
  share: { words: share, scale: shareScale },
};
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3]];
const COLOURS = 8;
const TABLE_ROWS = 60;
const PAGE = 10;

const probe = document.body.appendChild(h("span", { class: "unseen" }));

/** A colour or font of the style sheet, as a canvas takes it. */
function css(name) {
  if (name === "--font") return getComputedStyle(probe).fontFamily;
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

const faint = (colour) => colour.replace("rgb(", "rgba(").replace(")", ", 0.4)");

export class Chart {
  /** `pin(time)` is told which moment was chosen, null: the newest. */
  constructor({ name, title, height = 220, pin, heading = "h3" }) {
    this.name = name;
    this.height = height;
    this.pin = pin;
    this.hidden = new Set();
    this.hover = null;
    this.isKeyed = false;
    this.canvas = h("div", { class: "canvas", "aria-hidden": "true" });
    this.plot = h(
      "div",
      { class: "plot", role: "slider", tabindex: "0", "aria-label": `${title}: choose a moment` },
      this.canvas,
    );
    this.legend = h("ul", { class: "legend" });
    this.when = h("span", { class: "when" });
    this.caption = h("p", { class: "caption" });
    this.table = h("table", {});
    this.details = h(
      "details",
      { class: "as-table" },
      h("summary", {}, "As a table"),
      h("div", { class: "scroll", tabindex: "0", role: "group", "aria-label": `${title}, as a table` }, this.table),
    );
    this.title = h(heading, {}, title);
    this.element = h(
      "figure",
      { class: "chart", "data-testid": "chart", "data-chart": name },
      h("div", { class: "chart-head" }, this.title, this.when),
      this.plot,
      this.legend,
      h("figcaption", {}, this.caption, this.details),
    );
    this.details.addEventListener("toggle", () => this.tabulate());
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.plot.addEventListener("pointermove", () => {
      this.isKeyed = false;
    });
    this.plot.addEventListener("click", (event) => this.click(event));
    new ResizeObserver(() => this.fit()).observe(this.canvas);
    document.addEventListener("themechange", () => this.rebuild());
  }

  /**
   * what: {key, unit, lines: [{key, label, all: the whole of a short label, series, colour}], stack, limit: {value, label}, marks, view, note}
   * view: {from, to, at, now, range}
   */
  update(what) {
    this.what = what;
    const unit = UNITS[what.unit];
    const shown = what.lines.filter((line) => !this.hidden.has(line.key));
    this.lines = shown;
    const [times, ...columns] = aligned(shown.map(({ series }) => series));
    this.values = columns;
    this.data = [times, ...(what.stack ? stacked(this.values) : this.values)];
    set(this.element, "data-key", what.key);
    this.plot.hidden = what.lines.every(({ series }) => series.t.length === 0);
    set(this.element, "data-points", times.length);
    const first = what.lines[0]?.series;
    set(this.element, "data-last", first?.v.length ? first.v[first.v.length - 1] : "");
    this.draw(unit);
    this.tell(unit);
    if (this.details.open) this.tabulate();
  }

  /** A line was hidden, or shown again. */
  onToggle() {
    this.update(this.what);
  }

  draw(unit) {
    const shape = JSON.stringify([this.what.unit, this.what.stack ?? false, this.lines.map(({ colour }) => colour)]);
    if (shape !== this.shape) {
      this.shape = shape;
      this.uplot?.destroy();
      this.uplot = null;
    }
    if (!this.uplot) {
      if (!this.canvas.clientWidth) return; // it is not shown; fit() comes when it is
      this.uplot = new uPlot(this.options(unit), this.data, this.canvas);
      return;
    }
    this.uplot.setData(this.data, true);
  }

  rebuild() {
    this.shape = null;
    if (this.what) this.draw(UNITS[this.what.unit]);
  }

  fit() {
    const width = this.canvas.clientWidth;
    if (!width || !this.what) return;
    if (!this.uplot) this.draw(UNITS[this.what.unit]);
    else if (this.uplot.width !== width) this.uplot.setSize({ width, height: this.height });
  }

  options(unit) {
    const axis = { stroke: css("--muted"), grid: { stroke: css("--grid"), width: 1 }, ticks: { show: false } };
    const font = `12px ${css("--font")}`;
    return {
      width: this.canvas.clientWidth,
      height: this.height,
      legend: { show: false },
      cursor: { drag: { x: false, y: false }, sync: { key: "moment" }, y: false, points: { size: 6 } },
      scales: {
        x: { time: true, range: () => [this.what.view.from, this.what.view.to] },
        y: { range: (_, low, high) => unit.scale.range(low, high, this.what.limit ?? null, this.what.stack) },
      },
      axes: [
        { ...axis, font, size: 30, space: 70, values: (_, splits, __, ___, step) => timeLabels(splits, step) },
        {
          ...axis,
          font,
          size: 68,
          splits: (_, __, low, high) => unit.scale.splits(low, high),
          values: (_, splits) => unit.scale.labels(splits, this.what.unit === "change"),
        },
      ],
      series: [{}, ...this.lines.map(({ colour }) => this.style(colour))],
      bands: this.what.stack ? this.lines.slice(1).map((_, at) => ({ series: [at + 1, at + 2] })) : [],
      hooks: {
        draw: [
          (u) => {
            drawMarks(u, this.what.marks, css);
            drawLimit(u, this.what.limit, css);
            drawMoment(u, this.what.view.at, css);
          },
        ],
        setCursor: [(u) => this.look(u)],
      },
    };
  }

  style(colour) {
    const stroke = css(`--c${colour % COLOURS}`);
    const line = { stroke, width: 2, points: { show: false }, spanGaps: false };
    if (this.what.stack) return { ...line, width: 1, fill: faint(stroke) };
    return { ...line, dash: DASHES[Math.floor(colour / 2) % DASHES.length] };
  }

  look(u) {
    if (this.isKeyed) return;
    const left = u.cursor.left;
    const hover = isNumber(left) && left >= 0 ? u.posToVal(left, "x") : null;
    if (hover !== this.hover) {
      this.hover = hover;
      this.tellValues(UNITS[this.what.unit]);
    }
  }

  /** The moment that the legend is of. */
  get moment() {
    const { view } = this.what;
    return this.hover ?? view.at ?? view.to;
  }

  tell(unit) {
    const { lines, limit, note, view } = this.what;
    each(
      this.legend,
      lines,
      (line) => line.key,
      (line) => this.makeEntry(line),
      (entry, line) => this.writeEntry(entry, line),
    );
    this.tellValues(unit);
    const sentences = this.lines.slice(0, 3).map(({ label, series }) => `${label} ${told(series, unit.words)}`);
    if (this.lines.length > 3) sentences.push(`${this.lines.length - 3} more are in the table`);
    if (limit && this.what.unit !== "share")
      sentences.push(limit.value > (this.uplot?.scales.y.max ?? Infinity) ? `${limit.label} lies above` : limit.label);
    if (note) sentences.push(note);
    write(
      this.caption,
      !this.plot.hidden ? `${sentences.join("; ")}.` : `No figures of this stretch of time${note ? `: ${note}` : ""}.`,
    );
    set(this.plot, "aria-valuemin", Math.round(view.from));
    set(this.plot, "aria-valuemax", Math.round(view.to));
  }

  makeEntry({ key, colour, label }) {
    const entry = {
      toggle: h(
        "button",
        { type: "button", class: "line", "aria-pressed": "true" },
        h("span", { class: `swatch c${colour % COLOURS}` }),
      ),
      name: stranger(),
      value: figure("value"),
    };
    set(entry.toggle, "title", `Show or hide ${label}`);
    entry.toggle.append(entry.name);
    entry.element = h("li", {}, entry.toggle, entry.value);
    entry.toggle.addEventListener("click", () => {
      if (!this.hidden.delete(key)) this.hidden.add(key);
      this.onToggle();
    });
    return entry;
  }

  writeEntry(entry, { key, label, all, colour }) {
    writeStranger(entry.name, label, all ?? label);
    const swatch = entry.toggle.firstChild;
    const dash = this.what.stack ? "fill" : `d${Math.floor(colour / 2) % DASHES.length}`;
    set(swatch, "class", `swatch c${colour % COLOURS} ${dash}`);
    set(entry.toggle, "aria-pressed", String(!this.hidden.has(key)));
  }

  tellValues(unit) {
    const { lines, view } = this.what;
    const at = Math.min(this.moment, view.to);
    const values = lines.map(({ series }) => valueAt(series, at, view.now, view.range));
    lines.forEach(({ key }, index) => {
      const entry = this.legend.kept?.get(key);
      if (entry) show(entry.value, values[index], unit.words(values[index]), "not known of this moment");
    });
    const live = this.hover === null && view.at === null;
    write(this.when, live ? "now" : `at ${moment(at, view.now)}`);
    set(this.when, "title", iso(at));
    const spoken = lines
      .slice(0, 4)
      .map(({ label }, index) => `${label} ${values[index] === null ? UNKNOWN : unit.words(values[index])}`);
    set(this.plot, "aria-valuenow", Math.round(at));
    set(this.plot, "aria-valuetext", `${live ? "now" : moment(at, view.now)}: ${spoken.join(", ") || "no figures"}`);
  }

  tabulate() {
    if (!this.details.open || !this.what) return;
    const unit = UNITS[this.what.unit];
    const [times] = this.data;
    const head = h("tr", {}, h("th", { scope: "col" }, "Time"));
    for (const { label } of this.lines) head.append(h("th", { scope: "col", class: "number" }, stranger("bdi")));
    this.lines.forEach(({ label }, index) => writeStranger(head.children[index + 1].firstChild, label));
    const rows = thinned(times.length, TABLE_ROWS).map((at) => {
      const row = h("tr", {}, h("th", { scope: "row", title: iso(times[at]) }, moment(times[at], this.what.view.now)));
      this.values.forEach((column) => {
        const value = column[at];
        row.append(
          h(
            "td",
            { class: "number", title: isNumber(value) ? String(value) : null },
            isNumber(value) ? unit.words(value) : "–",
          ),
        );
      });
      return row;
    });
    const caption = h("caption", {}, `${this.title.textContent}, the newest first`);
    this.table.replaceChildren(caption, h("thead", {}, head), h("tbody", {}, ...rows));
  }

  click(event) {
    if (!this.uplot || !event.target.closest(".u-over")) return;
    const left = event.clientX - this.uplot.over.getBoundingClientRect().left;
    this.pin(this.uplot.posToVal(left, "x"));
  }

  key(event) {
    if (event.altKey || event.ctrlKey || event.metaKey || !this.data?.[0].length) return;
    const [times] = this.data;
    const last = times.length - 1;
    // Wherever the mouse was left lying, the keyboard has the word until it moves.
    this.isKeyed = true;
    this.hover = null;
    // From now, the first step back is to the newest point that is not now itself.
    const { at: pinned, now } = this.what.view;
    const at = pinned === null ? indexAt(times, now - NEWEST - 0.06) + 1 : Math.max(0, indexAt(times, pinned + 0.06));
    const to = {
      ArrowLeft: at - 1,
      ArrowDown: at - 1,
      ArrowRight: at + 1,
      ArrowUp: at + 1,
      PageDown: at - PAGE,
      PageUp: at + PAGE,
      Home: 0,
      End: last,
    }[event.key];
    if (event.key === "Escape" || (to !== undefined && to > last)) this.pin(null);
    else if (to !== undefined) this.pin(times[Math.max(0, to)]);
    else return;
    event.preventDefault();
  }
}
