// SPDX-License-Identifier: Apache-2.0
// Series of [time, value]: what they were at a moment, how they stack, and one sentence about them. No page in here.

import { duration, isNumber } from "./words.js";

/** The last index whose time is not after a moment; -1: none is. */
export function indexAt(times, moment) {
  let low = 0;
  let high = times.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (times[middle] <= moment) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** How long a value is believed: the history is coarser with age. */
function believed(age, range) {
  const kept = age < 600 ? 20 : age < 7200 ? 90 : 900;
  return Math.max(kept, range / 50);
}

/** The value at a moment, on the straight line between two points; null: none is known of then. */
export function valueAt(series, moment, now, range) {
  if (!series?.t?.length) return null;
  const at = indexAt(series.t, moment);
  if (at < 0) return null;
  if (at === series.t.length - 1 && moment - series.t[at] > believed(now - series.t[at], range)) return null;
  return between(series, at, moment);
}

function between({ t, v }, at, moment) {
  const [before, after] = [v[at], v[at + 1]];
  if (!isNumber(before)) return null;
  if (!isNumber(after) || moment === t[at]) return before;
  // Whole things stay whole.
  const value = before + ((after - before) * (moment - t[at])) / (t[at + 1] - t[at]);
  return Number.isInteger(before) && Number.isInteger(after) ? Math.round(value) : value;
}

/** The series with one more value at its end, if that is newer. */
export function extended(series, time, value) {
  if (!isNumber(value)) return series;
  const { t, v } = series ?? { t: [], v: [] };
  if (t.length && time <= t[t.length - 1] + 0.5) return { t, v };
  return { t: [...t, time], v: [...v, value] };
}

/** The part of it within a window, up to its very ends. */
export function within(series, from, to) {
  if (!series?.t?.length) return { t: [], v: [] };
  const first = indexAt(series.t, from) + 1;
  const end = indexAt(series.t, to) + 1;
  const [t, v] = [series.t.slice(first, end), series.v.slice(first, end)];
  if (first > 0 && first < series.t.length && t[0] !== from) {
    t.unshift(from);
    v.unshift(between(series, first - 1, from));
  }
  if (end > 0 && end < series.t.length && t[t.length - 1] !== to) {
    t.push(to);
    v.push(between(series, end - 1, to));
  }
  return { t, v };
}

/** Each value less the first one. */
export function rebased(series) {
  const first = series.v.find(isNumber);
  return first === undefined ? series : { t: series.t, v: series.v.map((v) => (isNumber(v) ? v - first : null)) };
}

/** Several series on the times of all of them: [times, values, values...]; null before its first and after its last. */
export function aligned(all) {
  const times = [...new Set(all.flatMap(({ t }) => t))].sort((a, b) => a - b);
  return [times, ...all.map((series) => column(series, times))];
}

function column(series, times) {
  const last = series.t.length - 1;
  let at = -1;
  return times.map((time) => {
    while (at < last && series.t[at + 1] <= time) at += 1;
    return at < 0 || (at === last && time > series.t[at]) ? null : between(series, at, time);
  });
}

/** Columns added up from the last to the first: what each line of a stack is drawn at. */
export function stacked(columns) {
  const sums = [];
  let above = null;
  for (const column of [...columns].reverse()) {
    const below = above;
    above = column.map((value, at) => (below === null ? value : (value ?? 0) + (below[at] ?? 0)));
    sums.unshift(above);
  }
  return sums;
}

/** Every n-th row, the last one among them, so that there are no more than so many. */
export function thinned(length, most) {
  const step = Math.max(1, Math.ceil(length / most));
  const rows = [];
  for (let at = length - 1; at >= 0; at -= step) rows.push(at);
  return rows;
}

/** "rose from 1 GiB to 2 GiB in 1 hour". */
export function told(series, words) {
  const known = series.t.map((time, at) => [time, series.v[at]]).filter(([, value]) => isNumber(value));
  if (!known.length) return "has no figures here";
  const [since, first] = known[0];
  const [until, last] = known[known.length - 1];
  if (until - since < 1) return `is at ${words(last)}`;
  const [from, to] = [words(first), words(last)];
  const time = `in ${duration(until - since)}`;
  if (from === to) return `was at ${to} at both ends of ${duration(until - since)}`;
  return `${last > first ? "rose" : "sank"} from ${from} to ${to} ${time}`;
}
