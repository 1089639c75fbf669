// SPDX-License-Identifier: Apache-2.0
// One card a process: the verdict, when the limit is reached, what to do, and what that stands on.

import { Advice } from "./advice.js";
import { each, h, icon, set, str, stranger, turn, write, writeBreakable, writeStranger } from "./dom.js";
import { Figures } from "./figures.js";
import { iconOf, isGoneHelper, memoryOf, whyNot } from "./process.js";
import { isNumber, iso, KINDS, many, moment, share, size, UNKNOWN } from "./words.js";

const PATCH_ICONS = { applied: "steady", "not affected": "steady", refused: "unbounded", off: "ended" };

export class Verdicts {
  constructor(section, { choose }) {
    this.choose = choose;
    this.list = section.querySelector(".cards");
    this.gone = section.querySelector(".gone");
    this.none = section.querySelector("[data-testid=empty]");
  }

  update({ now, view }) {
    this.none.hidden = now.processes.length > 0;
    const make = (process) => new Card(process.key, this.choose);
    const update = (card, process) => card.update(process, now, view);
    const keyOf = ({ key }) => key;
    each(
      this.list,
      now.processes.filter((process) => !isGoneHelper(process)),
      keyOf,
      make,
      update,
    );
    const gone = now.processes.filter(isGoneHelper);
    each(this.gone.querySelector(".cards"), gone, keyOf, make, update);
    this.gone.hidden = gone.length === 0;
    write(this.gone.firstElementChild, `${many(gone.length, "helper process", "helper processes")} that ended`);
  }
}

class Card {
  constructor(key, choose) {
    this.icon = icon("unknown");
    this.title = stranger("bdi", { "data-field": "title" });
    this.pid = h("span", { class: "quiet", "data-field": "pid" });
    this.kind = h("span", { class: "kind", "data-field": "kind" });
    this.ended = h("span", { class: "badge badge-ended", "data-field": "ended" });
    this.patch = h("span", { class: "badge" }, icon("unknown"), h("span", { "data-field": "patch" }));
    this.brief = h("span", { class: "brief quiet" });
    this.sentence = h("p", { class: "sentence", dir: "auto", "data-field": "sentence" });
    this.remedy = new Advice();
    this.evidence = h("ul", { "data-field": "evidence" });
    this.evidenceHead = h("summary", {}, "Evidence");
    this.basis = h("details", { class: "evidence" }, this.evidenceHead, this.evidence);
    this.figures = new Figures();
    this.chooser = h("button", { type: "button", "data-action": "select", "aria-pressed": "false" }, "Show in detail");
    this.chooser.addEventListener("click", () => choose(key, true));
    const head = h(
      "summary",
      {},
      this.icon,
      h("h3", {}, this.title, " ", this.pid),
      this.kind,
      this.ended,
      this.patch,
      this.brief,
    );
    const told = h(
      "div",
      { class: "told" },
      this.sentence,
      this.remedy.element,
      this.basis,
      h("div", { class: "actions" }, this.chooser),
    );
    this.fold = h("details", {}, head, h("div", { class: "card-body" }, this.figures.element, told));
    this.element = h("article", { class: "card", "data-testid": "process", "data-key": key }, this.fold);
  }

  update(process, now, view) {
    const { verdict } = process;
    const ended = isNumber(process.ended_unix_s);
    set(this.element, "data-ended", String(ended));
    set(this.element, "data-alarming", String(verdict.alarming === true && !ended));
    if (this.element.dataset.kind !== str(verdict.kind)) {
      // Opened and closed by the verdict; between two verdicts, the reader decides.
      this.fold.open = verdict.kind !== "steady";
      this.basis.open = verdict.alarming === true;
      set(this.element, "data-kind", str(verdict.kind));
    }
    turn(this.icon, iconOf(process));
    writeStranger(this.title, process.title);
    write(this.pid, `pid ${str(process.pid)}`);
    write(this.kind, str(verdict.kind));
    set(this.kind, "title", KINDS[verdict.kind] ?? null);
    this.ended.hidden = !ended;
    if (ended) {
      write(this.ended, `ended at ${moment(process.ended_unix_s, now.time_unix_s)}`);
      set(this.ended, "title", iso(process.ended_unix_s));
    }
    this.writePatch(process);
    write(this.brief, this.inBrief(process));
    writeBreakable(this.sentence, str(process.sentence));
    // Once is enough: of the gravest, the answer says it.
    this.sentence.hidden = str(now.answer).startsWith(str(process.sentence));
    this.remedy.update(verdict.remedy ?? null, str(process.to_do));
    const evidence = Array.isArray(verdict.evidence) ? verdict.evidence : [];
    write(this.evidenceHead, `Evidence: ${many(evidence.length, "point")}`);
    this.basis.hidden = evidence.length === 0;
    each(
      this.evidence,
      evidence.map(str),
      (text) => text,
      () => h("li", { dir: "auto" }),
      writeBreakable,
    );
    this.figures.update(process);
    set(this.chooser, "aria-pressed", String(view.process === process.key));
  }

  writePatch(process) {
    const state = str(process.patch_state);
    const known = state !== "" && state !== "unknown";
    this.patch.hidden = !known && process.role !== "engine core";
    set(this.patch, "data-patch", state);
    turn(this.patch.firstChild, PATCH_ICONS[state] ?? "unknown");
    write(this.patch.lastChild, known ? `patch ${state}` : `patch ${UNKNOWN}`);
    set(this.patch, "title", known ? null : "no ring tells of it: is vllm-kvfix installed beside vLLM?");
  }

  inBrief(process) {
    const memory = memoryOf(process);
    const limit = process.limit?.limit_bytes;
    if (memory === null && isNumber(process.ended_unix_s)) return "";
    if (memory === null) return `memory ${UNKNOWN}: ${whyNot(process, "status")}`;
    return isNumber(limit) && limit > 0 && !isNumber(process.ended_unix_s)
      ? `${size(memory)}, ${share(memory / limit)} of the limit`
      : size(memory);
  }
}
