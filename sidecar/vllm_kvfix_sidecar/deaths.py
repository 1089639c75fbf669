# SPDX-License-Identifier: Apache-2.0
"""What the sidecar does by itself when a process with a ring dies: a span, an event, and one line in the log.

Of the processes that die together, the first is told and the others are named with it: when a worker is killed, its
engine and its server give up within a second or so. What ends in order is no death. One that was over long before the
sidecar came is left to ``vllm-kvfix postmortem``.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from vllm_kvfix.ring.layout import ENGINE_CORE, WORKER
from vllm_kvfix.ring.reader import RingError
from vllm_kvfix_sidecar import death, death_export, kernel_log, last_words, report, together
from vllm_kvfix_sidecar.cursors import Cursor
from vllm_kvfix_sidecar.death import End
from vllm_kvfix_sidecar.logs import fields
from vllm_kvfix_sidecar.oom import KillCounts, Witness
from vllm_kvfix_sidecar.together import TOGETHER_S, Gone
from vllm_kvfix_sidecar.words import clean, size

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from opentelemetry.sdk.resources import Resource

    from vllm_kvfix_sidecar import event_export
    from vllm_kvfix_sidecar.assessment import Assessment, Feed
    from vllm_kvfix_sidecar.death import Death
    from vllm_kvfix_sidecar.engines import Engine
    from vllm_kvfix_sidecar.last_words import LastWords
    from vllm_kvfix_sidecar.oom import Use
    from vllm_kvfix_sidecar.report import ProcessReport
    from vllm_kvfix_sidecar.spans import SpanMaker

# How long others are waited for, that end with the first; who ends after that is named in the log. Less where the end
# itself took long, as that of a large process on a busy machine does: it is to be told within five seconds.
GATHER_S, HURRY_S, LEAST_S = 1.0, 3.0, 0.2
# A death that is older when it is found is no news.
RECENT_S = 600.0
MOST_GROUPS = 64
MOST_TOGETHER = 64
CLOSING_S = 3.0

_log = logging.getLogger(__name__)


class Sink(Protocol):
    """A queue that can be emptied at once."""

    def flush(self) -> None:
        """Export what is queued, and wait for that."""


class _Ended(NamedTuple):
    """A process that ended, and how it was followed."""

    gone: Gone
    engine: Engine
    feed: Feed | None


@dataclass
class _Group:
    """Processes of one deployment that ended together; ``told_at``: when the first was told, None: not yet."""

    due: float
    ended: list[_Ended]
    told_at: float | None = None
    waited: bool = False


class _Told(NamedTuple):
    """What was found out: of the first that died, None: it cannot be told, and what was seen of each."""

    death: Death | None
    ended: list[_Ended]


class Deaths:
    """Called by the pipeline's thread alone; what takes longer is done in one of its own."""

    def __init__(  # noqa: PLR0913  # its parts
        self,
        resource: Resource,
        spans: SpanMaker | None,
        events: event_export.Sink | None,
        *,
        assessment: Assessment | None = None,
        flush: Sequence[Sink] = (),
        proc: Path = Path("/proc"),
        cgroups: Path = Path("/sys/fs/cgroup"),
        kernel: Path = kernel_log.KMSG,
        unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Know of nothing yet.

        Args:
            resource: Of spans and events.
            spans: Hands on the spans; None: none are made.
            events: Takes the events; None: none are made.
            assessment: Knows the processes' past; None: only their rings do.
            flush: Are emptied when a death was told, since their delay may be longer than it should take.
            proc: Where a process table is mounted.
            cgroups: Where the cgroups are mounted.
            kernel: The kernel's log.
            unix_ns: The wall clock.
        """
        self.told = 0
        self._resource = resource
        self._spans = spans
        self._events = events
        self._assessment = assessment
        self._flush = flush
        self._proc = proc
        self._kernel = kernel
        self._unix_ns = unix_ns
        self._counts = KillCounts(proc, cgroups)
        self._groups: dict[Hashable, _Group] = {}
        self._made: deque[_Told] = deque()
        self._live: dict[Engine, Feed | None] = {}
        self._working: list[threading.Thread] = []

    def lives(self, engine: Engine, feed: Feed | None) -> None:
        """A process is followed: remember what its cgroup counts; to be called once a second."""
        self._live[engine] = feed
        if feed is not None:
            with _contained():
                self._counts.look(engine.file, feed.record.key)

    def ended(self, engine: Engine, feed: Feed | None, now: float) -> None:
        """A process has ended, and its ring was read to its end."""
        with _contained():
            self._note(engine, feed, now)

    def forget(self, engine: Engine) -> None:
        """It is not followed any more, for another reason than its end."""
        self._live.pop(engine, None)

    def _note(self, engine: Engine, feed: Feed | None, now: float) -> None:
        self._live.pop(engine, None)
        gone = Gone(engine.path, engine.header, self._counts.after(engine.file, engine.header.heartbeat_ns), now)
        found = _Ended(gone, engine, feed)
        if self._age(gone) > RECENT_S:
            if gone.end is not End.IN_ORDER:
                _log.info("%s was over long before: see `vllm-kvfix postmortem %s`", gone.who, engine.path)
            return
        key = self._key(engine, feed)
        group = self._groups.get(key)
        if group is not None and group.told_at is not None:
            gone = together.settled([gone], [engine.header for engine in self._of_deployment(key)])[0]
            found = found._replace(gone=gone)
            _log.info("%s, too, %s", gone.who, gone.how)
            self._made.append(_Told(None, [found]))
        elif group is not None:
            group.ended = [*group.ended, found][:MOST_TOGETHER]
        elif len(self._groups) < MOST_GROUPS:
            self._groups[key] = _Group(now + max(LEAST_S, min(GATHER_S, HURRY_S - self._age(gone))), [found])

    @staticmethod
    def _key(engine: Engine, feed: Feed | None) -> Hashable:
        """The same for the processes of one deployment; where that is not known, of one folder."""
        root = feed.record.root if feed is not None else None
        return root or engine.path.parent

    def _of_deployment(self, key: Hashable) -> list[Engine]:
        """Those that have not ended: a server outlives what it stops, an engine core may outlive its worker a while."""
        return [engine for engine, feed in self._live.items() if self._key(engine, feed) == key]

    def _awaits_core(self, key: Hashable, group: _Group) -> bool:
        """Whether an engine core has lost a worker and will end of it: its requests are lost only then."""
        roles = {found.gone.header.role for found in group.ended if found.gone.end is not End.IN_ORDER}
        lives = any(engine.header.role == ENGINE_CORE for engine in self._of_deployment(key))
        in_time = self._age(group.ended[0].gone) + GATHER_S <= HURRY_S
        return WORKER in roles and ENGINE_CORE not in roles and lives and in_time

    def _age(self, gone: Gone) -> float:
        """Seconds since its last sign of life."""
        return (self._unix_ns() - gone.unix_ns) / 1e9

    def turn(self, now: float) -> None:
        """Tell what is due."""
        with _contained():
            self._turn(now)

    def _turn(self, now: float) -> None:
        for key, group in list(self._groups.items()):
            if group.told_at is not None:
                if now - group.told_at > TOGETHER_S:
                    del self._groups[key]
            elif now >= group.due and not group.waited and self._awaits_core(key, group):
                group.waited, group.due = True, now + GATHER_S
            elif now >= group.due:
                group.told_at = now
                self._begin(group.ended, self._of_deployment(key))
        self._working = [thread for thread in self._working if thread.is_alive()]
        self._tell_made()

    def close(self, now: float) -> None:
        """Tell what is known, due or not."""
        for group in self._groups.values():
            group.due = now
        self.turn(now)
        for thread in self._working:
            thread.join(CLOSING_S)
        self.turn(now)

    def _begin(self, ended: list[_Ended], live: list[Engine]) -> None:
        """Have the first of those that died looked into, in a thread: a ring takes half a second to read."""
        headers = [*(engine.header for engine in live), *(found.gone.header for found in ended)]
        gone = together.settled([found.gone for found in ended], headers)
        ended = [found._replace(gone=one) for found, one in zip(ended, gone, strict=True)]
        if all(found.gone.end is End.IN_ORDER for found in ended):
            self._made.append(_Told(None, ended))
            return
        thread = threading.Thread(target=self._make, args=(ended, live), name="vllm-kvfix-death", daemon=True)
        self._working.append(thread)
        thread.start()

    def _make(self, ended: list[_Ended], live: list[Engine]) -> None:
        ended = [found._replace(gone=self._with_kernel(found)) for found in ended]
        one = together.first([found.gone for found in ended])
        ended = [_named_first(found, one) for found in ended]
        made = None
        try:
            made = self._death(one, ended, live)
        except (RingError, OSError) as error:
            _log.warning("%s %s and its ring cannot be read any more: %s", one.who, one.how, error)
        except Exception:  # noqa: BLE001  # one that cannot be told must not hide the others
            _log.exception("the end of %s cannot be told", one.who)
        self._made.append(_Told(made, ended))

    def _with_kernel(self, found: _Ended) -> Gone:
        pid = found.feed.record.key.pid if found.feed is not None else found.engine.pid
        line = kernel_log.about(pid, found.engine.header.heartbeat_ns / 1e9, self._kernel)
        witness = found.gone.witness or Witness()
        return found.gone._replace(witness=replace(witness, kernel=line))

    def _death(self, one: Gone, ended: list[_Ended], live: list[Engine]) -> Death:
        words = last_words.of(one.path, proc=self._proc)
        others = together.with_it(one, [found.gone for found in ended])
        core = together.core_of(one, [*others, *(Gone(engine.path, engine.header) for engine in live)])
        process, use = self._known(next(found for found in ended if found.gone.path == one.path), words)
        return death.of(
            words,
            one.witness,
            process=process,
            use=use,
            engine=None if core is None else last_words.of(core.path, proc=self._proc),
            others=together.sentences(one, others),
            deaths=together.deaths(one, others),
            named=together.named(others),
        )

    def _known(self, first: _Ended, words: LastWords) -> tuple[ProcessReport | None, Use | None]:
        """What the sidecar knows that the ring does not: a verdict on more than its minutes, and the host's limit."""
        assessment, feed = self._assessment, first.feed
        if assessment is None or feed is None:
            return None, None
        known = assessment.verdicts.get(feed.record.key)
        with assessment.lock:
            history = feed.record.history({})
        if known is None or known.window_s < words.process.verdict.window_s:
            known = words.process.verdict
        limit, use = history.limit, None
        if limit is not None and limit.usage.times:
            use = last_words.use_of(limit.limit, limit.usage, limit.of, words.end_ns / 1e9)
        return report.of(history, known), use

    def _tell_made(self) -> None:
        told = 0
        while self._made:
            made = self._made.popleft()
            for found in made.ended:
                if found.gone.witness is not None:
                    found.engine.save(_final(found.engine), found.gone.witness.as_json())
            if made.death is not None:
                self._tell(made.death)
                told += 1
        self.told += told
        if told and self._flush:
            threading.Thread(target=self._flush_all, name="vllm-kvfix-flush", daemon=True).start()

    def _flush_all(self) -> None:
        for sink in self._flush:
            sink.flush()

    def _tell(self, made: Death) -> None:
        if self._spans is not None:
            self._spans.hand_on(death_export.span(made, self._resource, self._spans.limits))
        if self._events is not None:
            self._events.emit(death_export.event(made, self._resource))
        use = made.use
        _log.warning(
            "%s",
            clean(f"{death.sentence(made)} {' '.join(made.others)}".strip(), 2000),
            extra=fields(
                pid=made.words.header.pid,
                role=made.words.header.role,
                oom=made.oom.oom.value,
                rss=_size(made.process.figures.get("status.rss")),
                usage=_size(None if use is None else use.usage),
                limit=_size(None if use is None else use.limit),
                requests_lost=made.lost_requests,
                more=f"vllm-kvfix postmortem {made.words.path}",
            ),
        )


@contextlib.contextmanager
def _contained() -> Iterator[None]:
    """What fails here is said, and stops nothing else that the sidecar does."""
    try:
        yield
    except Exception:  # noqa: BLE001  # as it says
        _log.exception("what ended cannot be told in full; all else goes on")


def _size(value: float | None) -> str:
    return "not known" if value is None else size(value)


def _named_first(found: _Ended, one: Gone) -> _Ended:
    witness = replace(found.gone.witness or Witness(), first=one.path.name)
    return found._replace(gone=found.gone._replace(witness=witness))


def _final(engine: Engine) -> Cursor:
    return Cursor(max(engine.consumed, engine.cursor.events), engine.lost, ended=True)
