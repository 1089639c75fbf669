// SPDX-License-Identifier: Apache-2.0
// Where the axes of a chart begin and end, where their lines are, and what stands beside them.

import { clock, count, day } from "./words.js";

const LINES = 5;
const UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"];
// A limit that is no farther than so many times the highest value is drawn to scale.
const NEAR = 3;

const binaryStep = (span) => 2 ** Math.max(0, Math.ceil(Math.log2(span / LINES)));

function decimalStep(span) {
  const power = 10 ** Math.floor(Math.log10(span / LINES));
  return Math.max(
    1,
    [1, 2, 5, 10].map((part) => part * power).find((step) => step >= span / LINES),
  );
}

function splits(low, high, step) {
  const lines = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-6; at += step) lines.push(at);
  return lines;
}

/** The highest value that is to be seen: a limit too, if it is near or always shown. */
function reached(high, limit) {
  return limit && limit.value > high && (limit.always || limit.value <= high * NEAR) ? limit.value : high;
}

export const sizeScale = {
  range(low, high, limit, fromZero) {
    if (low === null || low === undefined) return [0, 1 << 20];
    const bottom = fromZero ? 0 : low;
    const top = reached(high, limit);
    // Noise of a few pages must not look like a mountain.
    const span = Math.max(top - bottom, Math.abs(top) / 20, 4096);
    const step = binaryStep(span * 1.15);
    const begin = Math.floor((bottom - span * 0.05) / step) * step;
    return [bottom >= 0 ? Math.max(0, begin) : begin, Math.ceil((top + span * 0.08) / step) * step];
  },
  splits: (low, high) => splits(low, high, binaryStep(high - low)),
  labels(lines, signed) {
    const step = lines.length > 1 ? lines[1] - lines[0] : 1;
    const most = Math.max(...lines.map(Math.abs), 1);
    let unit = Math.min(UNITS.length - 1, Math.floor(Math.log2(most) / 10));
    while (unit > 0 && step / 1024 ** unit < 0.01) unit -= 1;
    const scaled = step / 1024 ** unit;
    const decimals = Number.isInteger(scaled) ? 0 : scaled >= 0.1 && Number.isInteger(scaled * 2) ? 1 : 2;
    return lines.map((line) => {
      if (line === 0) return "0";
      const number = (line / 1024 ** unit).toFixed(decimals);
      return `${signed && line > 0 ? "+" : ""}${number} ${UNITS[unit]}`;
    });
  },
};

export const countScale = {
  range(low, high, limit) {
    if (low === null || low === undefined) return [0, 10];
    const top = Math.max(reached(high, limit), 4);
    const step = decimalStep(top * 1.1);
    return [0, Math.ceil((top * 1.08) / step) * step];
  },
  splits: (low, high) => splits(low, high, decimalStep(high - low)),
  labels: (lines) => lines.map((line) => (line === 0 || Math.max(...lines) < 1e6 ? count(line) : `${line / 1e6} M`)),
};

export const shareScale = {
  range: (low, high) => [0, Math.max(1.1, (high ?? 0) * 1.1)],
  splits: (low, high) => splits(low, high, high > 2 ? 1 : 0.25),
  labels: (lines) => lines.map((line) => `${Math.round(line * 100)} %`),
};

/** Times along the bottom, in the reader's zone; the day where it begins. */
export function timeLabels(lines, step) {
  let before = "";
  return lines.map((line) => {
    const date = day(line);
    const label = step >= 86400 ? date : clock(line, step < 60);
    const isNew = date !== before && before !== "";
    before = date;
    return isNew && step < 86400 ? `${label}\n${date}` : label;
  });
}
