// SPDX-License-Identifier: Apache-2.0
// What is known of one process in numbers: when the limit is reached, how fast it grows, how large it is.

import { each, figure, h, set, show, str, stranger, term, write, writeStranger } from "./dom.js";
import { whyNot } from "./process.js";
import { duration, isNumber, perUnit, share, size, UNKNOWN, when } from "./words.js";

/** What is known in numbers. */
export class Figures {
  constructor() {
    this.left = figure("time_to_limit");
    this.leftField = h("span", { "data-field": "time-to-limit" }, this.left);
    this.leftWhy = h("span", { class: "quiet" });
    this.slope = figure("verdict.slope_bytes_per_hour.best");
    this.slopeRange = h("span", { class: "quiet" });
    this.per = h("ul", { class: "plain quiet" });
    this.rss = figure("memory.status.rss_bytes");
    this.anon = figure("memory.status.anon_bytes");
    this.swap = h("span", {}, " + ", figure("memory.status.swap_bytes"), " swapped");
    this.usage = figure("limit.usage_bytes");
    this.limit = figure("limit.limit_bytes");
    this.of = h("span", { class: "quiet" });
    this.bar = h("span", { class: "bar", "aria-hidden": "true" }, h("span", { class: "bar-fill" }));
    this.explained = figure("verdict.explained_ratio");
    this.explainedPair = term("Explained", this.explained, h("span", { class: "quiet" }, " of the growth"));
    this.watched = h("span", { "data-field": "watched" });
    this.version = stranger();
    this.gpus = h("ul", { class: "plain" });
    this.gpuPair = term("GPU memory", this.gpus);
    this.element = h(
      "dl",
      { class: "figures" },
      h("div", { class: "pair lead" }, h("dt", {}, "Time to the limit"), h("dd", {}, this.leftField, this.leftWhy)),
      h(
        "div",
        { class: "pair lead" },
        h("dt", {}, "Growth an hour"),
        h("dd", {}, this.slope, this.slopeRange, this.per),
      ),
      term("Anonymous memory", this.anon, this.swap),
      term("Resident (RSS)", this.rss),
      h(
        "div",
        { class: "pair wide" },
        h("dt", {}, "Used of the limit"),
        h("dd", { "data-field": "limit" }, this.usage, " of ", this.limit, this.of, this.bar),
      ),
      this.explainedPair,
      this.gpuPair,
      term("vLLM", this.version),
      term("Watched for", this.watched),
    );
  }

  update(process) {
    const { verdict, limit } = process;
    const status = process.memory?.status ?? {};
    const left = verdict.time_to_limit_s ?? null;
    show(this.left, left ? (left.best ?? left.low ?? null) : null, left ? when(left) : "", noTime(process));
    if (!left) write(this.left, "none");
    write(this.leftWhy, left ? bestOf(left) : noTime(process));
    const slope = verdict.slope_bytes_per_hour ?? null;
    show(this.slope, slope?.best ?? null, size(slope?.best), "too few figures for a pace");
    write(
      this.slopeRange,
      slope && isNumber(slope.low) && isNumber(slope.high) ? `${size(slope.low)} to ${size(slope.high)}` : "",
    );
    this.writePer(verdict);
    show(this.rss, status.rss_bytes ?? null, size(status.rss_bytes), whyNot(process, "status"));
    show(this.anon, status.anon_bytes ?? null, size(status.anon_bytes), whyNot(process, "status"));
    this.swap.hidden = !(status.swap_bytes > 0);
    show(this.swap.children[0], status.swap_bytes ?? null, size(status.swap_bytes));
    show(this.limit, limit?.limit_bytes ?? null, size(limit?.limit_bytes), noLimit(process));
    show(this.usage, limit?.usage_bytes ?? null, size(limit?.usage_bytes), noLimit(process));
    const used =
      limit && isNumber(limit.usage_bytes) && limit.limit_bytes > 0 ? limit.usage_bytes / limit.limit_bytes : null;
    const whose = limit ? ` (the ${str(limit.of)}'s` : "";
    write(this.of, limit ? `${whose}${used === null ? "" : `, ${share(used)}`})` : ` ${noLimit(process)}`);
    this.bar.hidden = used === null;
    this.bar.firstChild.style.width = `${Math.min(100, (used ?? 0) * 100)}%`;
    set(this.bar, "data-level", used === null ? null : used >= 0.9 ? "high" : used >= 0.8 ? "near" : "low");
    const explained = verdict.explained_ratio ?? null;
    this.explainedPair.hidden = explained === null || !verdict.culprits?.length;
    show(this.explained, explained, share(explained));
    const gpus = Array.isArray(process.gpus) ? process.gpus : [];
    this.gpuPair.hidden = gpus.length === 0;
    each(this.gpus, gpus, ({ device }) => str(device), makeGpu, writeGpu);
    writeStranger(this.version, process.vllm_version || UNKNOWN);
    if (!process.vllm_version) set(this.version, "title", "only a process with a ring tells its version");
    write(this.watched, duration(process.watched_s ?? NaN));
    set(this.watched, "title", verdict.window_s ? `the verdict stands on ${duration(verdict.window_s)}` : null);
  }

  writePer(verdict) {
    const follows = verdict.follows;
    const per = Object.entries(verdict.bytes_per ?? {}).filter(
      ([driver, value]) => isNumber(value) && (driver === "request" || driver === follows),
    );
    each(
      this.per,
      per,
      ([driver]) => driver,
      ([driver]) => h("li", {}, figure(`verdict.bytes_per.${driver}`), " ", stranger("span")),
      (item, [driver, value]) => {
        show(item.firstChild, value, size(value));
        write(item.lastChild, perUnit(driver));
      },
    );
  }
}

const makeGpu = () => h("li", {}, figure("gpus.used_bytes"), " on ", stranger());

function writeGpu(item, { device, used_bytes: used }) {
  show(item.firstChild, used ?? null, size(used));
  writeStranger(item.lastChild, device);
}

const bestOf = ({ best }) => (isNumber(best) ? `best estimate: ${duration(best)}` : "");

function noTime({ verdict, limit, ended_unix_s: ended }) {
  if (isNumber(ended)) return "it has ended";
  if (verdict.kind === "steady") return "it does not grow";
  if (verdict.kind === "retained by the allocator") return "it does not grow further";
  if (!limit) return "no limit is known";
  return verdict.kind === "bounded growth" ? "it fits below the limit when full" : "it is not growing towards it";
}

function noLimit(process) {
  return process.unread?.cgroup ? str(process.unread.cgroup) : "no limit is known";
}
