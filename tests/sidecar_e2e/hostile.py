# SPDX-License-Identifier: Apache-2.0
"""Files in a ring folder that are no rings, or lie."""

from __future__ import annotations

import os
import random
from array import array
from typing import TYPE_CHECKING

from vllm_kvfix.ring import layout

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_HUGE = 1 << 40
_HEADER_WORDS = layout.HEADER_BYTES // layout.WORD


def _header(**words: int) -> array[int]:
    """A header that a reader takes, but for ``words``, by the names of the constants in ``layout``."""
    header = array("Q", [0] * _HEADER_WORDS)
    sound = {"MAGIC": layout.MAGIC, "SCHEMA": layout.SCHEMA, "CAPACITY": 1024, "PID": 1, "START_TIME": 1}
    for name, value in {**sound, **words}.items():
        header[getattr(layout, f"{name}_WORD")] = value
    return header


def _with_body(header: array[int], body: bytes) -> bytes:
    return header.tobytes() + body.ljust(1024 * layout.WORD, b"\0")[: 1024 * layout.WORD]


def random_bytes(path: Path) -> None:
    """Noise."""
    path.write_bytes(random.Random(3).randbytes(20_000))  # noqa: S311  # noise


def empty(path: Path) -> None:
    """Nothing at all: a writer that was killed before its first byte."""
    path.touch()


def text(path: Path) -> None:
    """A file that somebody put there."""
    path.write_text("hello\n" * 2000)


def lying_capacity(path: Path) -> None:
    """A capacity that the file does not have."""
    path.write_bytes(_with_body(_header(CAPACITY=1 << 50), b""))


def zero_capacity(path: Path) -> None:
    """A capacity to divide by."""
    path.write_bytes(_with_body(_header(CAPACITY=0), b""))


def wrong_version(path: Path) -> None:
    """A schema of the future."""
    path.write_bytes(_with_body(_header(SCHEMA=layout.SCHEMA + 98), b""))


def unfinished(path: Path) -> None:
    """The magic, which is written last, is missing."""
    path.write_bytes(_with_body(_header(MAGIC=0), b""))


def huge_sparse(path: Path) -> None:
    """A terabyte that takes no room, and says that it is all ring."""
    path.write_bytes(_header(CAPACITY=(_HUGE - layout.HEADER_BYTES) // layout.WORD).tobytes())
    os.truncate(path, _HUGE)


def symlink(path: Path) -> None:
    """A link to a ring elsewhere."""
    elsewhere = path.parent.parent / "elsewhere"
    elsewhere.write_bytes(_with_body(_header(), b""))
    path.symlink_to(elsewhere)


def fifo(path: Path) -> None:
    """A pipe that would block who opens it."""
    os.mkfifo(path)


def folder(path: Path) -> None:
    """A folder of that name."""
    path.mkdir()


REFUSED: tuple[Callable[[Path], None], ...] = (
    random_bytes,
    empty,
    text,
    lying_capacity,
    zero_capacity,
    wrong_version,
    unfinished,
    huge_sparse,
    symlink,
    fifo,
    folder,
)


def head_far_ahead(path: Path) -> None:
    """A ring that says that it has published far more than it holds, over a body of noise."""
    noise = random.Random(4).randbytes(1024 * layout.WORD)  # noqa: S311  # noise
    path.write_bytes(_with_body(_header(HEAD=1 << 63, CLAIM=1 << 63, EVENTS=1 << 62), noise))


def largest_words(path: Path) -> None:
    """A ring each of whose fields is the largest number, but for those that make it one."""
    header = array("Q", [layout.WORD_MASK] * _HEADER_WORDS)
    header[layout.MAGIC_WORD], header[layout.SCHEMA_WORD], header[layout.CAPACITY_WORD] = layout.MAGIC, 1, 1024
    path.write_bytes(_with_body(header, b"\xff" * 1024 * layout.WORD))


def whole_frames_of_noise(path: Path) -> None:
    """Whole frames, in place and with a right checksum, whose payloads are noise under every kind of record."""
    source = random.Random(5)  # noqa: S311  # noise
    words: list[int] = []
    for kind in range(12):
        records = [kind << 56 | source.randint(0, 20) << 40 | source.getrandbits(40)]
        records += [source.getrandbits(64) for _ in range(19)]
        words += layout.frame(len(words), kind, 1, records)
    header = _header(HEAD=len(words), CLAIM=len(words), EVENTS=12)
    path.write_bytes(_with_body(header, array("Q", words).tobytes()))


def frame_of_largest_words(path: Path) -> None:
    """Whole frames of well-formed records, each of whose numbers is the largest."""
    most = layout.WORD_MASK
    step = [2 << 56 | 15 << 40, *[most] * 14]
    identity = [most, most, most, 0xFF << 32 | 8, most]
    arrived = [3 << 56 | 8 << 40 | 1, most, most, *identity]
    finished = [9 << 56 | 17 << 40 | 1, *[most] * 9, 1, most, *identity]
    words = list(layout.frame(0, 0, 3, [*step, *arrived, *finished]))
    header = _header(HEAD=len(words), CLAIM=len(words), EVENTS=3)
    path.write_bytes(_with_body(header, array("Q", words).tobytes()))


LYING: tuple[Callable[[Path], None], ...] = (
    head_far_ahead,
    largest_words,
    whole_frames_of_noise,
    frame_of_largest_words,
)


def patch(ring: Path, word: int, value: int) -> None:
    """Overwrite a word of a ring's header."""
    with ring.open("r+b") as file:
        file.seek(word * layout.WORD)
        file.write(value.to_bytes(layout.WORD, "little"))
