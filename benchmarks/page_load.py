# SPDX-License-Identifier: Apache-2.0
"""How long the live page takes to show figures: `python -m benchmarks.page_load [--loads N] [--json]`, some minutes.

A real sidecar follows an engine that leaks; headless Chromium opens its page again and again, each time with nothing in
its cache. *Loaded*: milliseconds from the navigation's start to the browser's load event. *Figures*: to the first frame
in which the verdict and the figures stand. *Bytes*: what the sidecar sent until then, headers not counted. Browser,
sidecar and engine share this machine's CPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.spread import shown, spread
from tests.browser.chromium import chromium
from tests.browser.conftest import engine
from tests.browser.viewer import WAIT_MS
from tests.sidecar_e2e.sidecar import Sidecar

if TYPE_CHECKING:
    from playwright.sync_api import Browser

LOADS = 30
_WATCH = """
new MutationObserver((_, observer) => {
  if (document.querySelector("#live[data-state=live]") === null) return;
  observer.disconnect();
  requestAnimationFrame(() => setTimeout(() => { window.kvfixShown = performance.now(); }));
}).observe(document, {subtree: true, attributes: true, childList: true});
"""
_SEEN = """
() => {
  const entries = [...performance.getEntriesByType("navigation"), ...performance.getEntriesByType("resource")];
  return {
    figures_ms: window.kvfixShown,
    loaded_ms: entries[0].loadEventEnd,
    bytes: entries.reduce((sum, entry) => sum + entry.encodedBodySize, 0),
  };
}
"""


def load(browser: Browser, url: str) -> dict[str, float]:
    """One load, with an empty cache."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    try:
        context.add_init_script(_WATCH)
        page = context.new_page()
        page.goto(url)
        page.wait_for_function("() => window.kvfixShown !== undefined", timeout=WAIT_MS)
        seen: dict[str, float] = page.evaluate(_SEEN)
        return seen
    finally:
        context.close()


def measure(folder: Path, loads: int) -> dict[str, Any]:
    """Spreads of each figure, over so many loads after one that is not counted."""
    rings = folder / "rings"
    rings.mkdir()
    with engine(rings / "a.ring"), Sidecar(folder, rings, {}) as sidecar, chromium() as browser:
        url = f"http://127.0.0.1:{sidecar.port}/"
        load(browser, url)
        found = [load(browser, url) for _ in range(loads)]
    figures = {name: spread([one[name] for one in found]) for name in found[0]}
    return {"loads": loads, "cpus": os.cpu_count(), "load_1m": os.getloadavg()[0], **figures}


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page_load", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--loads", type=int, default=LOADS, help="how often it is opened (%(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of the sentence")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), chosen.loads)
    if chosen.json:
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        kilobytes = {name: value / 1000 for name, value in found["bytes"].items()}
        sys.stdout.write(
            f"{found['loads']} loads: first figures after {shown(found['figures_ms'])} ms, load event after "
            f"{shown(found['loaded_ms'])} ms, {shown(kilobytes)} kB; "
            f"{found['cpus']} CPUs, load {found['load_1m']:.1f}\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
