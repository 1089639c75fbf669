// SPDX-License-Identifier: Apache-2.0
// Numbers, times and kinds in a few words: the same ones as the command line's (words.py, report_text.py).

const SIZE_UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
const MINUTE = 60;
const HOUR = 3600;
const DAY = 86400;
const YEAR = 365.25 * DAY;
// [seconds in the unit, its name, from how many seconds on the next unit is used]
const TIME_UNITS = [
  [1, "second", 1.5 * MINUTE],
  [MINUTE, "minute", 1.5 * HOUR],
  [HOUR, "hour", 2 * DAY],
  [DAY, "day", 2 * YEAR],
  [YEAR, "year", 100 * YEAR],
];
const FOREVER = "over 100 years";
const NOW = "under 1 second";

export const UNKNOWN = "not known";

export const KINDS = {
  "unbounded growth": "it leaks: what grows is known, and nothing bounds it",
  "unexplained growth": "it grows, and nothing that was counted is the cause: no guess is made",
  "retained by the allocator": "it has freed the memory, and the allocator keeps it instead of giving it back",
  "bounded growth": "it grows, and what grows has a capacity at which it ends (a cache that fills)",
  warming: "it grows, and it is too early to tell a warm-up from a leak",
  steady: "its memory does not grow",
};

export const SCOPES = {
  status: "its sizes",
  smaps: "the categories of its memory (smaps)",
  cgroup: "usage and limit of its cgroup",
  malloc: "what its allocator keeps",
  python: "Python's own counts",
  census: "its containers",
};

export const CATEGORIES = {
  heap: "heap (malloc)",
  anonymous: "anonymous outside the heap",
  stacks: "thread stacks",
  shared_memory: "shared memory",
  shmem: "shared memory",
  files: "mapped files",
  file: "mapped files",
  ring: "ring of vllm-kvfix",
  driver: "driver mappings",
  rest: "other mappings",
  anon: "anonymous memory",
  swap: "swapped out",
};

const PER = {
  request: "a request",
  abort: "an aborted request",
  generated_token: "a generated token",
  block: "an allocated block",
  step: "a step",
};

export const perUnit = (driver) => (Object.hasOwn(PER, driver) ? PER[driver] : `a ${driver}`);

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

function threeDigits(value) {
  const decimals = value < 0.9995 ? 3 : value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  const text = value.toFixed(decimals);
  return decimals ? text.replace(/\.?0+$/, "") : text;
}

/** Bytes in binary units with three significant digits: "88 MiB", "1.53 KiB", "154 bytes". */
export function size(count) {
  if (!isNumber(count)) return UNKNOWN;
  let left = Math.abs(count);
  const sign = count < 0 ? "-" : "";
  if (left > 0 && left < 0.001) return "under 0.001 bytes";
  for (const unit of SIZE_UNITS) {
    if (left < 999.5) {
      const number = threeDigits(left);
      return `${sign}${number} ${unit === "bytes" && number === "1" ? "byte" : unit}`;
    }
    left /= 1024;
  }
  return `${sign ? "under -" : "over "}999 EiB`;
}

/** A change of bytes, with its sign. */
export const change = (count) => (isNumber(count) && count > 0 ? `+${size(count)}` : size(count));

/** Seconds in the unit that suits them: "20 seconds", "1.5 hours". */
export function duration(seconds) {
  if (Number.isNaN(seconds) || typeof seconds !== "number") return "an unknown time";
  if (seconds < 1) return NOW;
  for (const [unit, name, end] of TIME_UNITS) {
    if (seconds < end) {
      const value = seconds / unit;
      const number = value >= 9.95 ? value.toFixed(0) : value.toFixed(1).replace(/\.0$/, "");
      return `${number} ${name}${number === "1" ? "" : "s"}`;
    }
  }
  return FOREVER;
}

/** When something happens: "in 3.1 to 4 days"; an end of null is none. */
export function when(interval) {
  const low = duration(interval.low ?? Infinity);
  const high = duration(interval.high ?? Infinity);
  if (low === FOREVER) return "not within 100 years";
  if (high === FOREVER) return low === NOW ? "at any time" : `in ${low} or more`;
  if (low === high) return low === NOW ? "now" : `in about ${low}`;
  if (low === NOW) return `within ${high}`;
  const [number, unit] = low.split(" ");
  const same = unit.replace(/s$/, "") === high.split(" ")[1]?.replace(/s$/, "");
  return `in ${same ? number : low} to ${high}`;
}

/** A fraction in percent: "91 %". */
export function share(fraction) {
  if (!isNumber(fraction)) return UNKNOWN;
  if (fraction > 0 && fraction < 0.01) return "under 1 %";
  const percent = Math.max(0, fraction * 100);
  return percent < 999.5 ? `${percent.toFixed(0)} %` : "over 999 %";
}

const COUNT = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
export const count = (value) => (isNumber(value) ? COUNT.format(value) : UNKNOWN);

/** Seconds that something took, short ones exactly: "1.2 s"; long ones in words. */
export function seconds(value) {
  if (!isNumber(value)) return UNKNOWN;
  return value < 90 ? `${threeDigits(Math.max(0, value))} s` : duration(value);
}

/** A noun with its number: "1 process", "3 processes". */
export const many = (number, one, more = `${one}s`) => `${count(number)} ${number === 1 ? one : more}`;

const UNPRINTABLE = /[\p{C}\p{Zl}\p{Zp}]|(?! )\p{Zs}/gu;

/** Text of strangers on one line that neither hides anything nor turns the line round. */
export const clean = (text) => text.replace(UNPRINTABLE, escaped);

function escaped(char) {
  const code = char.codePointAt(0);
  const [letter, width] = code <= 0xff ? ["x", 2] : code <= 0xffff ? ["u", 4] : ["U", 8];
  return `\\${letter}${code.toString(16).padStart(width, "0")}`;
}

const two = (number) => String(number).padStart(2, "0");
const MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];

/** Time of day of a moment in unix seconds, in the reader's zone. */
export function clock(time, withSeconds = true) {
  const date = new Date(time * 1000);
  const short = `${two(date.getHours())}:${two(date.getMinutes())}`;
  return withSeconds ? `${short}:${two(date.getSeconds())}` : short;
}

export const day = (time) => {
  const date = new Date(time * 1000);
  return `${date.getDate()} ${MONTHS[date.getMonth()]}`;
};

/** A moment: the time of day, with the day if it is not today's. */
export const moment = (time, now) => (day(time) === day(now) ? clock(time) : `${day(time)}, ${clock(time)}`);

/** The same for machines, in UTC. */
export const iso = (time) => new Date(time * 1000).toISOString();
