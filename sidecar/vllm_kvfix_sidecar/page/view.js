// SPDX-License-Identifier: Apache-2.0
// Which stretch of time is shown, at which moment, and what has to be asked for to show it.

const LEAST_SPAN = 120;
const KEPT = 604800;
const POINTS = 300;
const MOST_POINTS = 1000;
export const NEWEST = 1;

export class Window {
  constructor() {
    this.frozen = null;
  }

  /** {from, to, at, now, range, marks, marksOf, process} */
  view({ address, now, overview, process }) {
    const time = now?.time_unix_s ?? Date.now() / 1000;
    const { from, to } = this.span(address, time, overview);
    const marks = now?.marks ?? [];
    const marksOf = (key) => marks.filter((mark) => mark.key === key);
    return { from, to, at: address.at, now: time, range: to - from, marks, marksOf, process };
  }

  span({ at, range }, time, overview) {
    if (at !== null) {
      this.frozen ??= centred(at, range, time);
      return this.frozen;
    }
    this.frozen = null;
    // A sidecar that has run for five minutes fills the chart with them.
    const began = earliest(overview);
    const from = Math.max(time - range, Math.min(began - 2, time - LEAST_SPAN));
    return { from, to: time };
  }

  /** Where the window goes when a moment is chosen: it stays where it is if the moment is in it. */
  hold(at, view, range) {
    if (at === null) this.frozen = null;
    else if (at < view.from || at > view.to) this.frozen = centred(at, range, view.now);
    else this.frozen = { from: view.from, to: view.to };
  }

  /** Another range was chosen. */
  forget() {
    this.frozen = null;
  }
}

function centred(at, range, time) {
  const to = Math.max(at, Math.min(time, at + range / 2));
  return { from: to - range, to };
}

function earliest(overview) {
  const firsts = Object.values(overview?.processes ?? {}).map(({ memory }) => memory?.t?.[0] ?? Infinity);
  return firsts.length ? Math.min(...firsts) : Infinity;
}

/** The moment as it is kept; null: the newest. */
export function pinned(time, now) {
  if (time === null || time >= now - NEWEST) return null;
  return Math.round(Math.max(time, now - KEPT) * 10) / 10;
}

/** The query that brings all figures of a view. */
export function query(view, range) {
  const back = Math.min(KEPT, Math.max(60, Math.ceil(view.at === null ? range : view.now - view.from + 60)));
  const points = Math.min(MOST_POINTS, Math.max(POINTS, Math.round((POINTS * back) / Math.max(60, view.range))));
  return `range=${back}&points=${view.at === null ? POINTS : points}`;
}

/** How often history is asked for: the newest value comes with /api/now anyway. */
export const pace = (address) => Math.min(300, Math.max(15, address.at === null ? address.range / POINTS : 60));
