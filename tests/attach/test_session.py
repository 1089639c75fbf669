# SPDX-License-Identifier: Apache-2.0
"""attach and detach from end to end, on live processes with the fake vLLM (tests/engine does real engines)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.attach.processes import TITLE, engine, packaging_folder, wait_for
from tests.support import ROOT, copy_fake
from tests.test_pythons import interpreter
from vllm_kvfix import attach
from vllm_kvfix.attach import command, detach, parcel
from vllm_kvfix.attach import target as looking

if TYPE_CHECKING:
    from collections.abc import Iterator

LEAKED = 200_000
# A script that drives its engine by itself has no title of vLLM's; what it has loaded tells that it is one of vLLM's.
TITLES = {"script": "python"}


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path) -> Iterator[None]:
    """Nothing that we made lies in a target's TMPDIR when a test is over."""
    yield
    assert [path for path in tmp_path.glob("*-tmp/*") if "kvfix" in path.name] == []


@pytest.mark.parametrize("drive", ["busy", "idle", "paced", "script"])
def test_the_fix_comes_and_goes(vllm: Path, drive: str) -> None:
    """Attached, the leak is given back and grows no more; detached, the classes hold the identical functions again."""
    if drive == "script":
        (vllm / "vllm/_C.abi3.so").write_bytes(b"as if compiled")
    with engine(vllm, drive, LEAKED, title=TITLES.get(drive, TITLE)) as target:
        before = target.ask()
        assert before["backlog"] >= LEAKED
        assert before["stock"]
        done = attach.attach_to(target.pid, fix=True, observe=False)
        assert (done.fix, done.observe, done.backlog_after, done.engines) == ("attached", "not asked for", 0, (3,))
        assert done.backlog_before >= LEAKED
        attached = target.ask()
        assert (attached["backlog"], attached["stock"], attached["plain"]) == (0, False, False)
        taken = attach.detach_from(target.pid)
        assert (taken.fix, taken.observe, taken.left) == ("detached", "not attached", ())
        wait_for(lambda: target.ask()["threads"] == before["threads"])  # ours has told us, and is about to end
        after = target.ask()
        assert (after["stock"], after["plain"], after["own"]) == (True, True, [])
        assert after["manager"] == before["manager"]
        assert (after["main"], after["meta_path"]) == (before["main"], before["meta_path"])
        assert after["torn"] == 0
        assert after["in_order"]
        assert target.alive


def test_an_idle_engine_records_again_once_detached(vllm: Path) -> None:
    """Steps after attach leave nothing, steps after detach leave two ids each, as before."""
    with engine(vllm) as target:
        assert target.ask("steps 5")["backlog"] == 10
        attach.attach_to(target.pid, fix=True, observe=False)
        assert target.ask("steps 5")["backlog"] == 0
        attach.detach_from(target.pid)
        assert target.ask("steps 5")["backlog"] == 10


def test_many_times_under_steps(vllm: Path) -> None:
    """Eight rounds on an engine that steps all the time lose no id, and change no list within a step."""
    with engine(vllm, "busy") as target:
        for _ in range(8):
            assert attach.attach_to(target.pid, fix=True, observe=False).fix == "attached"
            assert attach.detach_from(target.pid).fix == "detached"
        state = target.ask()
        assert (state["torn"], state["in_order"], state["stock"], state["own"]) == (0, True, True, [])
        assert state["steps"] > 0


def test_twice_is_once(vllm: Path) -> None:
    """A second attach changes nothing and says that it was there; so does a second detach."""
    with engine(vllm, "busy") as target:
        attach.attach_to(target.pid, fix=True, observe=False)
        assert attach.attach_to(target.pid, fix=True, observe=False).fix == "already there"
        attach.detach_from(target.pid)
        assert attach.detach_from(target.pid).fix == "not attached"


def test_dry_run_puts_nothing_into_it(vllm: Path) -> None:
    """--dry-run says what would be done, and the target has no module of ours afterwards."""
    with engine(vllm, "idle", LEAKED) as target:
        before = target.ask()
        done = attach.attach_to(target.pid, fix=True, observe=False, dry_run=True)
        assert (done.fix, done.dry_run) == ("would be attached", True)
        assert target.ask() == before


@pytest.mark.parametrize("version", ["3.10", "3.12", "3.13"])
def test_another_python_than_ours(vllm: Path, version: str) -> None:
    """A target of another Python is fixed by code that its own program has compiled."""
    python = interpreter(version)
    assert python, f"no Python {version} here: uv python install {version}"
    with engine(vllm, "busy", LEAKED, python=python) as target:
        done = attach.attach_to(target.pid, fix=True, observe=False)
        assert (done.fix, done.python, done.backlog_after) == ("attached", version, 0)
        assert target.ask()["stock"] is False
        assert attach.detach_from(target.pid).fix == "detached"


def test_python_314_by_its_own_means(vllm: Path) -> None:
    """From Python 3.14 on it goes by sys.remote_exec, without hypno, from a command of the same Python."""
    python = interpreter("3.14")
    if python is None:
        pytest.skip("Python 3.14: no interpreter of it can be had here")
    with engine(vllm, "busy", LEAKED, python=python) as target:
        path = os.pathsep.join([str(ROOT), str(packaging_folder(vllm))])
        done = subprocess.run(
            [python, "-m", "vllm_kvfix", "attach", "--fix", "--json", str(target.pid)],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said = json.loads(done.stdout)
        assert (said["by"], said["fix"], said["backlog_after"]) == ("sys.remote_exec", "attached", 0)


def test_python_314_from_another_one(vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target of Python 3.14 is refused to a command of another Python, which is told to run with that one."""
    monkeypatch.setattr(looking, "_python", lambda *_: (3, 14))
    monkeypatch.setattr(sys, "version_info", (3, 13, 0, "final", 0))
    with engine(vllm) as running:
        with pytest.raises(attach.AttachError, match=r"Python 3\.14, and this command Python 3\.13") as refused:
            attach.attach_to(running.pid, fix=True, observe=False)
        assert refused.value.reason is attach.Reason.OTHER_PYTHON
        assert running.ask()["modules"] == []


def test_a_plugin_that_was_told_to_be_off_is_used(vllm: Path) -> None:
    """Where the engine has this very package loaded, its modules are used, and stay after detach."""
    (vllm / "sitecustomize.py").write_text(
        "from vllm_kvfix import plugin\nplugin.register({'VLLM_KVFIX_PATCH': 'off', 'VLLM_KVFIX_OBSERVE': 'off'})\n"
    )
    (vllm / "vllm_kvfix").symlink_to(Path(attach.__file__).parents[1])
    with engine(vllm, "busy") as target:
        assert "vllm_kvfix.plugin" in target.ask()["modules"]
        assert attach.attach_to(target.pid, fix=True, observe=False).fix == "attached"
        assert attach.detach_from(target.pid).fix == "detached"
        assert target.ask()["stock"]


def test_another_version_in_the_engine_is_left_alone(vllm: Path) -> None:
    """Where the engine has another version of this package loaded, attach is refused and changes nothing."""
    (vllm / "vllm_kvfix").mkdir()
    (vllm / "vllm_kvfix/__init__.py").write_text('__version__ = "0.0.7"\n')
    (vllm / "sitecustomize.py").write_text("import vllm_kvfix\n")
    with engine(vllm, "busy") as target:
        before = target.ask()
        with pytest.raises(attach.AttachError, match=r"0\.0\.7 is at work") as refused:
            attach.attach_to(target.pid, fix=True, observe=False)
        assert refused.value.reason is attach.Reason.OTHER_VERSION
        after = target.ask()
        assert (after["modules"], after["stock"], after["own"]) == (before["modules"], True, [])


def test_what_another_build_attached(vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another build of ours has attached is left alone by attach, taken back by detach, and replaced then."""
    with engine(vllm, "busy") as target:
        attach.attach_to(target.pid, fix=True, observe=False)
        texts, _ = parcel._texts()
        monkeypatch.setattr(parcel, "_texts", lambda: (texts, "another"))
        with pytest.raises(attach.AttachError, match="of another build") as refused:
            attach.attach_to(target.pid, fix=True, observe=False)
        assert refused.value.reason is attach.Reason.OTHER_VERSION
        assert attach.detach_from(target.pid).fix == "detached"
        assert target.ask()["stock"]
        assert attach.attach_to(target.pid, fix=True, observe=False).fix == "attached"


def test_a_function_that_somebody_replaced_is_not_trusted(vllm: Path) -> None:
    """A monkey patch that hides what it wraps makes it unknown what runs: refused, nothing changed."""
    (vllm / "sitecustomize.py").write_text(
        "from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager as M\n"
        "M.take_new_block_ids = lambda self: []\n"
    )
    with engine(vllm, "busy") as target:
        with pytest.raises(attach.AttachError, match="take_new_block_ids as it runs") as refused:
            attach.attach_to(target.pid, fix=True, observe=False)
        assert refused.value.reason is attach.Reason.UNKNOWN_SOURCE
        assert target.ask()["own"] == []


def test_a_wrapper_on_top_stays_and_is_named(vllm: Path, tmp_path: Path) -> None:
    """What another plugin wraps after attach cannot be taken back from below it: detach says so."""
    flag = tmp_path / "flag"
    (vllm / "sitecustomize.py").write_text(
        "import functools, os, threading, time\n"
        "from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager as M\n"
        "def later():\n"
        f"    while not os.path.exists({str(flag)!r}): time.sleep(0.01)\n"
        "    inner = M.take_new_block_ids\n"
        "    M.take_new_block_ids = functools.wraps(inner)(lambda self: inner(self))\n"
        f"    os.remove({str(flag)!r})\n"
        "threading.Thread(target=later, daemon=True).start()\n"
    )
    with engine(vllm, "busy") as target:
        attach.attach_to(target.pid, fix=True, observe=False)
        flag.touch()
        while flag.exists():
            assert target.alive
        taken = attach.detach_from(target.pid)
        assert (taken.fix, taken.left) == ("detached", ("SingleTypeKVCacheManager.take_new_block_ids",))
        assert target.ask()["plain"]


def test_an_engine_that_is_still_loading(tmp_path: Path) -> None:
    """Without a live scheduler in it, attach is refused and says so."""
    vllm = copy_fake(tmp_path / "loading")
    (vllm / "sitecustomize.py").write_text(
        "import sys, time\n"
        "sys.stdout.write('up\\n')\n"
        "sys.stdout.flush()\n"
        "import vllm.v1.core.sched.scheduler\n"
        "while True: time.sleep(0.01)\n"
    )
    with engine(vllm) as target, pytest.raises(attach.AttachError, match="no live scheduler") as refused:
        attach.attach_to(target.pid, fix=True, observe=False)
    assert refused.value.reason is attach.Reason.NO_SCHEDULER


def test_the_commands(vllm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What was done is said by attach --json, a line a process, and in words without; exit code 0."""
    with engine(vllm, "idle", LEAKED) as target:
        assert command.main(["--fix", "--json", str(target.pid)]) == 0
        said = json.loads(capsys.readouterr().out)
        assert (said["pid"], said["fix"], said["backlog_after"]) == (target.pid, "attached", 0)
        assert detach.main([str(target.pid)]) == 0
        assert "taken back" in capsys.readouterr().out
        assert command.main(["--fix", str(target.pid)]) == 0
        assert "0 ids had piled up" in capsys.readouterr().out
        with pytest.raises(SystemExit) as wrong:
            command.main([])
        assert wrong.value.code == 2


def test_a_refusal_in_words_and_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    """A refusal names the cause and the next step on stderr, or both in JSON, and the exit code is 1."""
    with subprocess.Popen(["/bin/true"]) as child:
        ended = child.pid
    assert command.main([str(ended)]) == 1
    said = capsys.readouterr()
    assert (said.out, "no process" in said.err, "next step" in said.err) == ("", True, True)
    assert command.main([str(ended), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["refused"] == "dead"
