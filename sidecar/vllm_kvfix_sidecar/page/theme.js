// SPDX-License-Identifier: Apache-2.0
// Light or dark: set before anything is painted, hence no module.
"use strict";

(() => {
  const KEY = "vllm-kvfix-theme";
  const THEMES = ["auto", "light", "dark"];
  const root = document.documentElement;

  function stored() {
    try {
      const theme = localStorage.getItem(KEY);
      return THEMES.includes(theme) ? theme : "auto";
    } catch {
      return "auto"; // storage is forbidden here
    }
  }

  function use(theme) {
    root.dataset.theme = theme;
    const button = document.getElementById("theme");
    if (button) {
      button.textContent = `Theme: ${theme}`;
      document.dispatchEvent(new Event("themechange"));
    }
  }

  use(stored());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => use(root.dataset.theme));
  document.addEventListener("DOMContentLoaded", () => {
    use(root.dataset.theme);
    document.getElementById("theme").addEventListener("click", () => {
      const theme = THEMES[(THEMES.indexOf(root.dataset.theme) + 1) % THEMES.length];
      use(theme);
      try {
        localStorage.setItem(KEY, theme);
      } catch {
        // It holds for this page, then.
      }
    });
  });
})();
