# SPDX-License-Identifier: Apache-2.0
"""Opens the ring that this process tells of itself through: where, how large, and who writes."""

from __future__ import annotations

import contextlib
import logging
import sys
import weakref
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_kvfix import __version__, upstream
from vllm_kvfix.ring import layout, place
from vllm_kvfix.ring.writer import Origin, RingWriter

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(upstream.LOGGER_NAME)

# A process without a scheduler tells little: this holds some ten minutes of it.
SMALL_SIZE = 1 << 20
_FIRST = 1 << 20  # among what is done at the end of a process


def open_ring(
    environ: Mapping[str, str], vllm_version: str, role: str = layout.ENGINE_CORE, engine_index: int = 0
) -> RingWriter:
    """A new ring for this process, in the folder that ``environ`` names; those of long ended processes go.

    Raises:
        OSError, PlaceError: None can be made there.
    """
    folder = place.default_folder(environ)
    try:
        size = place.ring_size(environ)
    except ValueError as error:
        size = place.DEFAULT_SIZE
        logger.warning("vllm-kvfix %s: %s. The ring gets %d MiB.", __version__, error, size >> 20)
    try:
        mode = place.ring_mode(environ)
    except ValueError as error:
        mode = place.DEFAULT_MODE
        logger.warning("vllm-kvfix %s: %s. The ring gets %o.", __version__, error, mode)
    if role != layout.ENGINE_CORE:
        size = min(size, SMALL_SIZE)
    path = place.new_ring(folder)
    place.clean_up(folder)
    writer = RingWriter(path, layout.capacity(size), this_process(engine_index, vllm_version, role), mode)
    # Not by atexit: before Python 3.13 a forked child of multiprocessing ends without that.
    util.Finalize(None, _say_end, (weakref.ref(writer),), exitpriority=_FIRST)
    return writer


def _say_end(found: weakref.ref[RingWriter]) -> None:
    """The process ends by itself: say so in its ring, so that a death without a word is known to be one."""
    writer = found()
    if writer is None:
        return
    with contextlib.suppress(Exception):  # closed already; and whatever it is, vLLM's end must go its way
        # In a child, that which leaves its target; in a main process, that which the interpreter has printed.
        error = sys.exc_info()[1] or (None if hasattr(sys, "ps1") else getattr(sys, "last_value", None))
        if error is None or isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and not error.code):
            writer.end(layout.ENDED_IN_ORDER)
        else:
            code = f" {error.code}" if isinstance(error, SystemExit) and isinstance(error.code, int) else ""
            # Not its message, which may hold what users sent; vLLM's log has it.
            writer.end(layout.ENDED_BY_EXCEPTION, f"{type(error).__module__}.{type(error).__qualname__}{code}")


def this_process(
    engine_index: int, vllm_version: str, role: str = layout.ENGINE_CORE, proc: Path = Path("/proc")
) -> Origin:
    """Who writes, for a ring's header.

    Raises:
        OSError: ``proc`` is not what Linux has there.
    """
    # The name, in parentheses, may hold anything; the start time is the 20th field after it.
    start_time = int((proc / "self" / "stat").read_text().rpartition(")")[2].split()[19])
    boot_id = bytes.fromhex((proc / "sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    return Origin(start_time, boot_id, engine_index, vllm_version, __version__, role)
