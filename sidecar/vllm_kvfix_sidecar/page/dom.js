// SPDX-License-Identifier: Apache-2.0
// Makes and changes elements. Text of strangers goes through textContent, and is kept in its own direction.

import { clean, UNKNOWN } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const LONGEST = 2000;

/** An element with attributes (null and false: left out) and children (elements or texts). */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) set(element, name, value);
  element.append(...children.filter((child) => child !== null));
  return element;
}

/** Sets an attribute where it is not so already; null and false take it away. */
export function set(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, value === true ? "" : value);
}

/** Text where it is not there already: a selection of it, or a reader's place in it, is kept. */
export function write(element, text) {
  const shown = text.length > LONGEST ? `${text.slice(0, LONGEST)}…` : text;
  if (element.textContent !== shown) element.textContent = shown;
}

export const byId = (id) => document.getElementById(id);

/** Strangers' text as text: whatever a key may be, a string. */
export const str = (value) => (value === null || value === undefined ? "" : String(value));

/** An icon of the sheet in index.html; it says nothing that text beside it does not. */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "icon");
  svg.setAttribute("aria-hidden", "true");
  const use = document.createElementNS(SVG, "use");
  svg.append(use);
  turn(svg, name);
  return svg;
}

export function turn(svg, name) {
  set(svg.firstChild, "href", `#i-${name}`);
}

/** Makes the children of a parent those of a list: one an item, kept by its key, in the list's order. */
export function each(parent, items, keyOf, make, update) {
  const had = parent.kept ?? (parent.kept = new Map());
  const kept = new Map();
  let before = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    if (kept.has(key)) continue;
    const part = had.get(key) ?? make(item);
    kept.set(key, part);
    update(part, item);
    const element = part.element ?? part;
    if (element === before) before = before.nextElementSibling;
    else parent.insertBefore(element, before);
  }
  for (const [key, part] of had) if (!kept.has(key)) (part.element ?? part).remove();
  parent.kept = kept;
}

/** A figure that can be copied: a button with the value as it was sent. */
export function figure(name) {
  return h("button", { type: "button", class: "figure", "data-figure": name });
}

/** What a figure says now; `why`: what to say of one that is not known. */
export function show(button, raw, text, why = UNKNOWN) {
  const known = raw !== null && raw !== undefined;
  set(button, "data-raw", known ? String(raw) : "");
  set(button, "data-copy", known ? String(raw) : null);
  set(button, "title", known ? `${raw} (click to copy)` : why);
  button.disabled = !known;
  write(button, known ? text : UNKNOWN);
}

/** A text of a stranger, cut by the layout alone: all of it is in its title. */
export function stranger(tag = "bdi", attributes = {}) {
  return h(tag, { dir: "auto", ...attributes });
}

export function writeStranger(element, text, all = text) {
  write(element, clean(str(text)));
  set(element, "title", clean(str(all).slice(0, LONGEST)));
}

/** Long text with paths in it, which may go on in the next line after a dot. */
export function writeBreakable(element, text) {
  if (element.textContent === text) return;
  const parts = text.split(/(?<=[\w\]]\.(?=\w))/);
  element.replaceChildren(...parts.flatMap((part, at) => (at ? [document.createElement("wbr"), part] : [part])));
}

/** A term and what it is, for a <dl>. */
export function term(name, ...values) {
  return h("div", { class: "pair" }, h("dt", {}, name), h("dd", {}, ...values));
}
