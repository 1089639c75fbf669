// SPDX-License-Identifier: Apache-2.0
// What to do, with its commands to copy and a link to where upstream tracks it.

import { h, icon, str, stranger, writeStranger } from "./dom.js";

const CODE = /`([^`\n]{1,300})`/;

/** What to do: its commands can be copied. */
export class Advice {
  constructor() {
    this.text = h("p", { dir: "auto", "data-field": "remedy" });
    this.more = h("p", { class: "quiet" });
    this.element = h("div", { class: "advice" }, h("h4", {}, "What to do"), this.text, this.more);
  }

  /** `toDo`: what helps in words, where there is no remedy that says it. */
  update(remedy, toDo) {
    const action = remedy ? str(remedy.action) : toDo;
    this.element.hidden = action === "";
    const told = JSON.stringify([action, remedy?.issue, remedy?.fixed_in]);
    if (told === this.told) return;
    this.told = told;
    this.text.replaceChildren(...parts(action.charAt(0).toUpperCase() + action.slice(1)));
    this.more.replaceChildren();
    if (remedy?.fixed_in) this.more.append(`Fixed in ${str(remedy.fixed_in)}. `);
    if (remedy?.issue) this.more.append(link(str(remedy.issue)));
  }
}

function parts(text) {
  return text.split(CODE).flatMap((part, at) => {
    if (at % 2 === 0) return [part];
    const button = h(
      "button",
      { type: "button", class: "copy", "data-copy": part, "aria-label": `Copy ${part}`, title: "Copy" },
      icon("copy"),
    );
    return [h("span", { class: "command" }, h("code", {}, part), button)];
  });
}

/** An address as a link where it is one of the web's, else as the text that it is. */
function link(address) {
  const isWeb = /^https:\/\/[\w.-]+\//.test(address);
  const element = isWeb ? h("a", { href: address, rel: "noreferrer noopener" }) : stranger();
  writeStranger(element, address.replace(/^https:\/\//, ""), address);
  return element;
}
