# SPDX-License-Identifier: Apache-2.0
"""Attaching to a real engine under HTTP load, again and again; and what it must refuse there."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.attach.processes import state_of, wait_for
from tests.engine.attaching import (
    EDIT,
    NOBODY,
    PUT_BACK,
    REPLACE,
    UNDO,
    Attended,
    Load,
    Look,
    Said,
    attended,
    command_line,
    differing,
    rounds,
    stopped,
)
from tests.engine.harness import listing
from vllm_kvfix import attach
from vllm_kvfix.attach import target
from vllm_kvfix.demo.engine import Engine, read_samples

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    Meanwhile = AbstractContextManager[object]

    from tests.engine.harness import Workshop

pytestmark = [pytest.mark.engine, pytest.mark.alone]

# A hundred take some four minutes more: VLLM_KVFIX_ATTACH_ROUNDS=100.
ROUNDS = int(os.environ.get("VLLM_KVFIX_ATTACH_ROUNDS", "20"))
REQUESTS = 120
LEAKED = 50_000_000
MEBI = 1 << 20


@dataclass
class Campaign:
    """What was seen: loads before, during and after; every outcome; refusals; the backlog of the probe's samples.

    ``place``: where attach put its files for a moment, ``folder``: what of them is there.
    """

    untouched: Load
    attended: list[Load]
    afterwards: Load
    outcomes: list[attach.Outcome]
    before_refusals: Look
    refusals: dict[str, Refusal]
    dead: tuple[Said, Said]
    after_refusals: Load
    backlog_at_last: list[int]
    leak: attach.Outcome
    files: tuple[object, object]
    place: tuple[str, str]
    folder: list[str]
    log: str


@dataclass(frozen=True)
class Refusal:
    """What the command said to a wrong target, and what the engine was like afterwards."""

    said: Said
    after: Look

    @property
    def words(self) -> str:
        """Cause and next step."""
        (refused,) = self.said.objects
        return f"{refused['message']}; {refused['next_step']}"


def refusals(engine: Attended) -> dict[str, Refusal]:
    """What attach says to the wrong processes, to the right one in the wrong state, and to the wrong user."""
    found: dict[str, Refusal] = {}

    def refuse(
        name: str, pid: int, state: AbstractContextManager[object] | None = None, *, nobody: bool = False
    ) -> None:
        with state or contextlib.nullcontext():
            said = command_line("attach", pid, "--fix", "--observe", nobody=nobody)
        found[name] = Refusal(said, engine.look())

    with subprocess.Popen(["/bin/sleep", "600"]) as sleeper:
        refuse("not python", sleeper.pid)
        sleeper.kill()
    refuse("not vllm", os.getpid())
    refuse("front end", engine.launcher)
    refuse("rights", engine.core, nobody=True)
    refuse("stopped", engine.core, stopped(engine.core))
    refuse("unknown source", engine.core, engine.edited(REPLACE, PUT_BACK))
    refuse("unknown source, in its place", engine.core, engine.edited(EDIT, UNDO))
    return found


def dead(engine: Attended) -> Said:
    """What attach says to a core that was killed and that its parent, which is stopped, has not taken note of."""
    with stopped(engine.launcher):
        os.kill(engine.core, signal.SIGKILL)
        wait_for(lambda: state_of(engine.core) == "Z")
        return command_line("attach", engine.core)


@pytest.fixture(scope="module")
def campaign(workshop: Workshop) -> Campaign:
    """One engine: left alone, refused, attached to again and again under load, and left with the fix."""
    settings, environment = attended(workshop)
    with Engine(environment, settings) as serving:
        engine = Attended(serving, environment, settings.work)
        installed = Path(environment.path) / "lib"
        files = listing(installed)
        untouched = engine.load(REQUESTS)
        before_refusals = engine.look()
        refused = refusals(engine)
        after_refusals = engine.load(REQUESTS)
        outcomes: list[attach.Outcome] = []
        turns = rounds(engine.core, ROUNDS, outcomes)
        loads = []
        while sum(outcome.fix == "attached" for outcome in outcomes) < ROUNDS:
            loads.append(engine.load(REQUESTS, turns))
        attach.detach_from(engine.core)
        engine.leak(LEAKED)
        leak = attach.attach_to(engine.core, fix=True, observe=False)
        fixed_at = time.time()
        afterwards = engine.load(REQUESTS)
        samples = [sample for sample in read_samples(serving.probe_file) if sample.time > fixed_at]
        place = (target.look(engine.core).folders()[0], str(settings.work / "tmp"))
        folder = engine.look().files
        log = serving.log_text()
        zombie = dead(engine)
    workshop.summary.append(_summary(untouched, loads, outcomes, leak))
    return Campaign(
        untouched,
        loads,
        afterwards,
        outcomes,
        before_refusals,
        refused,
        (zombie, command_line("attach", engine.launcher)),
        after_refusals,
        [sum(sample.backlog) for sample in samples],
        leak,
        (files, listing(installed)),
        place,
        folder,
        log,
    )


def _summary(untouched: Load, loads: list[Load], outcomes: list[attach.Outcome], leak: attach.Outcome) -> str:
    before = sorted(untouched.steps)
    during = [step for load in loads for step in load.steps]
    return (
        f"attached and detached {ROUNDS} times under load ({len(outcomes)} commands): steps untouched p99 "
        f"{before[len(before) * 99 // 100] * 1e3:.0f} ms, longest {before[-1] * 1e3:.0f} ms; meanwhile longest "
        f"{max(during) * 1e3:.0f} ms; held at a boundary {max(o.held_s for o in outcomes) * 1e3:.2f} ms at most; "
        f"{leak.backlog_before:,} ids: {leak.rss_before / MEBI:.0f} -> {leak.rss_after / MEBI:.0f} MiB"
    )


def test_no_request_fails(campaign: Campaign) -> None:
    """Every request of every load is answered, or given up by its client as planned."""
    for load in (campaign.untouched, campaign.after_refusals, *campaign.attended, campaign.afterwards):
        assert load.counts["failed"] == 0
        assert load.counts["sent"] == REQUESTS


def test_no_token_differs(campaign: Campaign) -> None:
    """Each request gets the tokens that it got from the untouched engine."""
    for load in (*campaign.attended, campaign.afterwards):
        assert differing(load, campaign.untouched) == []


def test_every_round_did_what_it_said(campaign: Campaign) -> None:
    """The rounds each attached what they should and took it back, with no id left and the ring saying so."""
    fixed = [outcome for outcome in campaign.outcomes if outcome.fix == "attached"]
    watched = [outcome for outcome in campaign.outcomes if outcome.observe == "attached"]
    assert len(fixed) == ROUNDS
    assert len(watched) == ROUNDS * 3 // 4
    assert {outcome.backlog_after for outcome in fixed} == {0}
    assert {outcome.confirmed_by for outcome in watched} == {"its ring"}
    assert len([o for o in campaign.outcomes if "detached" in {o.fix, o.observe}]) == ROUNDS - 1


def test_the_backlog_stays_at_zero(campaign: Campaign) -> None:
    """After the last attach, the probe sees no id in any list until the end of a load."""
    assert len(campaign.backlog_at_last) > 2
    assert set(campaign.backlog_at_last) == {0}


def test_a_large_leak_gives_its_memory_back(campaign: Campaign) -> None:
    """Fifty million leaked ids leave, and with them at least 1.5 GB of the engine core's memory."""
    assert campaign.leak.backlog_before >= LEAKED
    assert campaign.leak.backlog_after == 0
    assert campaign.leak.rss_before - campaign.leak.rss_after > 1_500_000_000


CAUSES = {
    "not python": ("/bin/sleep", "runs no Python", "name an engine core"),
    "not vllm": ("has not loaded vLLM", "name an engine core"),
    "front end": ("is an API server", "attach to its engine core: vllm-kvfix attach {core}"),
    "rights": (f"belongs to user 0; we are {NOBODY}, without CAP_SYS_PTRACE", "sudo vllm-kvfix attach {core}"),
    "stopped": ("is stopped by a signal", "kill -CONT {core}"),
    "unknown source": ("allocate_new_blocks as it runs is not what its file says", "restart the engine"),
}
CAUSES["unknown source, in its place"] = CAUSES["unknown source"]


def test_each_wrong_target_is_refused_for_its_own_reason(campaign: Campaign) -> None:
    """The command ends with 1, and says the reason, the cause and the next step."""
    core = campaign.outcomes[0].pid
    assert set(campaign.refusals) == set(CAUSES)
    for name, refusal in campaign.refusals.items():
        (refused,) = refusal.said.objects
        assert (refusal.said.code, refused["exit_code"]) == (1, 1)
        assert refused["refused"] == name.partition(",")[0]
        for said in CAUSES[name]:
            assert said.format(core=core) in refusal.words, name


def test_refusals_leave_the_engine_as_it_was(campaign: Campaign) -> None:
    """After each refusal the answers are equal to the byte, and so is what is in it; there is no ring and no file."""
    before = campaign.before_refusals
    assert (before.ours, before.rings, before.files) == ([], [], [])
    assert before.inside["lists"] == ["list"]
    assert before.inside["functions"]
    for name, refusal in campaign.refusals.items():
        after = refusal.after
        assert after.answers == before.answers, name
        assert after.inside == before.inside, name
        assert (after.rings, after.files) == ([], []), name
        # To see an edit in memory takes a look from inside; all others are refused without one.
        assert bool(after.ours) == name.startswith("unknown source"), name
    assert differing(campaign.after_refusals, campaign.untouched) == []


def test_an_engine_that_is_no_more(campaign: Campaign) -> None:
    """A killed engine core that nobody has waited for, and an engine that has ended, are refused as dead."""
    for said, words in zip(campaign.dead, ("its parent has not taken note of it", "there is no process"), strict=True):
        (refused,) = said.objects
        assert (said.code, refused["refused"]) == (1, "dead")
        assert words in refused["message"]


def test_nothing_is_left_behind(campaign: Campaign) -> None:
    """The engine's environment has the same files as before, its TMPDIR none of ours, its log no error of ours."""
    before, after = campaign.files
    assert before == after
    used, temporary = campaign.place
    assert used == temporary
    assert campaign.folder == []
    assert "was contained" not in campaign.log
