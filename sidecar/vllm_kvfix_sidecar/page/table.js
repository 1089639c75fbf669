// SPDX-License-Identifier: Apache-2.0
// A table that sorts by its headers, whose figures are one stop of the Tab key: arrows go from one to the next.

import { each, h, icon, set, turn } from "./dom.js";

/**
 * columns: {id, label, number, hint, make() -> element of a cell, write(element, row), value(row) -> to sort by}
 */
export class SortedTable {
  constructor({ name, caption, columns, keyOf, mark, sort, label }) {
    Object.assign(this, { name, columns, keyOf, mark, sort });
    this.heads = columns.map((column) => this.head(column));
    this.body = h("tbody", {});
    const caption_ = h("caption", { class: "unseen" }, caption);
    this.table = h("table", { "data-testid": name }, caption_, h("thead", {}, h("tr", {}, ...this.heads)), this.body);
    this.element = h("div", { class: "scroll tall", role: "group", "aria-label": label, tabindex: "0" }, this.table);
    this.body.addEventListener("keydown", (event) => this.key(event));
    this.body.addEventListener("focusin", (event) => this.enter(event.target.closest(".figure")));
  }

  head(column) {
    if (!column.value) return h("th", { scope: "col" }, column.label);
    const button = h(
      "button",
      { type: "button", class: "sort", "data-sort": column.id, title: column.hint ?? null },
      column.label,
      icon("unsorted"),
    );
    button.addEventListener("click", () => {
      const now = this.order;
      const first = column.number ? "desc" : "asc";
      const other = first === "desc" ? "asc" : "desc";
      this.sort(this.name, {
        column: column.id,
        direction: now?.column === column.id && now.direction === first ? other : first,
      });
    });
    return h("th", { scope: "col", "aria-sort": "none", class: column.number ? "number" : null }, button);
  }

  /** `order`: {column, direction}, or undefined: as the rows come. */
  update(rows, order) {
    this.order = order;
    this.columns.forEach((column, at) => {
      if (!column.value) return;
      const mine = order?.column === column.id ? order.direction : null;
      set(this.heads[at], "aria-sort", { asc: "ascending", desc: "descending" }[mine] ?? "none");
      turn(this.heads[at].querySelector("svg"), mine ?? "unsorted");
    });
    each(
      this.body,
      this.sorted(rows),
      this.keyOf,
      () => this.row(),
      (row, item) => {
        this.mark(row, item);
        this.columns.forEach((column, at) => column.write(row.children[at].firstChild, item));
      },
    );
    this.keepStop();
  }

  sorted(rows) {
    const column = this.columns.find(({ id, value }) => value && id === this.order?.column);
    if (!column) return rows;
    const sign = this.order.direction === "asc" ? 1 : -1;
    return [...rows].sort((a, b) => compare(column.value(a), column.value(b), sign));
  }

  row() {
    return h(
      "tr",
      {},
      ...this.columns.map((column) => h("td", { class: column.number ? "number" : null }, column.make())),
    );
  }

  figures(row) {
    return [...row.querySelectorAll(".figure:not(:disabled)")];
  }

  keepStop() {
    const all = this.figures(this.body);
    const stop = all.includes(this.stop) ? this.stop : all[0];
    this.stop = stop;
    for (const button of all) set(button, "tabindex", button === stop ? null : "-1");
  }

  enter(button) {
    if (!button || button === this.stop) return;
    this.stop = button;
    this.keepStop();
  }

  key(event) {
    const button = event.target.closest(".figure");
    if (!button) return;
    const row = button.closest("tr");
    const inRow = this.figures(row);
    const at = inRow.indexOf(button);
    const next = {
      ArrowRight: () => inRow[at + 1],
      ArrowLeft: () => inRow[at - 1],
      Home: () => inRow[0],
      End: () => inRow[inRow.length - 1],
      ArrowDown: () => this.beside(button, row, "nextElementSibling"),
      ArrowUp: () => this.beside(button, row, "previousElementSibling"),
    }[event.key];
    if (!next) return;
    event.preventDefault();
    next()?.focus();
  }

  beside(button, row, way) {
    const name = button.dataset.figure;
    for (let other = row[way]; other; other = other[way]) {
      const found = this.figures(other).find(({ dataset }) => dataset.figure === name);
      if (found) return found;
    }
    return undefined;
  }
}

function compare(a, b, sign) {
  const [noA, noB] = [a === null || a === undefined, b === null || b === undefined];
  if (noA || noB) return noA - noB; // what is not known comes last, whichever way
  if (typeof a === "number" && typeof b === "number") return sign * (a - b);
  return sign * String(a).localeCompare(String(b), "en", { numeric: true });
}
