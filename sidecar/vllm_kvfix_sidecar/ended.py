# SPDX-License-Identifier: Apache-2.0
"""Says of the processes that ended in the last minutes that they did, and who tells more: they are in no table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_kvfix.ring.layout import ENGINE_CORE
from vllm_kvfix_sidecar import together
from vllm_kvfix_sidecar.death import End
from vllm_kvfix_sidecar.engines import ENDED
from vllm_kvfix_sidecar.together import Gone
from vllm_kvfix_sidecar.words import clean, duration

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_kvfix_sidecar.engines import Engine

RECENT_S = 900.0
MOST = 8


def sentences(engines: Iterable[Engine], now_unix_ns: int) -> tuple[str, ...]:
    """One of each process that died within ``RECENT_S``, and of each engine core that ended in order, newest first."""
    engines = list(engines)
    ended = [Gone(engine.path, engine.header) for engine in engines if engine.state == ENDED]
    found = []
    for one in together.settled(ended, [engine.header for engine in engines]):
        ago = (now_unix_ns - one.unix_ns) / 1e9
        if ago <= RECENT_S and (one.end is not End.IN_ORDER or one.header.role == ENGINE_CORE):
            found.append((ago, _sentence(one, ago)))
    return tuple(sentence for _, sentence in sorted(found)[:MOST])


def _sentence(one: Gone, ago: float) -> str:
    more = f"`vllm-kvfix postmortem {clean(str(one.path), 300)}`"
    return f"{one.who} {one.how} {duration(max(0.0, ago))} ago: {more} tells its last seconds."
