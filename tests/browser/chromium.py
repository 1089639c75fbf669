# SPDX-License-Identifier: Apache-2.0
"""Debian's Chromium, installed if it is missing; it can reach this machine's loopback, and nothing else."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from playwright.sync_api import sync_playwright

from tests.debian import program

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser

EVIL = "evil.example"
# Every name is unknown, as without a network, but for the one by which a test has a stranger's page lead here.
_RULES = f"MAP {EVIL} 127.0.0.1, MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"
_FLAGS = (
    "--no-sandbox",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    f"--host-resolver-rules={_RULES}",
)


def chromium_binary() -> str:
    """The path of ``chromium``."""
    return program("chromium", "chromium", "THE PAGE IS NOT TESTED in a real browser")


@contextmanager
def chromium() -> Iterator[Browser]:
    """The browser."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_binary(), args=list(_FLAGS))
        try:
            yield browser
        finally:
            browser.close()
