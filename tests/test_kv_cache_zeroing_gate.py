# SPDX-License-Identifier: Apache-2.0
"""The back-port's four parts, one by one, on the fake vLLM (contract/ proves them on the real one)."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import copy_fake, run_python
from vllm_kvfix.backports import kv_cache_zeroing_gate as gate_module

if TYPE_CHECKING:
    from pathlib import Path

PRELUDE = """
import json
from vllm_kvfix import faults, plugin
plugin.register({"VLLM_KVFIX_PATCH": "force"})
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import BlockPool, SingleTypeKVCacheManager
from vllm.v1.kv_cache_interface import *
from vllm.v1.kv_cache_interface import KVCacheConfig

class ZeroingConfig(KVCacheConfig):
    needs_kv_cache_zeroing = True

def ids(scheduler):
    return [m.new_block_ids for m in scheduler.kv_cache_manager.coordinator.single_type_managers]

def say(**values):
    assert not faults.counts, faults.counts
    print(json.dumps(values))
"""


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the fake vLLM."""
    return copy_fake(tmp_path_factory.mktemp("fake"))


def run(vllm: Path, code: str) -> dict[str, Any]:
    """What the code says after the prelude."""
    done = run_python(PRELUDE + textwrap.dedent(code), vllm)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_part_1_the_manager_takes_the_flag(vllm: Path) -> None:
    """_record_new_block_ids is the flag and an exact, zeroed type; the signature shows the flag, default False."""
    said = run(
        vllm,
        """
        import inspect
        parameter = inspect.signature(SingleTypeKVCacheManager.__init__).parameters["needs_kv_cache_zeroing"]
        table = []
        for spec in (FullAttentionSpec(), SinkFullAttentionSpec(), SlidingWindowSpec()):
            for flag in ({}, {"needs_kv_cache_zeroing": False}, {"needs_kv_cache_zeroing": True}):
                table.append(SingleTypeKVCacheManager(spec, BlockPool(), **flag)._record_new_block_ids)
        say(default=parameter.default, table=table)
        """,
    )
    assert said == {"default": False, "table": [False, False, True, False, False, False, False, False, False]}


def test_part_2_recording_asks_the_gate(vllm: Path) -> None:
    """A manager without the flag keeps no id and hands out the same blocks; one with it keeps them in order."""
    said = run(
        vllm,
        """
        shut = SingleTypeKVCacheManager(FullAttentionSpec(), BlockPool())
        open_ = SingleTypeKVCacheManager(FullAttentionSpec(), BlockPool(), needs_kv_cache_zeroing=True)
        say(blocks=[shut.allocate_new_blocks(3), open_.allocate_new_blocks(3)],
            kept=[shut.new_block_ids, open_.new_block_ids])
        """,
    )
    assert said == {"blocks": [[0, 1, 2], [0, 1, 2]], "kept": [[], [0, 1, 2]]}


def test_part_3_the_coordinator_hands_the_flag_on(vllm: Path) -> None:
    """A coordinator whose config needs zeroing for another reason than Mamba has managers that record."""
    said = run(
        vllm,
        """
        records = lambda config: [m._record_new_block_ids for m in KVCacheCoordinator(config).single_type_managers]
        by_name = KVCacheCoordinator(kv_cache_config=ZeroingConfig([FullAttentionSpec()])).single_type_managers[0]
        say(zeroing=records(ZeroingConfig([FullAttentionSpec(), SlidingWindowSpec()])),
            plain=records(KVCacheConfig([FullAttentionSpec()])), by_name=by_name._record_new_block_ids)
        """,
    )
    assert said == {"zeroing": [True, False], "plain": [False], "by_name": True}


def test_part_4_schedule_drains_every_step(vllm: Path) -> None:
    """A plain list that somebody put in a manager's place is empty after the next step, and stays so."""
    said = run(
        vllm,
        """
        scheduler = Scheduler(KVCacheConfig([FullAttentionSpec()]))
        (manager,) = scheduler.kv_cache_manager.coordinator.single_type_managers
        manager.new_block_ids = [1, 2, 3]
        outputs = [scheduler.schedule()]
        after_one = len(manager.new_block_ids)
        outputs += [scheduler.schedule() for _ in range(3)]
        say(after_one=after_one, after_four=len(manager.new_block_ids), outputs=outputs)
        """,
    )
    assert said == {"after_one": 0, "after_four": 0, "outputs": [None] * 4}


def test_hybrids_get_the_same_ids_in_the_same_order(vllm: Path) -> None:
    """With a Mamba group, schedule returns what it returned without the plugin."""
    said = run(
        vllm,
        """
        def outputs():
            config = KVCacheConfig([FullAttentionSpec(), MambaSpec(), SlidingWindowSpec(), FullAttentionSpec()])
            scheduler = Scheduler(config)
            return [scheduler.schedule() for _ in range(5)]
        with_ = outputs()
        plugin.restore()
        say(same=with_ == outputs(), first=with_[0])
        """,
    )
    assert said == {"same": True, "first": [0, 1, 6, 7]}


@pytest.mark.parametrize("order", [["FullAttentionSpec", "MambaSpec"], ["MambaSpec", "FullAttentionSpec"]])
def test_managers_whom_nobody_told_record_beside_mamba_only(vllm: Path, order: list[str]) -> None:
    """Made by hand on one pool, full attention records if Mamba is there, in either order; alone it does not."""
    said = run(
        vllm,
        f"""
        pool = BlockPool()
        beside = [SingleTypeKVCacheManager(spec(), pool) for spec in ({", ".join(order)})]
        alone = SingleTypeKVCacheManager(FullAttentionSpec(), BlockPool())
        say(beside=sum(m._record_new_block_ids for m in beside), alone=alone._record_new_block_ids)
        """,
    )
    assert said == {"beside": 1, "alone": False}


def test_a_scheduler_that_says_it_zeroes_is_believed(vllm: Path) -> None:
    """A subclass that sets needs_kv_cache_zeroing itself gets the ids it got without the plugin."""
    said = run(
        vllm,
        """
        class Zeroing(Scheduler):
            def __init__(self, config):
                super().__init__(config)
                self.needs_kv_cache_zeroing = True
        def outputs():
            scheduler = Zeroing(KVCacheConfig([FullAttentionSpec()]))
            return [scheduler.schedule() for _ in range(3)]
        with_ = outputs()
        plugin.restore()
        say(same=with_ == outputs(), first=with_[0])
        """,
    )
    assert said == {"same": True, "first": [0, 1]}


@pytest.mark.parametrize(
    ("definition", "call"),
    [
        ("def schedule(self)", "schedule()"),
        ("def schedule(self, throttle_prefills=False)", "schedule(True)"),
        ("def schedule(self, throttle_prefills=False)", "schedule(throttle_prefills=True)"),
        ("def schedule(self, throttle_prefills=True)", "schedule()"),
        ("def schedule(self, *, more=False)", "schedule(more=True)"),
        ("def schedule(self, first, *rest, **more)", "schedule(1, 2, 3, four=4)"),
    ],
)
@pytest.mark.parametrize("spec", ["FullAttentionSpec", "MambaSpec"])
def test_arguments_of_schedule_arrive_as_they_were_given(vllm: Path, definition: str, call: str, spec: str) -> None:
    """Whatever signature schedule has, arguments and defaults reach it through ours as without us."""
    said = run(
        vllm,
        f"""
        plugin.restore()
        {definition}:
            given = dict(locals()); given.pop("self")
            return repr(given)
        Scheduler.schedule = schedule
        scheduler = Scheduler(KVCacheConfig([{spec}()]))
        without = scheduler.{call}
        plugin.register({{"VLLM_KVFIX_PATCH": "force"}})
        say(ours=Scheduler.schedule is not schedule, same=scheduler.{call} == without)
        """,
    )
    assert said == {"ours": True, "same": True}


def test_a_stray_drain_does_not_bring_the_leak_back(vllm: Path) -> None:
    """take_new_block_ids on a manager that must not record gives [], and it still keeps nothing afterwards."""
    said = run(
        vllm,
        """
        manager = SingleTypeKVCacheManager(FullAttentionSpec(), BlockPool())
        taken = manager.take_new_block_ids()
        taken.append(7)
        manager.allocate_new_blocks(3)
        say(taken=manager.take_new_block_ids(), kept=len(manager.new_block_ids))
        """,
    )
    assert said == {"taken": [], "kept": 0}


def test_a_cache_manager_without_the_usual_parts_is_drained_by_its_own_means(vllm: Path) -> None:
    """A cache manager from outside that has no coordinator has its take_new_block_ids called each step."""
    said = run(
        vllm,
        """
        class Foreign:
            kept, drains = [], 0
            def take_new_block_ids(self):
                self.drains += 1
                return []
        class Own(Scheduler):
            def __init__(self):
                self.needs_kv_cache_zeroing, self.kv_cache_manager = False, Foreign()
            def allocate(self):
                pass
        scheduler = Own()
        for _ in range(3): scheduler.schedule()
        say(drains=scheduler.kv_cache_manager.drains)
        """,
    )
    assert said == {"drains": 3}


def test_a_grown_list_is_given_back_in_slices(vllm: Path) -> None:
    """An engine that leaked before we came keeps at most so many ids fewer a step, and none in the end."""
    said = run(
        vllm,
        """
        from vllm_kvfix.backports.kv_cache_zeroing_gate import RELEASED_PER_STEP as slice_
        plugin.restore()
        scheduler = Scheduler(KVCacheConfig([FullAttentionSpec()]))
        grown = scheduler.kv_cache_manager.coordinator.single_type_managers[0].new_block_ids
        grown.extend(range(3 * slice_ + 5))
        plugin.register({"VLLM_KVFIX_PATCH": "force"})
        left = []
        for _ in range(6):
            scheduler.schedule()
            left.append(len(grown))
        say(left=[n - max(0, 2 * slice_ + 7 - i * slice_) for i, n in enumerate(left)], backlog=ids(scheduler))
        """,
    )
    assert said == {"left": [0] * 6, "backlog": [[]]}


@given(st.lists(st.one_of(st.integers(), st.lists(st.integers())), max_size=20))
def test_the_discarding_list_is_empty_whatever_is_added(operations: list[int | list[int]]) -> None:
    """append, extend, insert and += leave it empty, false, and of its type."""
    ids = gate_module.DiscardedBlockIds()
    for operation in operations:
        if isinstance(operation, int):
            ids.append(operation)
            ids.insert(0, operation)
        else:
            ids.extend(iter(operation))
            ids += operation
    assert (len(ids), bool(ids), type(ids)) == (0, False, gate_module.DiscardedBlockIds)
