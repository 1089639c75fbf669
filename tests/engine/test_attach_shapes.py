# SPDX-License-Identifier: Apache-2.0
"""Attaching to real engines of other shapes than the usual one, and what is refused of them."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.attach.processes import started
from tests.engine.attaching import (
    RELEASE,
    Attended,
    Load,
    Look,
    Said,
    attended,
    command_line,
    differing,
)
from tests.engine.harness import RING_FOLDER
from tests.engine.namespaces import TMP, children, confined, confining, own_pid
from vllm_kvfix.demo.engine import Engine, distribution_name, engine_environ, read_samples

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.engine.harness import Workshop

pytestmark = pytest.mark.engine

FIXED = "0.32.0"
REQUESTS = 32
BOTH = ("--fix", "--observe")
OWN = {"TMPDIR": str(TMP), RING_FOLDER: str(TMP / "rings")}
IN_PROCESS = Path(__file__).with_name("in_process.py")
SOURCE = "vllm/v1/core/single_type_kv_cache_manager.py"
EDITED = ("            return new_blocks\n", "            return list(new_blocks)\n")


# -- several engine cores and API servers, in namespaces of their own -------------------------------------------------


@dataclass
class Ranks:
    """Two ranks behind two API servers: their process ids in their own namespace, the loads, what was said.

    ``backlogs`` by state and rank: the least and the most of the probe's samples meanwhile.
    """

    cores: list[int]
    others: dict[int, str]
    loads: dict[str, Load]
    said: dict[str, Said]
    backlogs: dict[str, dict[int, tuple[int, int]]]
    rings: list[str]
    files: list[str]


@pytest.fixture(scope="module")
def ranks(workshop: Workshop) -> Ranks:
    """The deployment left alone, attached to under load by a command in its namespaces, and left again."""
    shape = ["--data-parallel-size=2", "--api-server-count=2"]
    settings, environment = attended(workshop, "ranks-", arguments=shape, **OWN)
    place = settings.work / "namespaces"
    place.mkdir()
    own = confined(environment, place, confining(place, workshop.work, pids=True))
    loads: dict[str, Load] = {}
    said: dict[str, Said] = {}
    backlogs: dict[str, dict[int, tuple[int, int]]] = {}
    with Engine(own, settings) as serving:
        engine = Attended(serving, environment, settings.work, TMP)
        beneath = ["nsenter", f"--target={engine.core}", "--mount", "--pid"]

        def load(state: str, meanwhile: Iterator[object] | None = None) -> None:
            began = time.time()
            loads[state] = engine.load(REQUESTS, meanwhile)
            backlogs[state] = {}
            for pid in {sample.pid for sample in read_samples(serving.probe_file)}:
                found = [sum(s.backlog) for s in read_samples(serving.probe_file) if s.pid == pid and s.time > began]
                backlogs[state][pid] = min(found, default=-1), max(found, default=-1)

        def attach_once() -> Iterator[object]:
            said["attach"] = command_line("attach", "--all", *BOTH, beneath=beneath)
            yield True

        try:
            load("untouched")
            cores = [own_pid(pid) for pid in engine.cores]
            others = _others(engine)
            said["refused"] = command_line("attach", *others, *BOTH, beneath=beneath)
            load("meanwhile", attach_once())
            load("attached")
            said["detach"] = command_line("detach", "--all", beneath=beneath)
            load("detached")
            look = engine.look()
        finally:
            os.kill(engine.launcher, signal.SIGTERM)  # the server's own end: what it runs under passes none on
    return Ranks(cores, others, loads, said, backlogs, look.rings, look.files)


def _others(engine: Attended) -> dict[int, str]:
    """The other processes of vLLM's in the namespace, by their ids there: their titles."""
    found = {own_pid(engine.launcher): "launcher"}
    for pid in children(engine.launcher):
        title = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[0]
        if title.startswith("VLLM::") and pid not in engine.cores:
            found[own_pid(pid)] = title
    return found


def test_all_means_both_engine_cores_and_nothing_else(ranks: Ranks) -> None:
    """Each engine core is changed, confirmed by its own ring, and no other process; so it is when it is taken back."""
    assert len(ranks.cores) == 2
    attached, detached = ranks.said["attach"], ranks.said["detach"]
    assert (attached.code, detached.code) == (0, 0)
    assert [one["pid"] for one in attached.objects] == [one["pid"] for one in detached.objects] == sorted(ranks.cores)
    assert sorted(one["engines"] for one in attached.objects) == [[0], [1]]
    for one in attached.objects:
        assert (one["fix"], one["observe"], one["confirmed_by"]) == ("attached", "attached", "its ring")
        assert one["backlog_before"] > one["backlog_after"] == 0
    assert {(one["fix"], one["observe"]) for one in detached.objects} == {("detached", "detached")}


def test_no_other_process_of_the_deployment_is_attached_to(ranks: Ranks) -> None:
    """Launcher, API servers and coordinator are refused, and the error names both engine cores."""
    assert sorted(ranks.others.values()) == [
        "VLLM::APIServer_0",
        "VLLM::APIServer_1",
        "VLLM::DPCoordinator",
        "launcher",
    ]
    refused = ranks.said["refused"]
    assert refused.code == 1
    assert [one["pid"] for one in refused.objects] == list(ranks.others)
    for one in refused.objects:
        coordinator = ranks.others[one["pid"]].endswith("Coordinator")
        assert one["refused"] == ("no scheduler" if coordinator else "front end")
        assert one["next_step"].endswith(f"vllm-kvfix attach {' '.join(map(str, sorted(ranks.cores)))}")


def test_tokens_of_all_ranks_are_the_same(ranks: Ranks) -> None:
    """Before, during and after, each request is answered with the same tokens, whichever rank it came to."""
    for load in ranks.loads.values():
        assert load.counts["failed"] == 0
        assert differing(load, ranks.loads["untouched"]) == []


def test_the_backlog_of_each_rank(ranks: Ranks) -> None:
    """Each rank leaks until it is attached to, keeps nothing from then on, and leaks again once it is left."""
    for pid in ranks.cores:
        assert ranks.backlogs["untouched"][pid][1] > 0
        assert ranks.backlogs["attached"][pid] == (0, 0)
        assert ranks.backlogs["detached"][pid][1] > 0


def test_only_the_rings_stay(ranks: Ranks) -> None:
    """In the /tmp that only the deployment sees lie the two rings, and no file of ours."""
    assert len(ranks.rings) == 2
    assert ranks.files == []


# -- in a script's own process ----------------------------------------------------------------------------------------


def test_an_engine_in_a_script_of_another_namespace(workshop: Workshop) -> None:
    """Named by its process id as seen from here, such an engine is fixed and watched, and is as before afterwards."""
    environment = workshop.environment(RELEASE)
    work = workshop.work / "attach-in-process"
    work.mkdir()
    environ = engine_environ(
        {**OWN, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}, [distribution_name(environment, work / "metadata")]
    )
    command = [*confining(work, workshop.work, pids=True), str(environment.python), str(IN_PROCESS)]
    with started([*command, str(workshop.model)], env=environ) as outer:
        before = outer.ask()
        (pid,) = children(outer.pid)
        assert own_pid(pid) == 1
        (attached,) = command_line("attach", pid, *BOTH).objects
        meanwhile = outer.ask()
        (detached,) = command_line("detach", pid).objects
        after = outer.ask()
        left = sorted(path.name for path in Path(f"/proc/{pid}/root/tmp").iterdir() if "kvfix" in path.name)
        rings = list(Path(f"/proc/{pid}/root/tmp/rings").iterdir())
    assert (attached["fix"], attached["observe"], attached["confirmed_by"]) == ("attached", "attached", "its ring")
    assert (attached["backlog_before"], attached["backlog_after"]) == (before["backlog"], 0)
    assert before["backlog"] > meanwhile["backlog"] == 0
    assert (detached["fix"], detached["observe"], detached["left"]) == ("detached", "detached", [])
    assert after["backlog"] > 0
    assert [before["as_before"], meanwhile["as_before"], after["as_before"]] == [True, False, True]
    assert before["ours"] == []
    assert before["token_ids"] == meanwhile["token_ids"] == after["token_ids"]
    assert (left, len(rings)) == ([], 1)


# -- with nothing to fix, or not as released --------------------------------------------------------------------------


@dataclass(frozen=True)
class Watched:
    """An engine that must not be fixed: what was said when it was to be, to be both, to be watched, and left again."""

    fix: Said
    both: Said
    observe: Said
    detach: Said
    before: Look
    refused: Look
    meanwhile: Load
    after: Look
    untouched: Load

    @property
    def refusal(self) -> dict[str, Any]:
        """What was said to --fix."""
        (one,) = self.fix.objects
        return one


def watched(engine: Attended, both: tuple[str, ...]) -> Watched:
    """Have it refuse the fix, and be watched by way of the options ``both``."""
    untouched, before = engine.load(REQUESTS), engine.look()
    fix = command_line("attach", engine.core, "--fix")
    refused = engine.look()
    said = command_line("attach", engine.core, *BOTH)
    observe = command_line("attach", engine.core, *both)
    meanwhile = engine.load(REQUESTS)
    detach = command_line("detach", engine.core)
    return Watched(fix, said, observe, detach, before, refused, meanwhile, engine.look(), untouched)


@pytest.fixture(scope="module")
def fixed(workshop: Workshop) -> Watched:
    """An engine of a release that has the fix itself."""
    settings, environment = attended(workshop, release=FIXED)
    with Engine(environment, settings) as serving:
        return watched(Attended(serving, environment, settings.work), ("--observe",))


@pytest.fixture(scope="module")
def edited(workshop: Workshop) -> Watched:
    """An engine that sees, and it alone, an edited file in vLLM's folder."""
    settings, environment = attended(workshop, "edited-", PYTHONDONTWRITEBYTECODE="1", **OWN)
    source = environment.site_packages / SOURCE
    text = source.read_text()
    assert text.count(EDITED[0]) == 1
    other = settings.work / "edited.py"
    other.write_text(text.replace(*EDITED))
    own = confined(environment, settings.work, confining(settings.work, workshop.work, {source: other}, pids=False))
    with Engine(own, settings) as serving:
        return watched(Attended(serving, environment, settings.work, TMP), ("--observe",))


def test_a_fixed_release_is_not_fixed(fixed: Watched) -> None:
    """--fix alone is refused where vLLM has the fix itself, with --observe as the next step; both is to watch it."""
    assert fixed.fix.code == 1
    assert fixed.refusal["refused"] == "not affected"
    assert f"vLLM {FIXED}" in fixed.refusal["message"]
    assert "there is nothing to fix" in fixed.refusal["message"]
    assert "vllm-kvfix attach --observe" in fixed.refusal["next_step"]
    (both,) = fixed.both.objects
    assert (fixed.both.code, both["fix"], both["observe"]) == (0, "not affected", "attached")
    assert [one["observe"] for one in fixed.observe.objects] == ["already there"]


def test_an_edited_file_is_refused(edited: Watched) -> None:
    """A file that only the engine sees, and that is none we know, is refused with its function; watching is allowed."""
    for said in (edited.fix, edited.both):
        (one,) = said.objects
        assert (said.code, one["refused"]) == (1, "unknown source")
        assert "SingleTypeKVCacheManager.allocate_new_blocks (source " in one["message"]
        assert "VLLM_KVFIX_PATCH=force" in one["next_step"]
    (one,) = edited.observe.objects
    assert (edited.observe.code, one["fix"], one["observe"]) == (0, "not asked for", "attached")


@pytest.mark.parametrize("name", ["fixed", "edited"])
def test_what_is_not_fixed_is_as_it_was(name: str, request: pytest.FixtureRequest) -> None:
    """A refusal puts nothing into it and changes no answer; nor has watching, once it is over, but for the ring."""
    seen: Watched = request.getfixturevalue(name)
    assert seen.refused == seen.before
    assert (seen.before.ours, seen.before.rings, seen.before.files) == ([], [], [])
    (one,) = seen.observe.objects
    assert one["confirmed_by"] == "its ring"
    assert seen.detach.code == 0
    assert (seen.after.answers, seen.after.inside, seen.after.files) == (seen.before.answers, seen.before.inside, [])
    assert len(seen.after.rings) == 1
    assert seen.meanwhile.counts["failed"] == 0
    assert differing(seen.meanwhile, seen.untouched) == []
