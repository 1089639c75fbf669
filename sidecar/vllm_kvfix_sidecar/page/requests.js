// SPDX-License-Identifier: Apache-2.0
// The requests that hold most blocks now, with the ids that find them elsewhere.

import { figure, h, icon, set, show, str, stranger, write, writeStranger } from "./dom.js";
import { SortedTable } from "./table.js";
import { count, many, seconds } from "./words.js";

const id = (name, label, hint) => ({
  id: name,
  label,
  hint,
  make: () =>
    h(
      "span",
      { class: "id" },
      stranger("bdi", { class: "mono", "data-field": name }),
      h("button", { type: "button", class: "copy" }, icon("copy")),
    ),
  write(cell, row) {
    const value = str(row[name]);
    const [text, button] = cell.children;
    writeStranger(text, value || "none");
    set(text, "class", value ? "mono" : "quiet");
    button.hidden = value === "";
    set(button, "data-copy", value || null);
    set(button, "aria-label", `Copy ${label.toLowerCase()} ${value.slice(0, 100)}`);
    set(button, "title", "Copy");
  },
  value: (row) => str(row[name]) || null,
});

const number = (name, label, hint, words) => ({
  id: name,
  label,
  hint,
  number: true,
  make: () => figure(name),
  write: (cell, row) => show(cell, row[name] ?? null, words(row[name]), "not told"),
  value: (row) => row[name] ?? null,
});

const COLUMNS = [
  id("request_id", "Request", "As vLLM's own span has it"),
  number("blocks", "Blocks", "Blocks that it holds", count),
  number("peak_blocks", "At most", "Most blocks that it held at a time", count),
  {
    id: "state",
    label: "State",
    make: () => h("span", { class: "state", "data-field": "state" }),
    write(cell, row) {
      write(cell, str(row.state));
      set(cell, "data-state", str(row.state));
    },
    value: (row) => str(row.state),
  },
  number("held_s", "Held for", "How long it has held blocks", seconds),
  number("queued_s", "Queued for", "How long it waited until it first ran", seconds),
  number("preemptions", "Preempted", "Times it lost its blocks while it ran", count),
  {
    id: "engine",
    label: "Engine",
    make: () => stranger("bdi", { "data-field": "engine" }),
    write: (cell, row) => writeStranger(cell, row.engineName),
    value: (row) => row.engineName,
  },
  id("trace_id", "Trace", "Finds the request in the trace store"),
];

export class Requests {
  constructor(section, { sort }) {
    this.of = section.querySelector(".of");
    this.none = section.querySelector("[data-testid=empty]");
    this.table = new SortedTable({
      name: "requests",
      caption: "Requests that hold most KV blocks",
      label: "Requests that hold most KV blocks",
      columns: COLUMNS,
      keyOf: (row) => `${row.engine}/${row.engine_request_id ?? row.request_id}`,
      mark: (row, item) => set(row, "data-request", str(item.request_id)),
      sort,
    });
    section.querySelector(".body").append(this.table.element);
  }

  update({ now, view, order }) {
    const names = new Map(now.processes.map(({ key, title, pid }) => [key, `${str(title)} ${str(pid)}`]));
    const rows = now.requests.map((row) => ({
      ...row,
      request_id: row.request_id ?? row.engine_request_id,
      engineName: names.get(row.engine) ?? str(row.engine),
    }));
    this.none.hidden = rows.length > 0;
    this.table.element.hidden = rows.length === 0;
    this.of.hidden = rows.length === 0;
    write(
      this.of,
      view.at === null
        ? `the ${many(rows.length, "request")} that hold most, now`
        : "those of now: requests of earlier moments are in the traces",
    );
    this.table.update(rows, order);
  }
}
