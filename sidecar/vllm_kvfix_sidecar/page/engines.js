// SPDX-License-Identifier: Apache-2.0
// One card an engine: its pool of KV blocks, how many blocks a request takes, its load, and what its ring lost.

import { Chart } from "./chart.js";
import { each, figure, h, set, show, str, stranger, term, write, writeStranger } from "./dom.js";
import { extended, valueAt, within } from "./series.js";
import { nameOf } from "./process.js";
import { count, isNumber, many, moment, seconds, share, UNKNOWN } from "./words.js";

const TOTALS = {
  allocated: "Blocks allocated",
  reused: "Blocks reused",
  released: "Blocks released",
  steps: "Steps",
  scheduled_tokens: "Tokens scheduled",
  preemptions: "Preemptions",
  refusals: "Refusals",
};
const RING = { published: "Published", dropped: "Dropped", lost: "Lost", malformed: "Malformed" };

export class Engines {
  constructor(section, { pin }) {
    this.pin = pin;
    this.list = section.querySelector(".body");
    this.none = section.querySelector("[data-testid=empty]");
  }

  update({ now, overview, view }) {
    this.none.hidden = now.engines.length > 0;
    const names = new Map(now.processes.map((process) => [process.key, nameOf(process)]));
    each(
      this.list,
      now.engines,
      ({ key }) => key,
      ({ key }) => new EngineCard(key, this.pin),
      (card, engine) =>
        card.update(engine, names.get(engine.key) ?? `pid ${str(engine.pid)}`, overview?.engines?.[engine.key], view),
    );
  }
}

class EngineCard {
  constructor(key, pin) {
    this.name = stranger();
    this.state = h("span", { class: "badge" });
    this.about = h("p", { class: "quiet" });
    this.pool = new Pool();
    this.running = figure("requests.running");
    this.waiting = figure("requests.waiting");
    this.finished = h("ul", { class: "plain inline" });
    this.unfinished = h("span", { class: "quiet" }, "none yet");
    this.backlog = h("ul", { class: "plain inline" });
    this.peaks = new Histogram();
    this.totals = Object.fromEntries(Object.keys(TOTALS).map((name) => [name, figure(`totals.${name}`)]));
    this.ring = Object.fromEntries(Object.keys(RING).map((name) => [name, figure(`ring.${name}`)]));
    this.ring.age_s = figure("ring.age_s");
    this.charts = {
      held: new Chart({ name: "held", title: "Blocks held", pin, height: 170, heading: "h4" }),
      running: new Chart({ name: "running", title: "Requests", pin, height: 170, heading: "h4" }),
      backlog: new Chart({ name: "backlog", title: "Ids in new_block_ids", pin, height: 170, heading: "h4" }),
    };
    const load = h(
      "dl",
      { class: "figures" },
      term("Running", this.running),
      term("Waiting", this.waiting),
      h("div", { class: "pair wide" }, h("dt", {}, "Finished"), h("dd", {}, this.finished, this.unfinished)),
      h("div", { class: "pair wide" }, h("dt", {}, "Ids in new_block_ids, by group"), h("dd", {}, this.backlog)),
    );
    const more = h(
      "details",
      { class: "all-figures" },
      h("summary", {}, "Totals, and what its ring carried"),
      h("dl", { class: "scopes" }, ...Object.entries(TOTALS).map(([name, label]) => term(label, this.totals[name]))),
      h(
        "dl",
        { class: "scopes" },
        ...Object.entries(RING).map(([name, label]) => term(`Events: ${label.toLowerCase()}`, this.ring[name])),
        term("Last sign of life", this.ring.age_s),
      ),
    );
    this.element = h(
      "article",
      { class: "engine", "data-testid": "engine", "data-key": key },
      h("div", { class: "engine-head" }, h("h3", {}, this.name), this.state),
      this.about,
      h(
        "div",
        { class: "engine-now" },
        h("div", {}, h("h4", {}, "KV pool"), this.pool.element, load),
        h("div", {}, h("h4", {}, "Most blocks that a finished request held"), this.peaks.element),
      ),
      h("div", { class: "charts" }, this.charts.held.element, this.charts.running.element, this.charts.backlog.element),
      more,
    );
  }

  update(engine, name, history, view) {
    set(this.element, "data-state", str(engine.state));
    writeStranger(this.name, name);
    write(this.state, str(engine.state));
    set(this.state, "class", `badge badge-${/^\w+$/.test(engine.state) ? engine.state : "other"}`);
    const sizes = [...new Set(engine.block_size_tokens ?? [])].map((tokens) => count(tokens)).join(", ");
    write(
      this.about,
      [
        `engine ${str(engine.engine_index ?? 0)}`,
        `vLLM ${str(engine.vllm_version) || UNKNOWN}`,
        `patch ${["", "unknown"].includes(str(engine.patch_state)) ? UNKNOWN : str(engine.patch_state)}`,
        sizes && `${sizes} tokens a block`,
      ]
        .filter(Boolean)
        .join(" · "),
    );
    const then = (series, value) =>
      view.at === null ? (value ?? null) : valueAt(series, view.at, view.now, view.range);
    this.pool.update(engine, then(history?.held, engine.pool?.held), view);
    const { requests } = engine;
    for (const state of ["running", "waiting"]) {
      const value = then(history?.[state], requests?.[state]);
      show(this[state], value, count(value), "its ring tells of no step then");
    }
    this.unfinished.hidden = Object.keys(requests?.finished ?? {}).length > 0;
    each(
      this.finished,
      Object.entries(requests?.finished ?? {}),
      ([reason]) => reason,
      ([reason]) => h("li", {}, figure(`requests.finished.${reason}`), " ", stranger("span")),
      (item, [reason, value]) => {
        show(item.firstChild, value, count(value));
        write(item.lastChild, reason);
      },
    );
    each(
      this.backlog,
      (engine.backlog ?? []).map((value, group) => ({ value, group })),
      ({ group }) => group,
      ({ group }) => h("li", {}, figure(`backlog.${group}`)),
      (item, { value }) => show(item.firstChild, value ?? null, count(value)),
    );
    this.peaks.update(engine.peak_blocks);
    for (const key of Object.keys(TOTALS))
      show(this.totals[key], engine.totals?.[key] ?? null, count(engine.totals?.[key]));
    for (const key of Object.keys(RING)) show(this.ring[key], engine.ring?.[key] ?? null, count(engine.ring?.[key]));
    show(
      this.ring.age_s,
      engine.ring?.age_s ?? null,
      isNumber(engine.ring?.age_s) ? `${seconds(engine.ring.age_s)} ago` : "",
    );
    this.draw(engine, history, view);
  }

  draw(engine, history, view) {
    const live = engine.state === "live";
    const line = (key, label, colour, value) => {
      const told = history?.[key];
      return { key, label, colour, series: within(live ? extended(told, view.now, value) : told, view.from, view.to) };
    };
    const marks = view.marksOf(engine.key);
    const limit = isNumber(engine.pool?.limit)
      ? { value: engine.pool.limit, label: `the pool of ${count(engine.pool.limit)}`, always: true }
      : null;
    const { held, running, backlog } = this.charts;
    held.update({
      key: engine.key,
      unit: "count",
      lines: [line("held", "held", 0, engine.pool?.held)],
      limit,
      marks,
      view,
    });
    running.update({
      key: engine.key,
      unit: "count",
      lines: [
        line("running", "running", 2, engine.requests?.running),
        line("waiting", "waiting", 1, engine.requests?.waiting),
      ],
      marks,
      view,
    });
    const sum = (engine.backlog ?? []).every(isNumber)
      ? (engine.backlog ?? []).reduce((all, one) => all + one, 0)
      : null;
    backlog.update({ key: engine.key, unit: "count", lines: [line("backlog", "all groups", 3, sum)], marks, view });
  }
}

/** How much of the pool is taken. */
class Pool {
  constructor() {
    this.held = figure("pool.held");
    this.free = figure("pool.free");
    this.cached = figure("pool.cached");
    this.limit = figure("pool.limit");
    this.of = h("span", { class: "quiet" });
    this.bar = h(
      "div",
      { class: "pool-bar", "aria-hidden": "true" },
      h("span", { class: "pool-held" }),
      h("span", { class: "pool-cached" }),
    );
    this.element = h(
      "div",
      { class: "pool" },
      this.bar,
      h(
        "dl",
        { class: "pool-legend" },
        h(
          "div",
          { class: "pair" },
          h("dt", {}, h("span", { class: "key key-held" }), "Held by requests"),
          h("dd", {}, this.held, this.of),
        ),
        h("div", { class: "pair" }, h("dt", {}, h("span", { class: "key key-free" }), "Free"), h("dd", {}, this.free)),
        h(
          "div",
          { class: "pair", title: "Blocks that the prefix cache can find; held and free ones" },
          h("dt", {}, h("span", { class: "key key-cached" }), "Findable by the prefix cache"),
          h("dd", {}, this.cached),
        ),
        h("div", { class: "pair" }, h("dt", {}, "In the pool"), h("dd", {}, this.limit)),
      ),
    );
  }

  update(engine, held, view) {
    const { pool = {} } = engine;
    const limit = isNumber(pool.limit) && pool.limit > 0 ? pool.limit : null;
    const then = view.at !== null;
    const free = then ? (limit !== null && held !== null ? limit - held : null) : (pool.free ?? null);
    const cached = then ? null : (pool.cached ?? null);
    const why = then ? `not kept for ${moment(view.at, view.now)}` : "its ring has not told of it";
    show(this.held, held, count(held), why);
    show(this.free, free, count(free), why);
    show(this.cached, cached, count(cached), why);
    show(this.limit, limit, count(limit), why);
    write(this.of, limit !== null && held !== null ? ` ${share(held / limit)}` : "");
    const width = (value) => `${limit === null || value === null ? 0 : Math.min(100, (value / limit) * 100)}%`;
    this.bar.children[0].style.width = width(held);
    this.bar.children[1].style.width = width(cached);
    set(this.bar, "class", `pool-bar${limit === null ? " pool-unknown" : ""}`);
  }
}

/** Finished requests by the most blocks that they held. */
class Histogram {
  constructor() {
    this.caption = h("p", { class: "caption" });
    this.columns = h("ol", { class: "histogram", "data-testid": "peak-blocks" });
    this.element = h(
      "div",
      {},
      h(
        "div",
        { class: "scroll", role: "group", tabindex: "0", "aria-label": "Finished requests by blocks" },
        this.columns,
      ),
      this.caption,
    );
  }

  update(peaks) {
    const counts = peaks?.counts ?? [];
    const bounds = peaks?.bounds ?? [];
    const total = counts.reduce((all, one) => all + one, 0);
    const most = Math.max(1, ...counts);
    const last = counts.findLastIndex((value) => value > 0);
    const buckets = counts.map((value, at) => ({
      at,
      value,
      name: bucket(bounds, at),
      shown: at <= Math.max(last + 1, 5),
    }));
    each(
      this.columns,
      buckets,
      ({ at }) => at,
      () =>
        h(
          "li",
          {},
          h("span", { class: "column-count" }),
          h("span", { class: "column", "aria-hidden": "true" }),
          h("span", { class: "column-name" }),
        ),
      (item, { at, value, name, shown }) => {
        set(item, "data-bucket", at);
        set(item, "data-raw", value);
        item.hidden = !shown;
        set(item, "title", `${name} blocks: ${many(value, "request")}`);
        write(item.children[0], value ? count(value) : "");
        item.children[1].style.height = `${value ? Math.max(2, (value / most) * 88) : 0}px`;
        write(item.children[2], name);
      },
    );
    write(
      this.caption,
      total
        ? `${many(total, "finished request")}; half of them held ${bucket(bounds, middle(counts, total))} blocks or fewer at a time.`
        : "No request has finished yet.",
    );
  }
}

function bucket(bounds, at) {
  if (at >= bounds.length) return `over ${count(bounds[bounds.length - 1])}`;
  const from = at === 0 ? 0 : bounds[at - 1] + 1;
  return from >= bounds[at] ? count(bounds[at]) : `${count(from)}–${count(bounds[at])}`;
}

function middle(counts, total) {
  let seen = 0;
  return counts.findIndex((value) => (seen += value) * 2 >= total);
}
