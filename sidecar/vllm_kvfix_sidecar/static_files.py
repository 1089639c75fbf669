# SPDX-License-Identifier: Apache-2.0
"""The files of the page, read once: what is served is looked up in a table of names, so no path leads elsewhere."""

from __future__ import annotations

import gzip
import hashlib
from importlib import resources
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.abc import Traversable

INDEX = "index.html"
# A page without them shows nothing; build_page.py brings what is in vendor/.
NEEDED = (INDEX, "vendor/uPlot.iife.min.js", "vendor/uPlot.min.css")
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


class PageMissingError(RuntimeError):
    """This installation has no page, or a part of one; the message says what to do."""


class StaticFile(NamedTuple):
    """A file and its packed form; ``tag`` changes whenever its bytes do."""

    body: bytes
    packed: bytes
    content_type: str
    tag: str


def load(folder: Traversable | None = None) -> dict[str, StaticFile]:
    """Each file of the page by the path that it is served at.

    Raises:
        PageMissingError: A file is missing without which there is no page.
    """
    found = dict(_files(folder or resources.files(__package__) / "page"))
    missing = [name for name in NEEDED if name not in found]
    if missing:
        raise PageMissingError(
            f"there is no page, since {missing[0]} is missing from this installation; install it anew: "
            "pip install --force-reinstall --no-deps vllm-kvfix; in a checkout uv sync --reinstall-package vllm-kvfix"
        )
    return {"/" if name == INDEX else f"/page/{name}": file for name, file in found.items()}


def _files(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, StaticFile]]:
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if entry.is_dir():
            yield from _files(entry, f"{prefix}{entry.name}/")
        elif suffix in _TYPES:
            body = entry.read_bytes()
            tag = f'W/"{hashlib.sha256(body).hexdigest()[:32]}"'
            yield prefix + entry.name, StaticFile(body, gzip.compress(body, 9, mtime=0), _TYPES[suffix], tag)
