# SPDX-License-Identifier: Apache-2.0
"""host_memory: each process of a deployment has its own figures, or the reason why there are none; never another's."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.sidecar.canned_proc import CannedProc, cgroup_v2
from vllm_kvfix import events, host
from vllm_kvfix.host import Cgroup, UnreadableError
from vllm_kvfix.ring.layout import API_SERVER, ENGINE_CORE, WORKER
from vllm_kvfix_sidecar import following
from vllm_kvfix_sidecar.following import GONE, NOT_THERE
from vllm_kvfix_sidecar.host_memory import LARGEST_SMAPS, HostMemory, ProcessView
from vllm_kvfix_sidecar.limits import Limits, Place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
SERVE = ("/venv/bin/python3", "/venv/bin/vllm", "serve", "m", "--api-key", "s3cret")
APP = "0::/pod/app\n"
MAPS = "1000-2000 rw-p 00000000 00:00 0    [heap]\nRss:   {0} kB\nPss:   {0} kB\nPrivate_Dirty:  {0} kB\nSwap:  0 kB\n"


class Clock:
    """Seconds that pass when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """The time."""
        return self.now


class Canned:
    """A server, 11, its engine core, 12, and a worker, 13, in one cgroup with a limit; and what looks at them."""

    def __init__(self, folder: Path) -> None:
        self.proc = CannedProc(folder / "proc")
        self.cgroups = cgroup_v2(folder / "cg", stat="anon 1")
        self.app = cgroup_v2(
            self.cgroups / "pod/app", max=1 << 30, current=9, stat="anon 500\nfile 80\nshmem 40\nkernel 3\n"
        )
        self.add(11, *SERVE)
        self.add(12, "VLLM::EngineCore", parent=11)
        self.add(13, "VLLM::Worker_TP0", parent=12)
        self.clock = Clock()
        self.memory = self.watcher()

    def watcher(self, most: int = 512) -> HostMemory:
        """One that has looked at nothing yet."""
        return HostMemory(self.proc.root, self.cgroups, self.clock, most)

    def add(self, pid: int, *argv: str, parent: int = 1, rss_kib: int = 1000, cgroup: str | None = APP) -> Path:
        """A process whose heap is all of its RSS."""
        folder = self.proc.add(pid, *argv, parent=parent, rss_kib=rss_kib, cgroup=cgroup)
        (folder / "smaps").write_text(MAPS.format(rss_kib))
        return folder

    def look(
        self, *engines: tuple[int, int, str], after: float = 1.0, silent: tuple[tuple[int, int], ...] = ()
    ) -> dict[int, ProcessView]:
        """The views by pid, some seconds later."""
        self.clock.now += after
        views = self.memory.look(engines, silent)
        assert len({view.key for view in views}) == len(views)
        return {view.key.pid: view for view in views}


@pytest.fixture
def canned(tmp_path: Path) -> Canned:
    """A deployment."""
    return Canned(tmp_path)


def scopes(view: ProcessView) -> set[str]:
    """The scopes of which a view has figures."""
    return {name.partition(".")[0] for name in view.figures}


@contextmanager
def engine(code: str, executable: str = sys.executable) -> Iterator[subprocess.Popen[str]]:
    """A real process that calls itself an engine core, and is ready once it has printed a line."""
    process = subprocess.Popen(
        ["VLLM::EngineCore", "-c", code],  # noqa: S607  # that is its title, not its path
        executable=executable,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def as_nobody() -> Iterator[None]:
    """Have no rights; for one who has none, as before."""
    user = os.geteuid()
    if user != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(user)


def look_until(pid: int, done: Callable[[ProcessView], bool]) -> ProcessView:
    """The first view of a process that is as it should be; other deployments of this machine have their turns, too."""
    clock = Clock()
    memory = HostMemory(PROC, CGROUPS, clock)
    for _ in range(600):
        view = next(view for view in memory.look([]) if view.key.pid == pid)
        if done(view):
            return view
        clock.now += 1.0
    raise AssertionError(view)


class TestRealProcesses:
    """On this machine."""

    def test_figures_are_those_of_psutil_and_of_the_kernel(self) -> None:
        """A process that sits still has the RSS and USS that psutil tells at the same moment; its start is its own."""
        with engine("x = bytearray(b'x') * (50 << 20); print(flush=True); input()") as process:
            view = look_until(process.pid, lambda view: view.limit is not None)
            other = psutil.Process(process.pid)
            full, started = other.memory_full_info(), other.create_time()
        assert view.figures["status.rss"] == pytest.approx(full.rss, rel=0.01)
        assert view.figures["status.anon"] > 50 << 20
        assert (view.role, view.name, view.ring) == (ENGINE_CORE, "EngineCore", None)
        assert view.parent == os.getpid()
        assert (view.unread, view.cgroup is not None, view.limit is not None) == ({}, True, True)
        assert view.started == pytest.approx(time.monotonic() - (time.time() - started), abs=1.0)
        for name in view.figures:
            scope, _, figure = name.partition(".")
            assert figure in events.SCOPES[scope]

    def test_smaps_of_each_come_in_turn(self) -> None:
        """USS and PSS are psutil's, and the categories sum up to the RSS."""
        with engine("x = bytearray(b'x') * (5 << 20); print(flush=True); input()") as process:
            found = look_until(process.pid, lambda view: "smaps.uss" in view.figures).figures
            full = psutil.Process(process.pid).memory_full_info()
        assert found["smaps.uss"] == pytest.approx(full.uss, rel=0.01)
        assert found["smaps.pss"] == pytest.approx(full.pss, rel=0.01)
        assert sum(found[f"smaps.{category}"] for category in events.CATEGORIES) == found["smaps.rss"]

    def test_children_of_children_are_found_as_they_come(self) -> None:
        """In the look after they began, without a whole scan."""
        clock = Clock()
        with engine("echo; read x; sleep 60 & echo; wait", "/bin/sh") as process:
            memory = HostMemory(PROC, CGROUPS, clock)
            before = {view.key.pid for view in memory.look([])}
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            process.stdout.readline()
            child = psutil.Process(process.pid).children()[0]
            views = {view.key.pid: view for view in memory.look([])}
            root = views[process.pid].root
            child.kill()
        assert child.pid in views.keys() - before
        assert (views[child.pid].role, views[child.pid].parent) == ("child", process.pid)
        assert views[child.pid].root == root

    def test_another_users_maps_have_the_reason(self) -> None:
        """Its status can be read, its smaps cannot, and that is said; the process does without ptrace rights."""
        code = "import ctypes; ctypes.CDLL(None).prctl(4, 0); print(flush=True); input()"  # PR_SET_DUMPABLE
        with engine(code) as process, as_nobody():
            view = look_until(process.pid, lambda view: "smaps" in view.unread)
        assert (scopes(view) - {"cgroup"}, list(view.unread)) == ({"status"}, ["smaps"])
        assert "permission denied" in view.unread["smaps"]


class TestRings:
    """Which process is whose ring's."""

    def test_a_ring_gives_its_process_role_and_saves_its_smaps(self, canned: Canned) -> None:
        """It reads that itself, unless it is silent; its process need not have a title."""
        canned.add(20, "/venv/bin/python3", "-c", "from multiprocessing.spawn import spawn_main", parent=11)
        views = [canned.look((20, 20, WORKER)) for _ in range(9)]
        assert (views[0][20].role, views[0][20].name, views[0][20].ring) == (WORKER, "Worker", (20, 20))
        assert {pid for view in views for pid in view if "smaps" in scopes(view[pid])} == {11, 12, 13}
        views = [canned.look((20, 20, WORKER), silent=((20, 20),)) for _ in range(9)]
        assert {pid for view in views for pid in view if "smaps" in scopes(view[pid])} == {11, 12, 13, 20}

    def test_a_ring_from_another_pid_namespace_is_found(self, canned: Canned) -> None:
        """By its start and by its own pid in its innermost namespace; other processes of that start are not it."""
        canned.proc.add(500, "python3", start=77, own_pids=(40, 1), rss_kib=5)
        canned.proc.add(501, "python3", start=77, own_pids=(41, 2))
        canned.proc.add(1, "python3", start=77)
        view = canned.look((1, 77, API_SERVER))[1]
        assert view.unread == {"status": "2 processes fit its ring, each in a PID namespace of its own"}
        canned.proc.remove(1)
        canned.proc.add(1, "init", start=0)
        view = canned.look((1, 77, API_SERVER), after=10.0)[500]
        assert (view.key, view.ring, view.role) == ((500, 77), (1, 77), API_SERVER)
        assert view.figures["status.rss"] == 5 << 10
        assert len(canned.look((1, 77, API_SERVER))) == 4

    def test_a_ring_whose_process_cannot_be_seen_has_a_view_without_figures(self, canned: Canned) -> None:
        """Under its own key, although another process has that pid here, and with the reason."""
        view = {v.key: v for v in canned.memory.look([(11, 5, ENGINE_CORE)])}[(11, 5)]  # type: ignore[index]  # a tuple is equal
        assert (view.figures, view.unread) == ({}, {"status": NOT_THERE})
        assert (view.role, view.name, view.ring) == (ENGINE_CORE, "EngineCore", (11, 5))
        assert (view.limit, view.usage, view.cgroup, view.root) == (None, None, None, None)

    def test_a_process_that_is_hidden_has_that_reason(self, canned: Canned) -> None:
        """It is there, but nothing of it can be read."""
        (canned.proc.root / "30" / "stat").mkdir(parents=True)
        assert canned.look((30, 30, WORKER))[30].unread == {"status": "Is a directory"}

    def test_a_process_that_comes_into_sight_is_found(self, canned: Canned) -> None:
        """A ring may be seen before its process; it is one view at any time."""
        assert canned.look((30, 30, WORKER))[30].unread == {"status": NOT_THERE}
        canned.add(30, "python3", "app.py")
        assert canned.look((30, 30, WORKER))[30].figures["status.rss"] == 1000 << 10
        assert canned.look()[30].ring is None  # its ring ended, it did not

    def test_a_name_is_put_right_when_the_title_comes(self, canned: Canned) -> None:
        """A forked worker has its parent's command line at first."""
        canned.add(20, *SERVE, parent=11)
        assert canned.look()[20].name == "fork"
        canned.proc.remove(20)
        canned.proc.add(20, "VLLM::Worker_TP1", parent=11)
        canned.look()
        assert (canned.look()[20].name, canned.look()[20].role) == ("Worker_TP1", WORKER)

    def test_an_orphan_that_becomes_another_program_is_called_so(self, canned: Canned) -> None:
        """It still belongs to its deployment."""
        canned.add(20, "sh", parent=13)
        canned.look()
        canned.proc.remove(20)
        canned.proc.add(20, "ninja", parent=1)
        canned.look()
        assert (canned.look()[20].name, canned.look()[20].root) == ("ninja", (11, 11))

    def test_a_child_that_starts_anew_under_the_same_name_is_called_otherwise(self, canned: Canned) -> None:
        """As Python does; when all is read again."""
        canned.proc.add(20, "python3", "x.py", parent=11)
        assert canned.look()[20].name == "python3"
        canned.proc.remove(20)
        canned.proc.add(20, "python3", "-c", "from multiprocessing.resource_tracker import main", parent=11)
        canned.look(after=10.0)
        assert canned.look()[20].name == "resource_tracker"


class TestAbsent:
    """What cannot be read is absent, with the reason."""

    @pytest.mark.parametrize("others_come", [False, True])
    def test_a_process_that_ends_says_so_once(self, canned: Canned, others_come: bool) -> None:  # noqa: FBT001  # a case
        """No figure, then no view, whatever else happens."""
        canned.look()
        canned.proc.remove(13)
        if others_come:
            canned.proc.add(40, "VLLM::Worker_TP7")
        view = canned.look()[13]
        assert (view.figures, view.unread) == ({}, {"status": GONE})
        assert canned.look().keys() - {40} == {11, 12}

    def test_a_pid_that_is_used_again_is_not_taken_for_the_old_process(self, canned: Canned) -> None:
        """Not one figure of the new one; it is followed if it belongs here, under its own key."""
        canned.look()
        canned.proc.remove(13)
        canned.add(13, "stranger").joinpath("stat").write_text("13 (stranger) S 1 " + "0 " * 17 + "99 " + "0 " * 20)
        view = canned.look()[13]
        assert (view.key.start_time, view.figures, view.unread) == (13, {}, {"status": GONE})
        assert canned.look().keys() == {11, 12}
        canned.proc.remove(12)
        canned.add(12, "child", parent=11).joinpath("stat").write_text("12 (c) S 11 " + "0 " * 17 + "99 " + "0 " * 20)
        assert canned.look()[12].unread == {"status": GONE}
        view = canned.look()[12]
        assert (view.key.start_time, view.role, view.figures["status.rss"]) == (99, "child", 1000 << 10)

    def test_a_zombie_has_no_memory(self, canned: Canned) -> None:
        """It is there as long as its parent has not noticed, without figures."""
        canned.proc.add(14, "cc1plus", parent=13, state="Z")
        for _ in range(3):
            view = canned.look()[14]
            assert (view.figures, view.name) == ({}, "cc1plus")
            assert "has ended" in view.unread["status"]

    def test_a_status_without_a_figure_leaves_it_out(self, canned: Canned) -> None:
        """A kernel thread has no memory, an old kernel does not tell all; nothing is 0 because of it."""
        (canned.proc.root / "13" / "status").write_text("State:\tS (sleeping)\nThreads:\t1\n")
        assert canned.look()[13].figures.keys() == {"status.threads_count", *canned.look()[13].figures} - {"status.rss"}
        assert not [name for name in canned.look()[13].figures if name.startswith("status.") and "count" not in name]

    @pytest.mark.parametrize("what", ["missing", "file", "empty"])
    def test_a_root_that_is_no_process_table_is_the_reason(
        self, tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Rings still have their views, and it is said once."""
        root = tmp_path / "proc"
        if what == "file":
            root.write_text("no folder")
        elif what == "empty":
            root.mkdir()
        memory = HostMemory(root, tmp_path / "cg", Clock())
        for _ in range(3):
            (view,) = memory.look([(1, 2, WORKER)])
            assert view.figures == {}
            assert str(root) in view.unread["status"]
        assert caplog.text.count("no process's memory is told") == 1

    def test_a_table_that_goes_away_takes_its_figures_along(self, canned: Canned) -> None:
        """And brings them back."""
        canned.look((12, 12, ENGINE_CORE))
        canned.proc.root.rename(canned.proc.root.with_name("away"))
        assert all(view.figures == {} and view.unread for view in canned.look((12, 12, ENGINE_CORE)).values())
        assert canned.look((12, 12, ENGINE_CORE)).keys() == {12}
        canned.proc.root.with_name("away").rename(canned.proc.root)
        views = canned.look((12, 12, ENGINE_CORE))
        assert {pid for pid, view in views.items() if "status.rss" in view.figures} == {11, 12, 13}

    def test_a_host_of_four_terabytes_is_told_to_the_byte(self, tmp_path: Path) -> None:
        """Of a process, too."""
        proc = CannedProc(tmp_path / "proc", total_kib=4 << 30, available_kib=1)
        proc.add(11, *SERVE, rss_kib=(4 << 30) - 3, cgroup="0::/\n")
        memory = HostMemory(proc.root, cgroup_v2(tmp_path / "cg", stat="anon 1"), Clock())
        (view,) = memory.look([])
        assert view.figures["status.rss"] == (4 << 40) - 3072
        assert (view.limit, view.usage, view.of, view.limiter) == (4 << 40, (4 << 40) - 1024, "host", None)

    def test_maps_that_cannot_be_read_are_said_until_they_can(
        self, canned: Canned, caplog: pytest.LogCaptureFixture
    ) -> None:
        """In each look, and in the log once for each reason."""
        for pid in (11, 12, 13):
            (canned.proc.root / str(pid) / "smaps").unlink()
            (canned.proc.root / str(pid) / "smaps").mkdir()
        for _ in range(3):
            canned.look()
        views = canned.look()
        assert all("smaps" in view.unread and "smaps" not in scopes(view) for view in views.values())
        canned.proc.add(14, "VLLM::Worker_TP1", parent=12)  # it has no smaps: as if it ended in between
        for _ in range(8):
            canned.look()
        canned.proc.remove(14)
        assert caplog.text.count("cannot read the smaps") == 1
        for pid in (11, 12, 13):
            (canned.proc.root / str(pid) / "smaps").rmdir()
            (canned.proc.root / str(pid) / "smaps").write_text(MAPS.format(1))
        for _ in range(3):
            views = canned.look()
        assert not any("smaps" in view.unread for view in views.values())


class TestTurns:
    """What costs is read in turn."""

    def test_smaps_is_read_of_one_at_a_time_small_ones_first(self, canned: Canned) -> None:
        """Each comes once in a round."""
        canned.proc.remove(11)
        canned.add(11, *SERVE, rss_kib=3000)
        canned.proc.remove(13)
        canned.add(13, "VLLM::Worker_TP0", parent=12, rss_kib=10)
        read = [[pid for pid, view in canned.look().items() if "smaps" in scopes(view)] for _ in range(6)]
        assert read == [[13], [12], [11]] * 2

    def test_a_short_lived_child_is_not_worth_it(self, canned: Canned) -> None:
        """However many of them come, the others have their turns; one that stays has, too."""
        canned.add(14, "ninja", parent=13)
        read = []
        for pid in range(100, 112):
            canned.add(pid, "cc1plus", parent=14, rss_kib=1)
            read += [pid for pid, view in canned.look().items() if "smaps" in scopes(view)]
            canned.proc.remove(pid)
        assert set(read) == {11, 12, 13}
        canned.look(after=60.0)
        assert 14 in {pid for _ in range(5) for pid, view in canned.look().items() if "smaps" in scopes(view)}

    def test_a_long_read_is_paid_for_before_the_next(self, canned: Canned, monkeypatch: pytest.MonkeyPatch) -> None:
        """One that took 0.1 s: none for minutes, and status goes on."""

        def slow(pid: int, proc: Path) -> dict[str, int]:
            del pid, proc
            canned.clock.now += 0.1
            return {"rss": 1}

        monkeypatch.setattr(host, "smaps", slow)
        assert [pid for pid, view in canned.look().items() if "smaps" in scopes(view)] == [11]
        for _ in range(100):
            views = canned.look()
            assert [pid for pid, view in views.items() if "smaps" in scopes(view)] == []
            assert "status.rss" in views[11].figures
        assert [pid for pid, view in canned.look(after=400.0).items() if "smaps" in scopes(view)] == [12]

    def test_a_long_read_of_a_cgroup_is_paid_for_as_well(self, canned: Canned, monkeypatch: pytest.MonkeyPatch) -> None:
        """It has a budget of its own, so that smaps does not keep it waiting."""
        monkeypatch.setattr(host, "smaps", lambda *_: {})
        read = Cgroup.read

        def slow(cgroup: Cgroup) -> dict[str, int]:
            canned.clock.now += 0.02
            return read(cgroup)

        monkeypatch.setattr(Cgroup, "read", slow)
        usages = [canned.look()[11].usage for _ in range(100)]
        assert usages == [543, *[None] * 79, 543, *[None] * 19]

    def test_figures_of_one_that_was_replaced_during_the_read_are_dropped(
        self, canned: Canned, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They may be another's."""

        def replaced(pid: int, proc: Path) -> dict[str, int]:
            (proc / str(pid) / "stat").write_text(f"{pid} (stranger) S 1 " + "0 " * 17 + "99 " + "0 " * 20)
            return {"rss": 1}

        monkeypatch.setattr(host, "smaps", replaced)
        assert not any("smaps" in scopes(view) for view in canned.look().values())

    def test_maps_that_would_hold_all_up_are_left(self, canned: Canned) -> None:
        """With the reason; those of the others are read."""
        canned.add(14, "VLLM::Worker_TP1", parent=12, rss_kib=(LARGEST_SMAPS >> 10) + 1)
        looks = [canned.look() for _ in range(5)]
        assert "64 GiB" in looks[4][14].unread["smaps"]
        assert {pid for views in looks for pid in views if "smaps" in scopes(views[pid])} == {11, 12, 13}


class TestLimits:
    """Against which limit a process counts."""

    def test_processes_of_one_cgroup_share_its_limit(self, canned: Canned) -> None:
        """One without a limit of its own has the host's; they have other keys."""
        canned.add(14, "cc1plus", parent=13, cgroup="0::/\n")
        views = [canned.look(), canned.look()]
        first, second = ({pid: view.usage for pid, view in looked.items()} for looked in views)
        assert [first[11] or second[11], first[14] or second[14]] == [543, 2 << 30]
        last = views[1]
        assert last[11].cgroup == last[12].cgroup == last[13].cgroup != last[14].cgroup
        assert (last[11].limit, last[11].of, last[11].limiter) == (1 << 30, "cgroup", last[11].cgroup)
        assert (last[14].limit, last[14].of, last[14].limiter) == (4 << 30, "host", None)

    def test_a_cgroups_usage_is_told_when_it_was_read_its_limit_always(self, canned: Canned) -> None:
        """With several cgroups, one is read in a look; an old usage is not told again as if it were new."""
        for n in range(3):
            cgroup_v2(canned.cgroups / f"pod/c{n}", max=1000 + n, current=n, stat=f"anon {n}\nshmem 0\nkernel 0\n")
            canned.add(20 + n, "child", parent=11, cgroup=f"0::/pod/c{n}\n")
        looks = [canned.look() for _ in range(8)]
        for views in looks[4:]:
            assert [views[20 + n].limit for n in range(3)] == [1000, 1001, 1002]
            fresh = {pid for pid, view in views.items() if view.usage is not None}
            assert fresh in [{11, 12, 13}, {20}, {21}, {22}]
            assert fresh == {pid for pid, view in views.items() if "cgroup" in scopes(view)}

    def test_a_cgroup_that_cannot_be_seen_leaves_the_limit_open(
        self, canned: Canned, caplog: pytest.LogCaptureFixture
    ) -> None:
        """It may be tighter than the host's: better none than a wrong one."""
        canned.add(14, "VLLM::Worker_TP1", parent=12, cgroup="0::/../other\n")
        for _ in range(3):
            view = canned.look()[14]
            assert (view.limit, view.usage, view.cgroup) == (None, None, None)
            assert "cannot be seen" in view.unread["cgroup"]
        assert caplog.text.count("cannot read the cgroup of process 14, Worker_TP1") == 1
        (canned.proc.root / "14" / "cgroup").write_text(APP)
        canned.look(after=60.0)
        view = canned.look()[14]
        assert (view.limit, "cgroup" in view.unread) == (1 << 30, False)

    def test_a_cgroup_that_cannot_be_seen_is_not_sought_each_second(
        self, canned: Canned, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """But a few times a minute: it takes as long as all the rest of a look."""
        sought = []

        def place(_: Limits, pid: int) -> Place:
            sought.append(pid)
            raise UnreadableError("hidden")

        monkeypatch.setattr(Limits, "place", place)
        for _ in range(20):
            assert all(view.unread["cgroup"] == "hidden" for view in canned.look().values())
        assert sorted(sought) == [11, 12, 13]

    def test_a_cgroup_without_a_controller_leaves_the_limit_open(self, canned: Canned) -> None:
        """With the reason."""
        for file in canned.app.iterdir():
            file.unlink()
        (canned.cgroups / "memory.stat").unlink()
        view = canned.look()[11]
        assert (view.limit, view.unread["cgroup"]) == (None, "its cgroup has no memory controller")

    def test_a_process_that_is_moved_is_seen_to_be_elsewhere(self, canned: Canned) -> None:
        """Within a minute: container runtimes move a process after its start."""
        before = canned.look()[12].cgroup
        cgroup_v2(canned.cgroups / "pod/new", max=77, current=5, stat="anon 1\nshmem 0\nkernel 0\n")
        (canned.proc.root / "12" / "cgroup").write_text("0::/pod/new\n")
        canned.look(after=60.0)
        view = canned.look()[12]
        assert (view.limit, view.cgroup != before) == (77, True)


class TestBounds:
    """However much there is."""

    def test_so_many_are_followed_and_it_is_said_once(self, canned: Canned, caplog: pytest.LogCaptureFixture) -> None:
        """The engines among them, and the log has one line of it."""
        for pid in range(100, 130):
            canned.add(pid, "cc1plus", parent=13)
        canned.memory = canned.watcher(most=10)
        for n in range(4):
            canned.add(200 + n, "cc1plus", parent=13)
            assert len(canned.look()) == 10
        assert canned.look().keys() >= {11, 12, 13}
        assert caplog.text.count("more of the deployments is not") == 1

    def test_names_are_few(self, canned: Canned) -> None:
        """A program that is called otherwise each time does not make a new series of a metric each time."""
        names: set[str] = set()
        for first in (100, 100 + following.MOST_NAMES):
            for pid in range(first, first + following.MOST_NAMES):
                canned.add(pid, f"tool{pid}", parent=13)
            names |= {view.name for view in canned.look().values()}
        assert len(names) == following.MOST_NAMES + 1
        assert "child" in names

    def test_nothing_is_kept_of_what_is_gone(self, canned: Canned) -> None:
        """After many processes came and went, and many rings."""
        for pid in range(100, 160):
            cgroup_v2(canned.cgroups / f"pod/c{pid}", max=1, current=1, stat="anon 1")
            canned.add(pid, "VLLM::EngineCore", parent=11, cgroup=f"0::/pod/c{pid}\n")
            canned.look((pid, pid, ENGINE_CORE), (pid, 1, WORKER))
            canned.proc.remove(pid)
        canned.look()
        canned.look(after=60.0)
        memory = canned.memory
        found = memory._following
        assert (found._processes, found._unseen, found._asked) == ({}, {}, {})
        assert len(found.members) == len(memory._kept) == len(found.table.entries) == 3
        assert len(memory._readings) == 1
        assert len(memory._smaps_turns) <= 3
        assert len(memory._limits._places) == 1

    def test_a_child_outlives_its_parents(self, canned: Canned) -> None:
        """An engine whose server was killed is followed on, as one of the same deployment."""
        root = canned.look()[13].root
        canned.proc.remove(12)
        canned.look()
        (canned.proc.root / "13" / "stat").write_text("13 (VLLM::Worker_TP) S 1 " + "0 " * 17 + "13 " + "0 " * 20)
        canned.look(after=10.0)
        view = canned.look()[13]
        assert (view.parent, view.root, view.role) == (1, root, WORKER)

    def test_who_is_followed_is_said_once(self, canned: Canned, caplog: pytest.LogCaptureFixture) -> None:
        """Those of vLLM at INFO, without their arguments; children at DEBUG, since compilers come by the hundred."""
        caplog.set_level(logging.INFO)
        for pid in range(14, 17):
            canned.add(pid, "cc1plus", parent=13)
            canned.look()
        assert [record.getMessage() for record in caplog.records] == [
            "follow the memory of process 11, APIServer",
            "follow the memory of process 12, EngineCore",
            "follow the memory of process 13, Worker_TP0",
        ]
