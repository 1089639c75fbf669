// SPDX-License-Identifier: Apache-2.0
// The state that can be linked to: #range=3600&at=UNIX&process=KEY&sort=TABLE.COLUMN.desc,...

const RANGES = [900, 3600, 21600, 86400, 604800];
const USUAL = 3600;
const LONGEST_KEY = 64;
const SORT = /^([a-z]+)\.([a-z_]+)\.(asc|desc)$/;

/** What a hash says; what it says wrongly is as if it were not there. */
export function read(hash) {
  const told = new URLSearchParams(hash.replace(/^#/, ""));
  const range = Number(told.get("range"));
  const at = Number(told.get("at"));
  const process = told.get("process");
  return {
    range: RANGES.includes(range) ? range : USUAL,
    at: Number.isFinite(at) && at > 0 && at < 1e11 ? at : null,
    process: process && process.length <= LONGEST_KEY ? process : null,
    sort: readSort(told.get("sort") ?? ""),
  };
}

function readSort(text) {
  const found = {};
  for (const part of text.split(",").slice(0, 8)) {
    const [, table, column, direction] = SORT.exec(part) ?? [];
    if (table) found[table] = { column, direction };
  }
  return found;
}

export function written({ range, at, process, sort }) {
  const parts = [`range=${range}`];
  if (at !== null) parts.push(`at=${Math.round(at * 10) / 10}`);
  if (process !== null) parts.push(`process=${encodeURIComponent(process)}`);
  const sorted = Object.entries(sort).map(([table, { column, direction }]) => `${table}.${column}.${direction}`);
  if (sorted.length) parts.push(`sort=${sorted.join(",")}`);
  return `#${parts.join("&")}`;
}
