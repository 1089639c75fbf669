# SPDX-License-Identifier: Apache-2.0
"""What may go wrong with watching, on a release's real scheduler: each scenario a function, run by `run_release.py`.

In each, the outputs of the scheduler are those of one that is not watched.
"""

from __future__ import annotations

import errno
import logging
import mmap
import os
import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from tests.contract import accounts, snapshots
from tests.contract import driver as d
from vllm_kvfix import events, faults, ledger, live, observe, plugin, recorder
from vllm_kvfix.ring.reader import RingReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

REQUESTS = 24


class _Heard(logging.Handler):
    """The lines that our logger was given."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


@contextmanager
def watching(folder: Path, **environ: str) -> Iterator[list[str]]:
    """Watch, with the fix off, and give everything back at the end; the lines that were logged."""
    heard = _Heard()
    observe.logger.addHandler(heard)
    level = observe.logger.level
    observe.logger.setLevel(logging.INFO)
    plugin.register({"VLLM_KVFIX_PATCH": "off", "VLLM_KVFIX_RING_DIR": str(folder), **environ})
    try:
        yield heard.lines
    finally:
        left = plugin.restore()
        observe.logger.removeHandler(heard)
        observe.logger.setLevel(level)
        faults.counts.clear()
    if left:
        raise AssertionError(f"restore() left {left}")


def load(driver: d.Driver, requests: int = REQUESTS) -> list[Any]:
    """Run a load to its end, an abort on the way; the outputs."""
    for number in range(requests):
        driver.add_request(f"r{number}", prompt_seed=number % 3, prompt_length=20 + 3 * (number % 11), max_tokens=12)
    outputs = []
    while driver.scheduler.has_unfinished_requests():
        outputs.append(snapshots.snapshot(driver.step()))
        if len(outputs) == 3:
            driver.abort("r1")
    outputs.append(snapshots.snapshot(driver.step()))
    return outputs


def _same_as_stock(folder: Path, check: Callable[[d.Driver], object] | None = None, **environ: str) -> list[str]:
    """The load watched and not watched gives the same outputs; the lines logged while it was watched."""
    stock = load(d.make_scheduler(num_blocks=40))
    with watching(folder, **environ) as lines:
        driver = d.make_scheduler(num_blocks=40)
        found = load(driver)
        if check is not None:
            check(driver)
    if found != stock:
        raise AssertionError("the outputs differ: " + "\n".join(snapshots.differences(stock, found)))
    return list(lines)


def _told() -> None:
    """Wait until the one recorder there is has published all that was noted."""
    (kept,) = set(observe._recorders.values())
    deadline = time.monotonic() + 30
    while kept._notes:
        if time.monotonic() > deadline:
            raise AssertionError(f"{len(kept._notes)} notes are still not worked up")
        kept._end.wait(0.01)
    with kept._working:  # and the chunk that was taken last is out
        pass


def _fall_silent() -> None:
    """Have the process tell nothing more of itself; what is noted of requests is published all the same."""
    (observation,) = plugin._observations
    voice = observation._roots._voice
    thread = voice._thread
    voice.stop()
    if thread is not None:
        thread.join(30)


def _one(lines: list[str], *parts: str) -> None:
    """Exactly one line was logged, and it holds each of `parts`."""
    if len(lines) != 1 or not all(part in lines[0] for part in parts):
        raise AssertionError(f"wanted one line with {parts}, logged were {lines}")


def a_ring_is_made_and_said_in_one_line(folder: Path) -> None:
    """One INFO line names the ring and how to turn it off; the ring tells every request."""
    lines = _same_as_stock(folder)
    _one(lines, "INFO", str(folder), "VLLM_KVFIX_OBSERVE=off")
    account = accounts.read(folder)
    if len(account.of(events.Finished)) != REQUESTS:
        raise AssertionError(f"{len(account.of(events.Finished))} of {REQUESTS} requests were told")


def a_folder_that_cannot_be_made(folder: Path) -> None:
    """A file in the folder's place: not watched, one WARNING with the reason."""
    (folder / "file").write_text("")
    _one(_same_as_stock(folder / "file" / "rings"), "WARNING", "NOT watching", "no ring can be made")


def a_disk_that_is_full(folder: Path) -> None:
    """No space for the ring: not watched, one WARNING, nothing left behind."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with mock.patch.object(os, "posix_fallocate", side_effect=full):
        _one(_same_as_stock(folder), "WARNING", "NOT watching", "No space left")
    if list(folder.iterdir()):
        raise AssertionError(f"left behind: {list(folder.iterdir())}")


def a_filesystem_without_mmap(folder: Path) -> None:
    """A mapping is not to be had: not watched, one WARNING, nothing left behind."""
    missing = OSError(errno.ENODEV, os.strerror(errno.ENODEV))
    with mock.patch.object(mmap, "mmap", side_effect=missing):
        _one(_same_as_stock(folder), "WARNING", "NOT watching", "No such device")
    if list(folder.iterdir()):
        raise AssertionError(f"left behind: {list(folder.iterdir())}")


def a_ring_that_is_deleted(folder: Path) -> None:
    """The file is gone in mid-flight: nothing is said, and nothing comes back."""
    stock = load(d.make_scheduler(num_blocks=40))
    with watching(folder) as lines:
        driver = d.make_scheduler(num_blocks=40)
        next(folder.glob("*.ring")).unlink()
        found = load(driver)
    if found != stock or len(lines) != 1 or list(folder.iterdir()):
        raise AssertionError(f"{found == stock}, {lines}, {list(folder.iterdir())}")


def a_value_that_is_neither_on_nor_off(folder: Path) -> None:
    """VLLM_KVFIX_OBSERVE=maybe: not watched, one WARNING that names variable and value."""
    lines = _same_as_stock(folder, VLLM_KVFIX_OBSERVE="maybe")
    _one(lines, "WARNING", "VLLM_KVFIX_OBSERVE=maybe is neither on nor off")


def a_size_that_is_none(folder: Path) -> None:
    """A wrong size: watched with the default one, and said so."""
    lines = _same_as_stock(folder, VLLM_KVFIX_RING_SIZE="huge")
    if not ("VLLM_KVFIX_RING_SIZE=huge" in lines[0] and "watching the KV blocks" in lines[1]):
        raise AssertionError(str(lines))


def a_tiny_ring(folder: Path) -> None:
    """With the smallest ring, events read and lost add up to those published, and so do requests told and missing."""
    with watching(folder, VLLM_KVFIX_RING_SIZE="16KiB"):
        driver = d.make_scheduler(num_blocks=400)
        (path,) = folder.glob("*.ring")
        load(driver, 400)
    reader = RingReader(path)
    told = [event for frame in reader.poll() for event in events.decode(frame.payload)]
    reader.close()
    if len(told) + reader.lost != reader.header.events or not told or not reader.lost:
        raise AssertionError(f"{len(told)} told, {reader.lost} lost, {reader.header.events} published")


def a_thousand_requests_in_one_step(folder: Path) -> None:
    """1,000 requests admitted in one step are told, each with its blocks."""
    with watching(folder):
        driver = d.make_scheduler(num_blocks=4000, max_num_seqs=1000, max_num_batched_tokens=40_000, count=True)
        for number in range(1000):
            driver.add_request(f"r{number}", prompt_seed=number, prompt_length=33, max_tokens=2)
        output = driver.step()
        driver.run()
        driver.step()
    if len(output.scheduled_new_reqs) != 1000:
        raise AssertionError(f"only {len(output.scheduled_new_reqs)} were admitted at once")
    account = accounts.read(folder)
    new = sum(g.new for f in account.of(events.Finished) for g in f.groups)
    if (account.lost, account.dropped, new) != (0, 0, sum(d.allocated(driver))):
        raise AssertionError(f"{account.lost} lost, {account.dropped} dropped, {new} new of {d.allocated(driver)}")


def errors_of_our_own(folder: Path) -> None:
    """With a ledger that fails, outputs stay the same; after ten errors watching stops, with one WARNING, for good."""

    def until_it_stops(driver: d.Driver) -> None:
        (kept,) = set(observe._recorders.values())
        for number in range(20_000):
            driver.add_request(f"s{number}", prompt_length=16, max_tokens=1)
            driver.run()
            if kept.off:
                break
        # One thing may have been noted just as the thread stopped it all.
        left = len(kept._notes), len(kept._lookups), len(kept._kept)
        load(driver)
        if (len(kept._notes), len(kept._lookups), len(kept._kept)) != left or max(left) > 1:
            raise AssertionError(f"noted after the end: {left} before the load, {len(kept._notes)} notes after it")

    with mock.patch.object(ledger.Ledger, "work_up", side_effect=ZeroDivisionError("ours")):
        lines = _same_as_stock(folder, until_it_stops)
    said = [line for line in lines if "watching stopped" in line]
    contained = [line for line in lines if "was contained" in line]
    if len(said) != 1 or not contained or len(lines) > 5:
        raise AssertionError(str(lines))


def every_hook_fails(folder: Path) -> None:
    """With every method of vLLM's objects that we ask failing, outputs stay the same."""
    broken = mock.Mock(side_effect=ZeroDivisionError("ours"))
    with mock.patch.multiple(live.CacheView, lengths=broken, free=broken, block_ids=broken):
        _same_as_stock(folder)


def a_forked_child(folder: Path) -> None:
    """A forked child of the engine steps on and writes nothing into its parent's ring."""
    with watching(folder):
        driver = d.make_scheduler(num_blocks=40)
        driver.add_request("r0", prompt_length=30, max_tokens=4)
        driver.step()
        (path,) = folder.glob("*.ring")
        _fall_silent()
        _told()
        before = path.read_bytes()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                driver.run()
                driver.step()
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        if status or path.read_bytes() != before:
            raise AssertionError(f"child ended with {status}, ring unchanged: {path.read_bytes() == before}")


def somebody_elses_allocate_slots(folder: Path) -> None:
    """An attribute that another plugin put on the cache manager stays there, and is called as often as without us."""
    calls = []
    for watched in (False, True):
        with watching(folder, VLLM_KVFIX_OBSERVE="on" if watched else "off"):
            driver = d.make_scheduler(num_blocks=40)
            manager = driver.scheduler.kv_cache_manager
            theirs = mock.Mock(side_effect=manager.allocate_slots)
            manager.allocate_slots = theirs
            load(driver)
            if manager.allocate_slots is not theirs:
                raise AssertionError("their attribute is gone")
            calls.append(theirs.call_count)
    if len(set(calls)) != 1:
        raise AssertionError(f"called {calls} times")


def a_scheduler_that_ran_before(folder: Path) -> None:
    """Watched from the middle of its work, a scheduler's live requests are told at their end, with all their blocks."""
    with watching(folder, VLLM_KVFIX_OBSERVE="on"):
        driver = d.make_scheduler(num_blocks=100, count=True)
    for path in folder.glob("*.ring"):
        path.unlink()
    for number in range(4):
        driver.add_request(f"r{number}", prompt_seed=number, prompt_length=40, max_tokens=30)
    for _ in range(5):
        driver.step()
    with watching(folder):
        observe.Observation({"VLLM_KVFIX_RING_DIR": str(folder)}, lambda: "off").watch(driver.scheduler)
        driver.run()
        driver.step()
    finished = accounts.read(folder).of(events.Finished)
    new = sum(g.new for f in finished for g in f.groups)
    if len(finished) != 4 or new != sum(d.allocated(driver)):
        raise AssertionError(f"{len(finished)} told, {new} blocks of {d.allocated(driver)}")


def a_request_that_is_refused_in_two_waits(folder: Path) -> None:
    """It is told once for each of its waits, not once for each try, and not once for all."""
    with watching(folder):
        driver = d.make_scheduler(num_blocks=16)
        for number in range(8):
            driver.add_request(f"r{number}", prompt_seed=number, prompt_length=33, max_tokens=60)
        driver.run()
        driver.step()
    account = accounts.read(folder)
    told = Counter(event.number for event in account.of(events.Refused))
    for request in account.of(events.Finished):
        if not min(request.refusals, 1) <= told[request.number] <= min(request.refusals, 1 + request.preemptions):
            raise AssertionError(f"told {told[request.number]} times: {request}")
    if max(told.values()) < 2 or sum(told.values()) >= account.of(events.Step)[-1].refusals:
        raise AssertionError(f"nobody was refused in two waits, or each try was told: {told}")


def a_victim_that_got_blocks_in_the_step_that_took_them(folder: Path) -> None:
    """Under priority scheduling such blocks show in no output; they are counted all the same."""
    unseen = 0
    with watching(folder):
        driver = d.make_scheduler(num_blocks=27, policy="priority", count=True)
        # Those that matter more come later, and need a block in the same steps: who is served first in a step is
        # preempted for who is served last.
        for number in range(12):
            if number == 6:
                for _ in range(d.BLOCK_SIZE):
                    driver.step()
            priority = 1 if number < 6 else 0
            driver.add_request(f"r{number}", prompt_seed=number, prompt_length=16, max_tokens=90, priority=priority)
        while driver.scheduler.has_unfinished_requests():
            before = sum(d.allocated(driver))
            output = driver.step()
            rows = output.scheduled_cached_reqs
            shown = [row.block_ids for row in output.scheduled_new_reqs] + [ids for ids in rows.new_block_ids if ids]
            # Reused blocks are shown, too, but not taken.
            unseen += max(0, sum(d.allocated(driver)) - before - sum(len(ids) for groups in shown for ids in groups))
        driver.step()
    account = accounts.read(folder)
    new = sum(g.new for f in account.of(events.Finished) for g in f.groups)
    if new != sum(d.allocated(driver)):
        raise AssertionError(f"{new} blocks told, {d.allocated(driver)} taken")
    if unseen <= 0:
        raise AssertionError("nothing was taken that no output shows: this proves nothing")


def a_request_that_never_ends(folder: Path) -> None:
    """While one request runs on and on, neither notes nor states pile up, and the ring stays as large as it was."""
    with watching(folder, VLLM_KVFIX_RING_SIZE="64KiB"):
        driver = d.make_scheduler(num_blocks=2000, max_model_len=30_000)
        driver.add_request("endless", prompt_length=16, max_tokens=29_000)
        (kept,) = set(observe._recorders.values())  # what must not grow
        for _ in range(5000):
            driver.step()
        (path,) = folder.glob("*.ring")
        sizes = (len(kept._notes), len(kept._ledger._requests), path.stat().st_size)
        driver.abort("endless")
        driver.step()
    if sizes[0] > recorder.CROWDED * recorder.MOST_NOTES + 2 or sizes[1] != 1 or sizes[2] != 64 << 10:
        raise AssertionError(f"notes, states, bytes: {sizes}")


SCENARIOS = (
    a_ring_is_made_and_said_in_one_line,
    a_folder_that_cannot_be_made,
    a_disk_that_is_full,
    a_filesystem_without_mmap,
    a_ring_that_is_deleted,
    a_value_that_is_neither_on_nor_off,
    a_size_that_is_none,
    a_tiny_ring,
    a_thousand_requests_in_one_step,
    errors_of_our_own,
    every_hook_fails,
    a_forked_child,
    somebody_elses_allocate_slots,
    a_scheduler_that_ran_before,
    a_request_that_is_refused_in_two_waits,
    a_victim_that_got_blocks_in_the_step_that_took_them,
    a_request_that_never_ends,
)


def run() -> list[str]:
    """Run every scenario in a folder of its own; their names.

    Raises:
        AssertionError: One does not hold; the message begins with its name.
    """
    return accounts.run_scenarios(SCENARIOS)
