# SPDX-License-Identifier: Apache-2.0
"""target and rights: each thing that attach refuses, with its own reason, and the target untouched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyinjector  # type: ignore[import-untyped]  # it brings none
import pytest

from tests.attach.processes import TITLE, engine, environ, started, state_of, wait_for
from tests.debian import program
from tests.support import copy_fake
from vllm_kvfix import attach
from vllm_kvfix.attach import injection, rights
from vllm_kvfix.attach import target as looking

NOBODY = 65534
SLEEPER = "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.05)"


def refused(pid: int, *, fix: bool = True, observe: bool = False) -> attach.AttachError:
    """The error of an attach that must be refused."""
    with pytest.raises(attach.AttachError) as caught:
        attach.attach_to(pid, fix=fix, observe=observe)
    return caught.value


def test_a_dead_pid() -> None:
    """A process that has ended, and one that nobody has waited for, are refused as dead."""
    child = subprocess.Popen(["/bin/true"])
    wait_for(lambda: state_of(child.pid) == "Z")
    zombie = refused(child.pid)
    child.wait()
    gone = refused(child.pid)
    assert {zombie.reason, gone.reason} == {attach.Reason.DEAD}
    assert "its parent has not taken note" in str(zombie)
    assert "there is no process" in str(gone)


def test_a_thread_is_no_process(vllm: Path) -> None:
    """The id of a thread is refused, and the process's is named."""
    with engine(vllm) as target:
        threads = {int(path.name) for path in Path(f"/proc/{target.pid}/task").iterdir()} - {target.pid}
        assert f"a thread of process {target.pid}" in str(refused(threads.pop()))


def test_a_stopped_process(vllm: Path) -> None:
    """A process under SIGSTOP is refused with the command that wakes it, and is not woken."""
    with engine(vllm) as target:
        os.kill(target.pid, signal.SIGSTOP)
        wait_for(lambda: state_of(target.pid) == "T")
        error = refused(target.pid)
        assert (error.reason, state_of(target.pid)) == (attach.Reason.STOPPED, "T")
        assert f"kill -CONT {target.pid}" in error.next_step
        os.kill(target.pid, signal.SIGCONT)
        assert target.ask()["modules"] == []


def test_a_process_under_a_debugger(vllm: Path) -> None:
    """A process that another one traces is refused, and that one is named."""
    with engine(vllm) as target:
        with pyinjector.attach(target.pid):
            error = refused(target.pid)
        assert error.reason is attach.Reason.TRACED
        assert f"process {os.getpid()}" in str(error)


def test_what_is_no_python() -> None:
    """A program that is no Python is refused."""
    with started(["/bin/sleep", "60"]) as target:
        assert refused(target.pid).reason is attach.Reason.NOT_PYTHON


def test_a_python_without_vllm() -> None:
    """A Python that has loaded no vLLM is refused, whatever lies in its environment."""
    with started([sys.executable, "-c", SLEEPER], "up") as target:
        error = refused(target.pid)
        assert error.reason is attach.Reason.NOT_VLLM
        assert "has not loaded vLLM" in str(error)


def test_pypy() -> None:
    """A real PyPy is refused as another kind of Python, even under the title of an engine core."""
    pypy = program("pypy3", "pypy3", "that PyPy is refused")
    with started([TITLE, "-c", SLEEPER], "up", executable=pypy) as target:
        error = refused(target.pid)
        assert error.reason is attach.Reason.OTHER_PYTHON
        assert "PyPy" in str(error)
        assert "start the engine with vllm-kvfix" in error.next_step


@pytest.mark.parametrize(
    ("maps", "said"),
    [
        (["/usr/lib/libpython3.13t.so.1.0"], "free-threaded"),
        (["/lib/ld-musl-x86_64.so.1", "/usr/lib/libpython3.12.so.1.0"], "musl"),
        (["/usr/lib/libpypy3.10-c.so"], "PyPy"),
        (["/nowhere/libpython3.11.so.1.0"], "lets no library call it"),
    ],
)
def test_other_kinds_of_python(maps: list[str], said: str) -> None:
    """Each kind of Python that code cannot be put into is told by what it has mapped."""
    with pytest.raises(attach.AttachError, match=said) as caught:
        looking._python(os.getpid(), maps)
    assert caught.value.reason is attach.Reason.OTHER_PYTHON


def test_the_api_server(vllm: Path) -> None:
    """The title of an API server, and a parent of engine cores under any title, are refused; the core is named."""
    with engine(vllm, title="VLLM::APIServer_0") as target:
        assert refused(target.pid).reason is attach.Reason.FRONT_END
        assert target.ask()["modules"] == []
    spawn = (
        "import subprocess, sys\n"
        "command = ['VLLM::EngineCore', '-c', 'import time; time.sleep(60)']\n"
        f"child = subprocess.Popen(command, executable={sys.executable!r})\n"
        "print('up', flush=True)\nsys.stdin.read()\nchild.kill()"
    )
    with started([sys.executable, "-c", spawn], "up") as parent:
        (core,) = looking._children(parent.pid)
        wait_for(lambda: looking._title(core).startswith("VLLM::EngineCore"))
        error = refused(parent.pid)
        os.kill(core, signal.SIGKILL)
    assert error.reason is attach.Reason.FRONT_END
    assert f"vllm-kvfix attach {core}" in error.next_step


def test_another_process_of_vllms(vllm: Path) -> None:
    """What vLLM names otherwise than an engine core, such as its coordinator, is refused without a look inside."""
    with engine(vllm, title="VLLM::DPCoordinator") as target:
        error = refused(target.pid)
        assert error.reason is attach.Reason.NO_SCHEDULER
        assert "VLLM::DPCoordinator" in str(error)
        assert target.ask()["modules"] == []


def test_a_worker(vllm: Path) -> None:
    """A worker is refused."""
    with engine(vllm, title="VLLM::Worker_TP0") as target:
        assert refused(target.pid).reason is attach.Reason.WORKER
        assert target.ask()["modules"] == []


def test_a_fixed_release(tmp_path: Path) -> None:
    """Where vLLM has the fix itself, --fix is refused as not needed, and --observe is what the next step names."""
    line = "        self.new_block_ids: list[int] = []\n"
    gate = (line, f"{line}        self._record_new_block_ids = False\n")
    vllm = copy_fake(tmp_path / "fixed", "0.26.0", {"v1/core/single_type_kv_cache_manager.py": gate})
    with engine(vllm) as target:
        error = refused(target.pid)
        assert error.reason is attach.Reason.NOT_AFFECTED
        assert "there is nothing to fix" in str(error)
        assert "attach --observe" in error.next_step
        assert target.ask()["modules"] == []


def test_an_edited_source(vllm: Path) -> None:
    """A source of unknown digest is refused, unless VLLM_KVFIX_PATCH=force was in the engine's environment."""
    with engine(vllm, further={"VLLM_KVFIX_PATCH": "auto"}) as target:
        error = refused(target.pid)
        assert error.reason is attach.Reason.UNKNOWN_SOURCE
        assert "not that of a release we know" in str(error)
        assert target.ask()["modules"] == []


def test_a_source_that_was_edited_since(vllm: Path) -> None:
    """A file that was written after the engine had started says nothing of what runs in it: refused."""
    with engine(vllm) as target:
        later = time.time() + 60
        os.utime(vllm / "vllm/v1/core/kv_cache_manager.py", (later, later))
        error = refused(target.pid)
        assert error.reason is attach.Reason.UNKNOWN_SOURCE
        assert "kv_cache_manager.py was changed after" in str(error)
        assert target.ask()["modules"] == []


def test_an_edit_that_kept_its_date(vllm: Path) -> None:
    """A file that was edited since under its old date is told by the byte code that runs: refused inside, unchanged."""
    with engine(vllm, "busy") as target:
        path = vllm / "vllm/v1/core/kv_cache_manager.py"
        before = path.stat()
        path.write_text(path.read_text().replace("return [i for", "return [0 * i for"))
        os.utime(path, (before.st_atime, before.st_mtime))
        error = refused(target.pid)
        assert error.reason is attach.Reason.UNKNOWN_SOURCE
        assert "KVCacheManager.take_new_block_ids as it runs" in str(error)
        after = target.ask()
        assert (after["stock"], after["own"], after["in_order"]) == (True, [], True)


def test_a_vllm_that_cannot_be_watched(vllm: Path) -> None:
    """Where the source lacks what the recorder reads, --observe is refused, and --fix alone is the next step."""
    with engine(vllm) as target:
        error = refused(target.pid, observe=True)
        assert error.reason is attach.Reason.UNKNOWN_SOURCE
        assert "attach --fix" in error.next_step


def test_another_users_process(vllm: Path) -> None:
    """Without CAP_SYS_PTRACE another user's engine is refused; the message names both users and the command."""
    if os.geteuid() != 0:  # then root's first process is another user's
        error = refused(1)
        assert error.reason is attach.Reason.RIGHTS
        return
    with engine(vllm) as target:
        child = os.fork()
        if child == 0:  # as nobody, with all that is imported already
            os._exit(refused_to_nobody(target.pid))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert target.ask()["modules"] == []


def refused_to_nobody(pid: int) -> int:
    """0 if this process, become another user, is refused as it should be."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    try:
        attach.attach_to(pid, fix=True, observe=False)
    except attach.AttachError as error:
        named = f"belongs to user 0; we are {NOBODY}" in str(error) and "sudo" in error.next_step
        return 0 if error.reason is attach.Reason.RIGHTS and named else 1
    except BaseException:  # noqa: BLE001  # it must not come back into pytest
        return 2
    return 3


@pytest.mark.parametrize(
    ("case", "said", "grants"),
    [
        (("1", "0"), "ptrace_scope is 1", "sysctl kernel.yama.ptrace_scope=0"),
        (("2", "0"), "ptrace_scope is 2", "sudo"),
        (("3", "80000"), "no process may trace another", "restart"),
        (("0", "80000"), "security module", "dmesg"),
        (("0", "0"), "not dumpable", "sudo"),
    ],
)
def test_which_right_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: tuple[str, str], said: str, grants: str
) -> None:
    """Where the kernel says no, the message names what stands in the way and the command that grants it."""
    scope, ours = case
    yama = tmp_path / "sys/kernel/yama"
    yama.mkdir(parents=True)
    (yama / "ptrace_scope").write_text(f"{scope}\n")
    user = os.geteuid()
    for pid, capabilities in ((4711, "0"), (os.getpid(), ours)):
        (tmp_path / str(pid) / "ns").mkdir(parents=True)
        (tmp_path / str(pid) / "status").write_text(f"Uid:\t{user}\t{user}\t{user}\t{user}\nCapEff:\t{capabilities}\n")
        (tmp_path / str(pid) / "ns/user").symlink_to("user:[1]")
    (tmp_path / "4711/mem").mkdir()  # cannot be opened
    monkeypatch.setattr(rights, "PROC", tmp_path)
    with pytest.raises(attach.AttachError, match=said) as caught:
        rights.check(4711)
    assert caught.value.reason is attach.Reason.RIGHTS
    assert grants in caught.value.next_step


def test_to_trace_is_not_enough_for_another_users_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who may trace another user's process, but neither open nor give away files, is told of these two capabilities."""
    for pid, user in ((4711, os.geteuid() + 1), (os.getpid(), os.geteuid())):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "status").write_text(f"Uid:\t{user}\t{user}\t{user}\t{user}\nCapEff:\t80000\n")
    (tmp_path / "4711/mem").mkdir()
    monkeypatch.setattr(rights, "PROC", tmp_path)
    with pytest.raises(attach.AttachError, match="without CAP_DAC_OVERRIDE and CAP_CHOWN"):
        rights.check(4711)


def test_another_user_namespace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without rights there, a process of another user namespace is told apart from one of another user."""
    for pid, namespace in ((4711, "user:[2]"), (os.getpid(), "user:[1]")):
        (tmp_path / str(pid) / "ns").mkdir(parents=True)
        (tmp_path / str(pid) / "status").write_text("Uid:\t0\t0\t0\t0\nCapEff:\t0\n")
        (tmp_path / str(pid) / "ns/user").symlink_to(namespace)
    (tmp_path / "4711/mem").mkdir()
    monkeypatch.setattr(rights, "PROC", tmp_path)
    with pytest.raises(attach.AttachError, match="another user namespace"):
        rights.check(4711)


def test_without_hypno(vllm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where hypno is missing, the error names the extra that brings it."""
    monkeypatch.setitem(sys.modules, "hypno", None)
    with engine(vllm) as target:
        error = refused(target.pid)
        assert (error.reason, error.next_step) == (attach.Reason.NO_TOOL, injection.EXTRA)
        assert target.ask()["modules"] == []


def test_engine_cores_are_found_by_their_title(vllm: Path) -> None:
    """--all takes what vLLM calls an engine core, and nothing else."""
    with (
        engine(vllm) as one,
        engine(vllm, title="VLLM::EngineCore_DP1") as other,
        engine(vllm, title="python") as not_one,
    ):
        found = looking.engine_cores()
        assert {one.pid, other.pid} <= set(found)
        assert not_one.pid not in found


def test_what_an_engine_core_has_forked(vllm: Path) -> None:
    """A child with the title of the engine core that forked it is neither taken for one, nor its parent for another."""
    (vllm / "sitecustomize.py").write_text(
        "import os, time\n"
        "parent = os.getpid()\n"
        "if os.fork() == 0:\n"
        "    while os.getppid() == parent: time.sleep(0.05)\n"
        "    os._exit(0)\n"
    )
    with engine(vllm) as target:
        (child,) = looking._children(target.pid)
        assert looking._title(child).startswith(TITLE)
        assert {target.pid, child} & set(looking.engine_cores()) == {target.pid}
        assert attach.attach_to(target.pid, fix=True, observe=False).fix == "attached"


TITLED = """
import sys
first = int(open("/proc/self/stat").read().rpartition(")")[2].split()[47])
with open("/proc/self/mem", "r+b", 0) as memory:
    memory.seek(first)
    memory.write(bytes(len("A=theirs")))
print("up", flush=True)
sys.stdin.read()
"""


def test_an_environment_under_a_title() -> None:
    """Where a title was written over a process's environment, what is left is read, and beneath it its ancestor's."""
    environ, own = {"A": "1=2", "TMPDIR": "/somewhere"}, {"A": "theirs", "LAST": "3"}
    script = (
        "import subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {TITLED!r}], env={own!r}, stdin=-1, stdout=-1)\n"
        "child.stdout.readline()\nprint(child.pid, flush=True)\nsys.stdin.read()\nchild.kill()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True, env=environ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert looking._environ(parent.pid) == environ
        assert looking._environ(child) == {**environ, "LAST": "3"}
        parent.communicate()


def test_where_it_looks_for_a_place(vllm: Path) -> None:
    """A target's TMPDIR comes first among the folders where a small file may lie for a moment."""
    with engine(vllm, further={"TMPDIR": "/var/tmp"}) as target:  # noqa: S108  # its own choice
        assert looking.look(target.pid).folders()[0] == "/var/tmp"  # noqa: S108  # as above


def test_a_target_in_another_mount_namespace(vllm: Path) -> None:
    """An engine with a /tmp of its own, as in a container, is reached, and nothing is left in its /tmp or in ours."""
    if os.geteuid() != 0:
        pytest.skip("only root can make a mount namespace")
    program, script = os.path.realpath(sys.executable), Path(__file__).with_name("target_script.py")
    inner = f"mount -t tmpfs -o mode=1777 none /var/tmp && exec -a VLLM::EngineCore {program} {script} busy 1000"
    command = ["unshare", "--mount", "--propagation=private", "bash", "-c", inner]
    with started(command, "up", env=environ(vllm, {"TMPDIR": "/var/tmp"})) as target:  # noqa: S108  # its own
        assert attach.attach_to(target.pid, fix=True, observe=False).backlog_after == 0
        assert attach.detach_from(target.pid).fix == "detached"
        assert list(Path(f"/proc/{target.pid}/root/var/tmp").iterdir()) == []
        assert target.ask()["stock"]
    assert not list(Path("/var/tmp").glob("vllm-kvfix-attach-*"))  # noqa: S108  # ours, not its own
