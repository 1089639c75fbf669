# SPDX-License-Identifier: Apache-2.0
"""Real engines under real HTTP load, with the plugin installed beside them and without it."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.engine.harness import REQUESTS, Observed, listing
from vllm_kvfix.ring.reader import RingReader

if TYPE_CHECKING:
    from tests.engine.harness import Workshop

pytestmark = pytest.mark.engine

# The first affected release, the last one, and the newest, where there is nothing to fix.
AFFECTED = ("0.17.1", "0.25.1")
UNAFFECTED = ("0.32.0",)
# What one process adds up in another order can differ in the last bits of a 32-bit float.
LOGPROB_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Pair:
    """The same release under the same load, with the plugin and then, its folder gone from the path, without.

    ``before`` and ``after`` list the environment's files, so that what the plugin leaves behind would show.
    """

    release: str
    fixed: Observed
    without: Observed
    before: dict[str, tuple[int, int]]
    after: dict[str, tuple[int, int]]

    @property
    def affected(self) -> bool:
        """Whether this release has the leak."""
        return self.release in AFFECTED


@pytest.fixture(scope="module", params=[*AFFECTED, *UNAFFECTED])
def pair(request: pytest.FixtureRequest, workshop: Workshop) -> Pair:
    """One release at a time, so that one pair of engines serves all tests on it."""
    release: str = request.param
    site_packages = workshop.environment(release).site_packages
    before = listing(site_packages)
    fixed = workshop.observe(release, "with the plugin", workshop.plugin)
    without = workshop.observe(release, "without it", None)
    return Pair(release, fixed, without, before, listing(site_packages))


def test_load_is_served_whole(pair: Pair) -> None:
    """Every request is answered or given up by its client, with the plugin as without it."""
    for observed in (pair.fixed, pair.without):
        assert observed.counts["failed"] == 0
        assert observed.counts["sent"] == REQUESTS
        assert observed.counts["aborted"] >= REQUESTS // 8
        assert observed.counts["completed"] >= REQUESTS // 2
        assert observed.samples[-1].allocated > REQUESTS


def test_backlog_grows_without_the_plugin(pair: Pair) -> None:
    """An affected release keeps the id of every block that it ever handed out; else the test below proves nothing."""
    assert len(pair.without.samples) > 2
    for sample in pair.without.samples:
        assert sum(sample.backlog) == (sample.allocated if pair.affected else 0)


def test_backlog_is_empty_with_the_plugin(pair: Pair) -> None:
    """With the plugin no id is kept, whenever one looks."""
    assert len(pair.fixed.samples) > 2
    assert [sum(sample.backlog) for sample in pair.fixed.samples] == [0] * len(pair.fixed.samples)


def test_tokens_are_identical(pair: Pair) -> None:
    """Each request that ran to its end got the same tokens, with the same log-probabilities, from both engines."""
    compared = 0
    for index, ours in pair.fixed.requests.items():
        theirs = pair.without.requests[index]
        if ours["state"] == theirs["state"] == "completed":
            compared += 1
            for key in ("text", "token_ids", "finish_reason"):
                assert ours[key] == theirs[key], f"request {index}"
            assert ours["token_ids"]
            assert ours["logprobs"] == pytest.approx(theirs["logprobs"], abs=LOGPROB_TOLERANCE), f"request {index}"
    assert compared >= REQUESTS // 2


def test_aborted_streams_agree_as_far_as_they_go(pair: Pair) -> None:
    """A client that hangs up has until then received the beginning of what the other engine sent it."""
    for index, ours in pair.fixed.requests.items():
        both = sorted((ours["token_ids"], pair.without.requests[index]["token_ids"]), key=len)
        assert both[1][: len(both[0])] == both[0], f"request {index}"


def test_log_says_once_that_the_leak_is_fixed(pair: Pair) -> None:
    """The engine core of an affected release logs one INFO line of ours, other processes and releases log none."""
    expected = 1 if pair.affected else 0
    assert len(pair.fixed.lines) == expected, pair.fixed.lines
    for line in pair.fixed.lines:
        assert "INFO" in line
        assert f"pid={pair.fixed.cores[0]})" in line
        assert pair.release in line


def test_log_says_once_that_blocks_are_watched(pair: Pair) -> None:
    """The engine core of every release logs one line with the ring and how to turn it off."""
    (line,) = pair.fixed.watching
    assert "INFO" in line
    assert f"pid={pair.fixed.cores[0]})" in line
    assert "VLLM_KVFIX_OBSERVE=off" in line


def test_nothing_of_ours_stays_behind(pair: Pair) -> None:
    """Once its folder is off the path the log has no line of the plugin, and no file of the environment changed."""
    assert pair.without.lines == pair.without.watching == []
    assert pair.before == pair.after


def test_an_edited_release_is_left_alone_and_told_why(workshop: Workshop, tmp_path: Path) -> None:
    """With one edited line in a target the engine serves and leaks as stock, and one WARNING says why."""
    shutil.copytree(workshop.plugin, tmp_path / "site")
    shutil.copytree(workshop.environment("0.25.1").site_packages / "vllm", tmp_path / "site/vllm", symlinks=True)
    edited = tmp_path / "site/vllm/v1/core/sched/scheduler.py"
    line = "        new_block_ids_to_zero = (\n"
    source = edited.read_text()
    assert source.count(line) == 1
    edited.write_text(source.replace(line, f"        # a vendor's comment\n{line}"))
    observed = workshop.observe("0.25.1", "edited by a vendor", tmp_path / "site")
    assert observed.counts["failed"] == 0
    for sample in observed.samples:
        assert sum(sample.backlog) == sample.allocated
    (said,) = observed.lines
    assert f"pid={observed.cores[0]}) WARNING" in said
    assert "NOT applied to vLLM 0.25.1" in said
    assert "Scheduler.schedule (source " in said
    assert "Next step: set VLLM_KVFIX_PATCH=force" in said


def test_every_engine_core_is_fixed_and_says_so(workshop: Workshop) -> None:
    """With two engine cores behind two API servers each core has an empty backlog, a log line, and a ring."""
    observed = workshop.observe(
        "0.25.1", "two cores, two servers", workshop.plugin, ["--data-parallel-size=2", "--api-server-count=2"]
    )
    assert len(observed.cores) == 2
    for core in observed.cores:
        backlog = observed.backlog(core)
        assert backlog
        assert set(backlog) == {0}
    assert sorted(int(re.findall(r"pid=(\d+)", line)[0]) for line in observed.lines) == observed.cores
    rings = [Path(re.findall(r"through (\S+\.ring)", line)[0]) for line in observed.watching]
    headers = [RingReader(ring).header for ring in rings]
    assert sorted(header.engine_index for header in headers) == [0, 1]
    assert sorted(header.pid for header in headers) == observed.cores


@pytest.fixture(scope="module")
def tokens_in_process() -> dict[str, list[list[int]]]:
    """What each in-process engine generated, by mode: they must agree."""
    return {}


@pytest.mark.parametrize("mode", ["off", "auto"])
def test_engine_in_the_same_process(
    workshop: Workshop, mode: str, tokens_in_process: dict[str, list[list[int]]]
) -> None:
    """An engine inside the caller's process is fixed too, says so once, and leaks silently when switched off."""
    report, lines = workshop.in_process("0.25.1", mode)
    if mode == "auto":
        assert report["backlog"] == 0
        assert report["replaced"]
        assert len(lines) == 1, lines
    else:
        assert report["backlog"] > 0
        assert report["replaced"] == []
        assert lines == []
    tokens_in_process[mode] = report["token_ids"]
    assert len({str(tokens) for tokens in tokens_in_process.values()}) == 1


def test_newest_release_is_left_alone(workshop: Workshop) -> None:
    """On a release without the leak the plugin replaces not one method, though it is loaded."""
    report, lines = workshop.in_process(UNAFFECTED[0], "auto")
    assert report["replaced"] == []
    assert report["backlog"] == 0
    assert lines == []
