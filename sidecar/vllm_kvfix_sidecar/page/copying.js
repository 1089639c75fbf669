// SPDX-License-Identifier: Apache-2.0
// Copies what an element with data-copy holds, and says so politely.

import { byId, write } from "./dom.js";

const SHOWN_MS = 4000;
let timer = 0;

/** Says something in passing, to eyes and ears. */
export function say(text) {
  write(byId("status"), text);
  clearTimeout(timer);
  timer = setTimeout(() => write(byId("status"), ""), SHOWN_MS);
}

export async function copy(text, what = text) {
  const short = what.length > 60 ? `${what.slice(0, 59)}…` : what;
  say((await put(text)) ? `Copied ${short}` : "This browser did not let it be copied");
}

async function put(text) {
  // Without TLS, browsers give the clipboard to pages of loopback alone.
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      return putBySelection(text);
    }
  }
  return putBySelection(text);
}

function putBySelection(text) {
  const focused = document.activeElement;
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "unseen";
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return done;
}

export function start() {
  document.addEventListener("click", (event) => {
    const button = event.target.closest?.("[data-copy]");
    if (button) copy(button.getAttribute("data-copy"));
  });
}
