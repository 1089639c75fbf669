# SPDX-License-Identifier: Apache-2.0
"""plugin: the entry point's manners, on the fake vLLM in fresh interpreters (contract/ does the real one)."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from tests.support import copy_fake, run_python

if TYPE_CHECKING:
    from pathlib import Path

FORCE = {"VLLM_KVFIX_PATCH": "force"}

PRELUDE = """
import json, logging, sys
logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s %(message)s")
from vllm_kvfix import faults, plugin

def steps(specs, count=5):
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    scheduler = Scheduler(KVCacheConfig(specs))
    return scheduler, [scheduler.schedule() for _ in range(count)]

def backlogs(scheduler):
    return [len(m.new_block_ids) for m in scheduler.kv_cache_manager.coordinator.single_type_managers]

def say(**values):
    print(json.dumps(values))
"""


def run(code: str, *path: Path, **environ: str) -> tuple[dict[str, Any], str]:
    """Run code after the prelude, with the fix alone; what it said, and its log."""
    done = run_python(PRELUDE + textwrap.dedent(code), *path, environ={"VLLM_KVFIX_OBSERVE": "off", **environ})
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """A copy of the fake vLLM."""
    return copy_fake(tmp_path / "site")


def test_register_imports_nothing_of_vllm(vllm: Path) -> None:
    """After register, neither vLLM nor torch is imported, and nothing has been decided."""
    said, log = run(
        """
        plugin.register()
        say(loaded=[n for n in sys.modules if n.split(".")[0] in ("vllm", "torch")],
            decided=[r.decision for r in plugin.report()])
        """,
        vllm,
    )
    assert said == {"loaded": [], "decided": [None]}
    assert log == ""


def test_the_leak_is_there_without_and_gone_with_the_plugin(vllm: Path) -> None:
    """The fake leaks two ids a step; with the plugin it keeps none, and its outputs are the same."""
    code = """
        from vllm.v1.kv_cache_interface import FullAttentionSpec
        scheduler, outputs = steps([FullAttentionSpec()])
        without = backlogs(scheduler), outputs
        plugin.register()
        scheduler, outputs = steps([FullAttentionSpec()])
        say(without=without[0], with_=backlogs(scheduler), same=outputs == without[1])
        """
    said, _ = run(code, vllm, **FORCE)
    assert said == {"without": [10], "with_": [0], "same": True}


def test_one_info_line_where_a_scheduler_is_made_and_none_elsewhere(vllm: Path) -> None:
    """However many schedulers a process makes, it logs one INFO line; a process that makes none logs nothing."""
    said, log = run(
        """
        from vllm.v1.kv_cache_interface import FullAttentionSpec
        plugin.register(); plugin.register()
        for _ in range(3):
            steps([FullAttentionSpec()])
        say(faults=faults.counts)
        """,
        vllm,
        **FORCE,
    )
    lines = log.splitlines()
    assert said == {"faults": {}}
    assert len(lines) == 1
    assert lines[0].startswith("INFO vllm.kvfix vllm-kvfix ")
    assert "the host-memory leak of vLLM 0.25.1 is fixed in this engine core" in lines[0]
    _, log = run("plugin.register(); import vllm.v1.core.sched.scheduler; say()", vllm, **FORCE)
    assert log == ""


@pytest.mark.parametrize("first", ["v1.core.sched.scheduler", "v1.core.kv_cache_manager", "v1.kv_cache_interface"])
def test_every_method_is_replaced_whichever_module_is_imported_first(vllm: Path, first: str) -> None:
    """All five methods are replaced once the scheduler is there, also where its import brings the others."""
    said, _ = run(
        f"""
        import importlib
        plugin.register()
        importlib.import_module("vllm.{first}")
        importlib.import_module("vllm.v1.core.sched.scheduler")
        say(replaced=len(plugin.report()[0].replaced))
        """,
        vllm,
        VLLM_KVFIX_PATCH="force",
    )
    assert said == {"replaced": 5}


def test_an_unknown_source_is_left_alone_with_one_warning(vllm: Path) -> None:
    """Without a known digest nothing is replaced, and one WARNING names the reason and the next step."""
    said, log = run(
        """
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        before = dict(vars(KVCacheManager))
        plugin.register()
        from vllm.v1.kv_cache_interface import FullAttentionSpec
        scheduler, _ = steps([FullAttentionSpec()])
        say(same=before == dict(vars(KVCacheManager)), leaked=backlogs(scheduler), replaced=plugin.report()[0].replaced)
        """,
        vllm,
    )
    assert said == {"same": True, "leaked": [10], "replaced": []}
    (line,) = log.splitlines()
    assert line.startswith("WARNING vllm.kvfix vllm-kvfix ")
    for words in ("NOT applied to vLLM 0.25.1", "Reason: the source is not", "Next step: set VLLM_KVFIX_PATCH=force"):
        assert words in line


def test_off_does_nothing_at_all(vllm: Path) -> None:
    """VLLM_KVFIX_PATCH=off installs no hook, replaces nothing, says nothing."""
    said, log = run(
        """
        finders = list(sys.meta_path)
        plugin.register()
        from vllm.v1.kv_cache_interface import FullAttentionSpec
        scheduler, _ = steps([FullAttentionSpec()])
        say(same=finders == sys.meta_path, leaked=backlogs(scheduler), report=plugin.report())
        """,
        vllm,
        VLLM_KVFIX_PATCH="off",
    )
    assert said == {"same": True, "leaked": [10], "report": []}
    assert log == ""


def test_restore_gives_back_the_identical_objects(vllm: Path) -> None:
    """After register, use and restore, each of the five methods is the object it was, and registering works again."""
    said, _ = run(
        """
        from vllm.v1.core import kv_cache_coordinator, kv_cache_manager, single_type_kv_cache_manager
        from vllm.v1.core.sched import scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec
        classes = [single_type_kv_cache_manager.SingleTypeKVCacheManager, kv_cache_coordinator.KVCacheCoordinator,
                   kv_cache_manager.KVCacheManager, scheduler.Scheduler]
        look = lambda: [dict(vars(c)) for c in classes]
        before = look()
        plugin.register()
        replaced = sum(a[k] is not b[k] for a, b in zip(before, look()) for k in a)
        steps([FullAttentionSpec()])
        left = plugin.restore()
        restored = all(a[k] is b[k] for a, b in zip(before, look()) for k in a) and before == look()
        leaked = backlogs(steps([FullAttentionSpec()])[0])
        plugin.register()
        again = backlogs(steps([FullAttentionSpec()])[0])
        say(replaced=replaced, left=left, restored=restored, leaked=leaked, again=again)
        """,
        vllm,
        **FORCE,
    )
    assert said == {"replaced": 5, "left": [], "restored": True, "leaked": [10], "again": [0]}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("wraps", [True, False])
def test_another_plugin_may_wrap_the_same_methods(vllm: Path, when: str, *, wraps: bool) -> None:
    """With a wrapper of another plugin below or above ours, both act, and restore leaves theirs in place."""
    said, _ = run(
        f"""
        import functools
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
        from vllm.v1.kv_cache_interface import FullAttentionSpec
        calls = []
        def wrap(owner, name):
            inner = getattr(owner, name)
            def theirs(self, *args, **kwargs):
                calls.append(name)
                return inner(self, *args, **kwargs)
            setattr(owner, name, functools.wraps(inner)(theirs) if {wraps} else theirs)
        def both():
            wrap(Scheduler, "schedule"); wrap(SingleTypeKVCacheManager, "__init__")
        if {when == "before"}: both()
        plugin.register()
        if {when == "after"}: both()
        top = Scheduler.schedule
        scheduler, _ = steps([FullAttentionSpec()], 5)
        left = plugin.restore()
        say(backlog=backlogs(scheduler), calls=[calls.count("schedule"), calls.count("__init__")],
            left=sorted(left), theirs_on_top=Scheduler.schedule is top)
        """,
        vllm,
        **FORCE,
    )
    shadowed = ["Scheduler.schedule", "SingleTypeKVCacheManager.__init__"] if when == "after" else []
    assert said == {"backlog": [0], "calls": [5, 1], "left": shadowed, "theirs_on_top": when == "after"}


def test_restore_gives_back_later_what_it_could_not_give_back_at_once(vllm: Path) -> None:
    """Once the other plugin has taken its wrapper back, a second restore gives the original back."""
    said, _ = run(
        """
        from vllm.v1.core.sched.scheduler import Scheduler
        original = Scheduler.schedule
        plugin.register()
        ours = Scheduler.schedule
        Scheduler.schedule = lambda self: ours(self)
        first = plugin.restore()
        Scheduler.schedule = ours
        say(first=first, second=plugin.restore(), same=Scheduler.schedule is original)
        """,
        vllm,
        **FORCE,
    )
    assert said == {"first": ["Scheduler.schedule"], "second": [], "same": True}


def test_all_or_nothing(vllm: Path) -> None:
    """If one method cannot be replaced, those that were are given back, a WARNING says why, vLLM runs on."""
    said, log = run(
        """
        from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
        from vllm.v1.core import kv_cache_manager
        from vllm.v1.core.sched import scheduler as module
        from vllm.v1.kv_cache_interface import FullAttentionSpec
        real, module.Scheduler = module.Scheduler, "not a class"
        before = dict(vars(SingleTypeKVCacheManager))
        plugin.register()
        module.Scheduler = real
        say(same=before == dict(vars(SingleTypeKVCacheManager)), replaced=plugin.report()[0].replaced,
            leaked=backlogs(steps([FullAttentionSpec()])[0]))
        """,
        vllm,
        **FORCE,
    )
    assert said == {"same": True, "replaced": [], "leaked": [10]}
    assert "PatchError: vllm.v1.core.sched.scheduler has no class Scheduler" in log


def test_our_own_errors_stay_ours(vllm: Path) -> None:
    """With every helper of ours broken, the scheduler's results and exceptions are as without us; it is logged once."""
    said, log = run(
        """
        from vllm_kvfix import live
        from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
        plain = steps([FullAttentionSpec(), MambaSpec()])[1]
        plugin.register()
        from vllm.v1.core.sched.scheduler import Scheduler
        def broken(*_):
            raise ZeroDivisionError("ours")
        live.managers = live.coordinator = live.zeroing_needed = broken
        scheduler, outputs = steps([FullAttentionSpec(), MambaSpec()])
        unflagged, _ = steps([FullAttentionSpec()])
        scheduler.kv_cache_manager = None
        theirs = None
        try:
            scheduler.schedule()
        except AttributeError as error:
            theirs = str(error)
        say(same=outputs == plain, theirs=theirs, places=sorted(faults.counts), several=min(faults.counts.values()) > 1)
        """,
        vllm,
        **FORCE,
    )
    assert said["same"]
    assert "'NoneType' object has no attribute" in said["theirs"]
    assert said["places"] == ["KVCacheCoordinator.__init__", "KVCacheManager.__init__", "Scheduler.schedule"]
    assert said["several"]
    assert log.count("an error of its own in Scheduler.schedule was contained") == 1


def test_register_never_raises(vllm: Path) -> None:
    """Whatever breaks inside register, vLLM's unguarded call returns."""
    said, log = run(
        """
        from vllm_kvfix import import_hook
        def broken(*_):
            raise MemoryError("inside")
        import_hook.when_imported = broken
        plugin.register()
        say(counts=faults.counts)
        """,
        vllm,
    )
    assert said == {"counts": {"register": 1}}
    assert "an error of its own in register was contained" in log


def test_a_module_from_elsewhere_is_not_patched(vllm: Path, tmp_path: Path) -> None:
    """Where another package swaps vLLM's module for its own file, the digest of the file says nothing: refused."""
    other = tmp_path / "other.py"
    other.write_text((vllm / "vllm/v1/core/kv_cache_manager.py").read_text())
    said, log = run(
        f"""
        import importlib.util
        spec = importlib.util.spec_from_file_location("vllm.v1.core.kv_cache_manager", {str(other)!r})
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        plugin.register()
        say(replaced=plugin.report()[0].replaced)
        """,
        vllm,
        **FORCE,
    )
    assert said == {"replaced": []}
    assert f"was loaded from {other}" in log


@pytest.mark.parametrize("options", [(), ("-O",), ("-OO",), ("-X", "dev")], ids=" ".join)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_process_is_fixed_like_its_parent(vllm: Path, options: tuple[str, ...], method: str) -> None:
    """Forked after register or spawned and registered anew, optimised or not: the child's backlog is 0."""
    code = PRELUDE + textwrap.dedent(
        f"""
        import multiprocessing, warnings
        warnings.simplefilter("ignore")
        def child(queue):
            from vllm_kvfix import plugin
            from vllm.v1.core.sched.scheduler import Scheduler
            from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
            plugin.register()
            scheduler = Scheduler(KVCacheConfig([FullAttentionSpec()]))
            for _ in range(5): scheduler.schedule()
            queue.put([len(m.new_block_ids) for m in scheduler.kv_cache_manager.coordinator.single_type_managers])
        if __name__ == "__main__":
            plugin.register()
            context = multiprocessing.get_context({method!r})
            queue = context.Queue()
            process = context.Process(target=child, args=(queue,))
            process.start()
            say(backlog=queue.get(timeout=30))
            process.join()
        """
    )
    script = vllm / "start.py"
    script.write_text(code)
    start = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    done = run_python(start, vllm, options=options, environ=FORCE)
    assert json.loads(done.stdout.splitlines()[-1]) == {"backlog": [0]}
