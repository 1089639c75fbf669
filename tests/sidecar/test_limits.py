# SPDX-License-Identifier: Apache-2.0
"""limits: the limit that will be reached first, and what counts against it; absent where it cannot be known."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.sidecar.canned_proc import CannedProc, cgroup_v2
from vllm_kvfix.host import UnreadableError
from vllm_kvfix_sidecar.limits import CGROUP, HOST, Limits, Reading, Standing

HOST_BYTES = 1 << 40
NO_LIMIT_V1 = (1 << 63) - 4096


@pytest.fixture
def canned(tmp_path: Path) -> CannedProc:
    """A process table with one process, in the cgroup ``/pod/app`` of version 2."""
    made = CannedProc(tmp_path / "proc")
    made.add(11, "vllm", cgroup="0::/pod/app\n")
    return made


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A mount of version 2 without any limit; the root says less than the others."""
    cgroup_v2(tmp_path / "cg", stat="anon 1")
    cgroup_v2(tmp_path / "cg/pod", max="max", current=900, stat="anon 500\nfile 300\nshmem 40\nkernel 60\n")
    cgroup_v2(tmp_path / "cg/pod/app", max="max", current=600, stat="anon 300\nfile 250\nshmem 20\nkernel 30\n")
    return tmp_path / "cg"


def reading(canned: CannedProc, tree: Path) -> Reading:
    """What is read for process 11."""
    limits = Limits(canned.root, tree)
    return limits.read(limits.place(11), HOST_BYTES)


def standing(canned: CannedProc, tree: Path) -> Standing:
    """Where process 11 stands; there must be a limit."""
    found = reading(canned, tree).standing
    assert found is not None
    return found


class TestVersion2:
    """The unified hierarchy."""

    def test_a_limit_is_told_with_what_cannot_be_reclaimed(self, canned: CannedProc, tree: Path) -> None:
        """Anonymous and shared memory and the kernel's own, less what the kernel can take back of that."""
        cgroup_v2(
            tree / "pod/app", max=1000, stat="anon 300\nfile 250\nshmem 20\nkernel 30\nslab_reclaimable 7\nslab 9\n"
        )
        found = standing(canned, tree)
        assert (found.limit, found.usage, found.of) == (1000, 343, CGROUP)
        assert found.limiter == f"{tree}/pod/app:{(tree / 'pod/app').stat().st_ino}"

    @pytest.mark.parametrize(("above", "expected"), [(2000, (1000, 350, "pod/app")), (1100, (1100, 600, "pod"))])
    def test_the_one_with_the_least_room_counts(
        self, canned: CannedProc, tree: Path, above: int, expected: tuple[int, int, str]
    ) -> None:
        """A wider limit above may be reached first, by what others use there; its own usage stands against it."""
        cgroup_v2(tree / "pod/app", max=1000)
        cgroup_v2(tree / "pod", max=above)
        found = standing(canned, tree)
        assert (found.limit, found.usage) == expected[:2]
        assert found.limiter == f"{tree}/{expected[2]}:{(tree / expected[2]).stat().st_ino}"

    def test_a_limit_above_counts_where_there_is_no_other(self, canned: CannedProc, tree: Path) -> None:
        """Of a pod, say, with one container without a limit."""
        cgroup_v2(tree / "pod", max=5000)
        found = standing(canned, tree)
        assert (found.limit, found.usage) == (5000, 600)

    @pytest.mark.parametrize("most", ["max", HOST_BYTES, HOST_BYTES + 1, "what?", ""])
    def test_no_limit_is_none(self, canned: CannedProc, tree: Path, most: str | int) -> None:
        """Neither "max", nor more than the host has, nor what is no number."""
        cgroup_v2(tree / "pod/app", max=most)
        found = reading(canned, tree)
        assert (found.standing, found.unread) == (None, None)
        assert found.figures["anon"] == 300

    def test_without_its_parts_usage_is_all_but_files(self, canned: CannedProc, tree: Path) -> None:
        """A kernel before 5.18 tells no sum of its own; where nothing but the sum is told, that is it; else None."""
        cgroup_v2(tree / "pod/app", max=1000, current=600, stat="anon 300\nfile 250\nshmem 20\n")
        assert standing(canned, tree).usage == 370
        cgroup_v2(tree / "pod/app", stat="nothing known\n")
        assert standing(canned, tree).usage == 600
        (tree / "pod/app/memory.current").unlink()
        (tree / "pod/app/memory.stat").write_text("")
        assert (standing(canned, tree).limit, standing(canned, tree).usage) == (1000, None)

    def test_a_limit_of_nothing_is_a_limit(self, canned: CannedProc, tree: Path) -> None:
        """It is 0, which is not none."""
        cgroup_v2(tree / "pod/app", max=0)
        assert standing(canned, tree).limit == 0


class TestVersion1:
    """A folder for each controller."""

    @pytest.fixture
    def place(self, canned: CannedProc, tmp_path: Path) -> Path:
        """The cgroup of process 11."""
        (canned.root / "11" / "cgroup").write_text("4:cpu:/x\n3:memory:/docker/abc\n0::/\n")
        place = tmp_path / "cg/memory/docker/abc"
        place.mkdir(parents=True)
        (place / "memory.usage_in_bytes").write_text("600\n")
        (place / "memory.limit_in_bytes").write_text("1000\n")
        (place / "memory.kmem.usage_in_bytes").write_text("30\n")
        (place / "memory.stat").write_text(
            "cache 2\nrss 3\ntotal_rss 300\ntotal_cache 250\ntotal_shmem 20\nhierarchical_memory_limit 1000\n"
        )
        return place

    def test_a_limit_is_told_with_what_cannot_be_reclaimed(
        self, canned: CannedProc, place: Path, tmp_path: Path
    ) -> None:
        """With all below it, as the limit counts them."""
        found = standing(canned, tmp_path / "cg")
        assert (found.limit, found.usage, found.of) == (1000, 350, CGROUP)
        assert found.limiter == f"{place}:{place.stat().st_ino}"

    def test_its_largest_number_is_no_limit(self, canned: CannedProc, place: Path, tmp_path: Path) -> None:
        """Also where the size of the host is not known."""
        (place / "memory.limit_in_bytes").write_text(f"{NO_LIMIT_V1}\n")
        (place / "memory.stat").write_text(f"total_rss 300\nhierarchical_memory_limit {NO_LIMIT_V1}\n")
        limits = Limits(canned.root, tmp_path / "cg")
        assert limits.read(limits.place(11), None).standing is None

    def test_a_limit_that_cannot_be_seen_has_no_usage(self, canned: CannedProc, place: Path, tmp_path: Path) -> None:
        """One above the mount: what counts against it is more than what is seen here."""
        (place / "memory.limit_in_bytes").write_text(f"{NO_LIMIT_V1}\n")
        found = standing(canned, tmp_path / "cg")
        assert (found.limit, found.usage, found.of) == (1000, None, CGROUP)


class TestPlaces:
    """Which processes share a limit."""

    def test_all_in_one_cgroup_have_one_key_until_it_is_made_anew(self, canned: CannedProc, tree: Path) -> None:
        """A container that is restarted may get its predecessor's path."""
        canned.add(12, "child", cgroup="0::/pod/app\n")
        canned.add(13, "other", cgroup="0::/pod\n")
        limits = Limits(canned.root, tree)
        before = limits.place(11)
        assert limits.place(12) == before
        assert limits.place(13).key != before.key
        (tree / "pod/app").rename(tree / "pod/old")
        cgroup_v2(tree / "pod/app", max=1000, current=1, stat="anon 1")
        assert limits.place(11) == before
        limits.forget()
        assert limits.place(11).key != before.key

    def test_one_that_cannot_be_seen_is_told(self, canned: CannedProc, tree: Path) -> None:
        """A process of another container, a process that is gone, one whose cgroup file cannot be read."""
        canned.add(12, "other", cgroup="0::/../elsewhere\n")
        canned.add(13, "kthread")
        for pid in (12, 13, 14):
            with pytest.raises(UnreadableError, match=r"."):
                Limits(canned.root, tree).place(pid)

    def test_one_that_goes_is_told_when_it_is_read(self, canned: CannedProc, tree: Path) -> None:
        """With the reason, and no figure."""
        limits = Limits(canned.root, tree)
        place = limits.place(11)
        (tree / "pod/app").rename(tree / "gone")
        found = limits.read(place, HOST_BYTES)
        assert (dict(found.figures), found.standing) == ({}, None)
        assert found.unread == "its cgroup was removed"


class TestHost:
    """Where no cgroup has a limit."""

    def test_what_is_not_available_is_used(self, tmp_path: Path) -> None:
        """Also on a host of 4 TB, to the byte."""
        canned = CannedProc(tmp_path / "proc", total_kib=(4 << 30) + 1, available_kib=1)
        assert Limits(canned.root, tmp_path).host() == Standing((4 << 40) + 1024, 4 << 40, HOST)

    def test_what_is_not_told_is_none(self, canned: CannedProc, tmp_path: Path) -> None:
        """A kernel before 3.14 does not tell what is available; a root that is no process table tells nothing."""
        (canned.root / "meminfo").write_text("MemTotal: 4 kB\n")
        assert Limits(canned.root, tmp_path).host() == Standing(4096, None)
        (canned.root / "meminfo").unlink()
        assert Limits(canned.root, tmp_path).host() == Standing(None, None)


def test_this_machine_is_read() -> None:
    """This very process has a place, and its cgroup says more than nothing."""
    limits = Limits(Path("/proc"), Path("/sys/fs/cgroup"))
    host = limits.host()
    assert host.limit is not None
    assert host.usage is not None
    assert 0 < host.usage < host.limit
    place = limits.place(os.getpid())
    found = limits.read(place, host.limit)
    assert found.unread is None
    assert found.figures["anon"] > 0
    assert place.key.rpartition(":")[2].isdecimal()
