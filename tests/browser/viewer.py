# SPDX-License-Identifier: Apache-2.0
"""One look at the live page in a real browser, and all that the page did meanwhile."""

from __future__ import annotations

import json
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.sidecar_e2e.processes import WAIT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, ConsoleMessage, Dialog, Locator, Page, Request

WAIT_MS = WAIT_S * 1000
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
# Three digits are shown of a size.
SIZE_PRECISION = 0.006


@dataclass
class Viewer:
    """A page, and what it asked for, said to the console, and tried to open."""

    page: Page
    asked: list[Request] = field(default_factory=list)
    done: list[Request] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)

    def listen(self) -> None:
        """Note all that the page does from here on."""
        on = self.page.on
        on("request", lambda request: self.asked.append(request))  # noqa: PLW0108  # playwright marks what it is given
        on("requestfinished", lambda request: self.done.append(request))  # noqa: PLW0108  # ^
        on("console", self._hear)
        on("pageerror", lambda error: self.said.append(str(error)))
        on("dialog", self._dismiss)

    def _hear(self, message: ConsoleMessage) -> None:
        if message.type in {"error", "warning"}:
            self.said.append(message.text)

    def _dismiss(self, dialog: Dialog) -> None:
        self.dialogs.append(dialog.message)
        dialog.dismiss()

    def open(self, url: str) -> Viewer:
        """Go there, and wait for the first figures."""
        self.page.goto(url)
        self.page.wait_for_selector("#live[data-state=live], #live[data-state=paused]", timeout=WAIT_MS)
        return self

    def wait(self, selector: str, **options: Any) -> Locator:
        """What the selector names, once it is seen."""
        found = self.page.locator(selector).first
        found.wait_for(timeout=WAIT_MS, **options)
        return found

    def hold(self) -> dict[str, Any]:
        """Pause the page; the answer of /api/now that it shows."""
        self.page.click("#pause")
        self.page.wait_for_selector("#live[data-state=paused]", timeout=WAIT_MS)
        shown = self.raw("#sidecar [data-figure='sidecar.uptime_s']")
        for told in self.answers("/api/now"):
            if number(told["sidecar"]["uptime_s"]) == shown:
                return told
        raise AssertionError(f"no answer of the sidecar says what the page shows: up for {shown} s")

    def answers(self, path: str) -> Iterator[dict[str, Any]]:
        """What came back when the page asked for that, the newest first."""
        for request in reversed(self.done):
            response = request.response() if path in request.url else None
            if response is not None:
                yield json.loads(response.body())

    def raw(self, selector: str) -> str:
        """The value as it was sent, of a figure."""
        return self.page.locator(selector).first.get_attribute("data-raw") or ""

    def text(self, selector: str) -> str:
        """What stands there, hidden or not."""
        return self.page.locator(selector).first.text_content() or ""

    def figures(self, within: str) -> dict[str, tuple[str, str]]:
        """Value and text of each figure in an element, by name; not those of charts."""
        rows: list[list[str]] = self.page.eval_on_selector_all(
            f"{within} [data-figure]",
            "all => all.filter(one => !one.closest('[data-testid=chart]'))"
            ".map(one => [one.dataset.figure, one.dataset.raw, one.textContent])",
        )
        return {name: (raw, text) for name, raw, text in rows}

    def clean(self) -> None:
        """Fail where the page said an error, opened a dialog, or asked anybody but the sidecar."""
        assert self.said == []
        assert self.dialogs == []
        origin = re.match(r"http://[^/]+/", self.page.url)
        assert origin is not None
        strangers = {request.url for request in self.asked if not request.url.startswith((origin[0], "data:", "blob:"))}
        assert strangers == set()


@contextmanager
def viewing(browser: Browser, **options: Any) -> Iterator[Viewer]:
    """A fresh page in a fresh context; at its end it must have been :meth:`Viewer.clean`."""
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    context.set_default_timeout(WAIT_MS)
    viewer = Viewer(context.new_page())
    viewer.listen()
    try:
        yield viewer
        viewer.clean()
    finally:
        context.close()


def number(value: object) -> str:
    """A JSON value as JavaScript's String() writes it; "" for null."""
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def same(raw: str, value: object) -> bool:
    """Whether a figure's value is that one: numbers by their value, as both languages write floats their own way."""
    if value is None or isinstance(value, str):
        return raw == (value or "")
    return raw != "" and float(raw) == value


def read_size(text: str) -> float:
    """Bytes, of a size in words."""
    amount, _, unit = text.partition(" ")
    return float(amount) * 1024.0 ** _UNITS.index("bytes" if unit == "byte" else unit)


def wait_for(condition: Any, what: str, within_s: float = WAIT_S) -> None:
    """As :func:`wait_until`, of what a page shows."""
    wait_until(condition, within_s, what)
