// SPDX-License-Identifier: Apache-2.0
// What one process of /api/now is called, how large it is, and which icon it has.

import { str } from "./dom.js";
import { CATEGORIES, clean, isNumber } from "./words.js";

const ICONS = {
  "unbounded growth": "unbounded",
  "unexplained growth": "unexplained",
  "retained by the allocator": "retained",
  "bounded growth": "bounded",
  warming: "warming",
  steady: "steady",
};
export const iconOf = (process) =>
  isNumber(process.ended_unix_s)
    ? "ended"
    : Object.hasOwn(ICONS, process.verdict.kind)
      ? ICONS[process.verdict.kind]
      : "unknown";

export const nameOf = (process) => `${clean(str(process.title))} (pid ${str(process.pid)})`;

/** Bytes of anonymous memory, swapped ones included, which is what verdicts are about; null: not known. */
export function memoryOf(process) {
  const status = process.memory?.status ?? {};
  if (isNumber(status.anon_bytes)) return status.anon_bytes + (status.swap_bytes ?? 0);
  return isNumber(status.rss_bytes) ? status.rss_bytes : null;
}

/** A compiler or a shell that came and went is no news. */
export const isGoneHelper = (process) =>
  isNumber(process.ended_unix_s) && process.role === "child" && process.verdict.alarming !== true;

/** The reason that a scope has no figures. */
export const whyNot = (process, scope) => str(process.unread?.[scope] ?? "nothing has told of it yet");

export const categoryWord = (name) => (Object.hasOwn(CATEGORIES, name) ? CATEGORIES[name] : name);
