// SPDX-License-Identifier: Apache-2.0
// The containers of one process that are tracked: how full, what drains them, and how they grow.

import { Chart } from "./chart.js";
import { figure, h, set, show, str, stranger, write, writeBreakable } from "./dom.js";
import { extended, valueAt, within } from "./series.js";
import { SortedTable } from "./table.js";
import { nameOf } from "./process.js";
import { change, clean, count, duration, isNumber, moment, share, size } from "./words.js";

const LINES = 6;

const number = (id, label, hint, words, why) => ({
  id,
  label,
  hint,
  number: true,
  make: () => figure(id),
  write: (cell, row) => show(cell, row[id] ?? null, words(row[id]), why(row)),
  value: (row) => row[id] ?? null,
});

const COLUMNS = [
  {
    id: "path",
    label: "Container",
    make: () =>
      h(
        "span",
        { class: "path" },
        stranger("bdi", { class: "mono" }),
        h("span", { class: "quiet" }, figure("members"), " alike"),
        h("span", { class: "badge badge-culprit" }, figure("bytes_per_hour"), " an hour"),
      ),
    write(cell, row) {
      const [path, members, pace] = cell.children;
      writeBreakable(path, clean(row.path));
      set(path, "title", clean(row.path));
      members.hidden = !(row.members > 1);
      show(members.firstChild, row.members ?? null, count(row.members));
      pace.hidden = !isNumber(row.bytes_per_hour);
      show(pace.firstChild, row.bytes_per_hour, change(row.bytes_per_hour));
      set(pace, "data-alarming", row.isAlarming);
      set(pace, "title", row.culprit ? str(row.culprit.why) : null);
    },
    value: (row) => str(row.path),
  },
  number("size_bytes", "Size", "Estimate of what would be free without it", size, () => "its size was not told"),
  number(
    "change_bytes",
    "Change",
    "How much it grew within the range that is shown",
    change,
    () => "no history of it within the range",
  ),
  number("entries", "Entries", "Entries in it", count, () => "its length was not told"),
  {
    id: "capacity_entries",
    label: "Capacity",
    hint: "Most entries that there can be",
    number: true,
    make: () =>
      h(
        "span",
        { class: "capacity" },
        h("span", { class: "bar", "aria-hidden": "true" }, h("span", { class: "bar-fill" })),
        figure("capacity_entries"),
      ),
    write(cell, row) {
      const [bar, button] = cell.children;
      const known = isNumber(row.capacity_entries);
      show(button, known ? row.capacity_entries : null, count(row.capacity_entries), "nothing that is known bounds it");
      if (!known) write(button, "no bound known");
      const full =
        known && row.capacity_entries > 0 && isNumber(row.entries) ? row.entries / row.capacity_entries : null;
      bar.hidden = full === null;
      bar.firstChild.style.width = `${Math.min(100, (full ?? 0) * 100)}%`;
      set(bar, "title", full === null ? null : `${share(full)} full`);
    },
    value: (row) => row.capacity_entries ?? null,
  },
  number(
    "drain_ratio",
    "Drained",
    "Entries that left it, of those that came: a leak has 0 %",
    share,
    () => "nothing is known to have come or gone",
  ),
  {
    ...number("orphans", "Orphans", "Keys of no live request, at least", count, () => "its entries are no requests"),
    make: () => h("span", { class: "orphans" }, figure("orphans"), h("span", { class: "quiet" })),
    write(cell, row) {
      show(cell.firstChild, row.orphans ?? null, count(row.orphans), "its entries are no requests");
      write(cell.lastChild, row.orphans > 0 && isNumber(row.orphan_age_s) ? `for ${duration(row.orphan_age_s)}` : "");
    },
  },
];

export class Containers {
  constructor(section, { sort, pin }) {
    this.of = section.querySelector(".of");
    this.none = section.querySelector("[data-testid=empty]");
    this.table = new SortedTable({
      name: "containers",
      caption: "Tracked containers of the process",
      label: "Tracked containers",
      columns: COLUMNS,
      keyOf: ({ path }) => path,
      mark(row, item) {
        set(row, "data-path", item.path);
        set(row, "data-culprit", item.culprit ? "true" : null);
      },
      sort,
    });
    this.chart = new Chart({ name: "containers", title: "Size of those that changed most", pin, height: 180 });
    section.querySelector(".body").append(this.table.element, this.chart.element);
  }

  update({ process, detail, view, order }) {
    const rows = process ? rowsOf(process, detail, view) : [];
    this.none.hidden = rows.length > 0;
    this.table.element.hidden = rows.length === 0;
    write(
      this.of,
      process ? `of ${nameOf(process)}, ${view.at === null ? "now" : `at ${moment(view.at, view.now)}`}` : "",
    );
    this.table.update(rows, order);
    this.draw(process, detail, rows, view);
  }

  draw(process, detail, rows, view) {
    const told = rows.filter(
      ({ path, change_bytes: grown }) => isNumber(grown) && Object.hasOwn(detail?.containers ?? {}, path),
    );
    const most = told.toSorted((a, b) => Math.abs(b.change_bytes) - Math.abs(a.change_bytes)).slice(0, LINES);
    const moved = most.filter(({ change_bytes: grown }) => grown !== 0);
    this.chart.element.hidden = moved.length === 0;
    if (!moved.length) return;
    // A path keeps its colour while others pass it.
    this.colours ??= new Map();
    const lines = moved.map(({ path, series }) => ({
      key: path,
      label: tail(path),
      all: path,
      series,
      colour: this.colour(path),
    }));
    this.chart.update({ key: process.key, unit: "size", lines, marks: view.marksOf(process.key), view });
  }

  colour(path) {
    if (!this.colours.has(path)) this.colours.set(path, this.colours.size);
    return this.colours.get(path);
  }
}

/** The end of a path says most: single_type_managers[0].new_block_ids. */
function tail(path) {
  const parts = path.split(".");
  return parts.length > 2 ? `…${parts.slice(-2).join(".")}` : path;
}

/** Those to blame come first. */
function rowsOf(process, detail, view) {
  const culprits = new Map((process.verdict.culprits ?? []).map((culprit) => [culprit.path, culprit]));
  const rows = (process.containers ?? []).map((container) => {
    const path = str(container.path);
    const culprit = culprits.get(path);
    const row = {
      ...container,
      path,
      culprit,
      bytes_per_hour: culprit?.bytes_per_hour ?? null,
      change_bytes: null,
      isAlarming: process.verdict.alarming === true,
    };
    if (Object.hasOwn(detail?.containers ?? {}, path)) addHistory(row, detail.containers[path], view);
    return row;
  });
  return [...rows.filter(({ culprit }) => culprit), ...rows.filter(({ culprit }) => !culprit)];
}

function addHistory(row, { t, entries, size: v }, view) {
  const sizes = extended({ t, v }, view.now, row.size_bytes);
  row.series = within(sizes, view.from, view.to);
  const shown = within(sizes, view.from, view.at ?? view.to).v.filter(isNumber);
  if (shown.length > 1) row.change_bytes = shown[shown.length - 1] - shown[0];
  if (view.at === null) return;
  row.entries = valueAt({ t, v: entries }, view.at, view.now, view.range);
  row.size_bytes = valueAt({ t, v }, view.at, view.now, view.range);
  // Of then, these are not known.
  row.drain_ratio = row.orphans = row.orphan_age_s = null;
}
