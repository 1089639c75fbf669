# SPDX-License-Identifier: Apache-2.0
"""vllm_kvfix.host.cgroup: which cgroup a process is in, and what its memory controller says, version 1 and 2."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.host_support import GIB, MIB, TIB, child, write_tree
from vllm_kvfix import host
from vllm_kvfix.events import SCOPES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NO_LIMIT_V1 = 9223372036854771712
V2_LEAF = {
    "memory.current": f"{5 * GIB}\n",
    "memory.max": f"{8 * GIB}\n",
    "memory.high": f"{7 * GIB}\n",
    "memory.swap.current": f"{1 * GIB}\n",
    "memory.stat": "anon 100\nfile 200\nkernel 60\nkernel_stack 10\npagetables 20\nshmem 50\nslab 7\nanon_thp 9\n",
    "memory.events": "low 1\nhigh 2\nmax 3\noom 4\noom_kill 5\noom_group_kill 6\n",
    "memory.pressure": "some avg10=0.10 avg60=0.00 avg300=0.00 total=777\nfull avg10=0.00 avg60=0.00 total=333\n",
}
V2_FIGURES = {
    "usage": 5 * GIB,
    "limit": 8 * GIB,
    "high": 7 * GIB,
    "swap": GIB,
    "anon": 100,
    "file": 200,
    "shmem": 50,
    "kernel": 60,
    "oom_count": 4,
    "oom_kill_count": 5,
    "high_count": 2,
    "max_count": 3,
    "psi_some_us": 777,
    "psi_full_us": 333,
}
V1_LEAF = {
    "memory.usage_in_bytes": f"{5 * GIB}\n",
    "memory.limit_in_bytes": f"{8 * GIB}\n",
    "memory.soft_limit_in_bytes": f"{GIB}\n",
    "memory.kmem.usage_in_bytes": "60\n",
    "memory.failcnt": "3\n",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n",
    "memory.stat": f"cache 1\nrss 2\nshmem 3\nswap 4\nhierarchical_memory_limit {8 * GIB}\n"
    "total_cache 200\ntotal_rss 100\ntotal_mapped_file 9\ntotal_shmem 50\ntotal_swap 11\n",
}
V1_FIGURES = {
    "usage": 5 * GIB,
    "limit": 8 * GIB,
    "swap": 11,
    "anon": 100,
    "file": 200,
    "shmem": 50,
    "kernel": 60,
    "oom_kill_count": 5,
    "max_count": 3,
}
POD = "/kubepods/pod1/box"


class Machine:
    """A process table and cgroup mounts in files."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.mounts = folder / "cgroup"
        self.mounts.mkdir(parents=True)
        self.process(self_="0::/\n", mountinfo="")

    def process(self, cgroup: str | None = None, self_: str | None = None, mountinfo: str | None = None) -> None:
        """Say which cgroups process 77, and the reader itself, are in, and what the reader sees mounted."""
        files = {"self/mountinfo": mountinfo, "77/cgroup": cgroup, "self/cgroup": self_}
        write_tree(self.proc, {name: text for name, text in files.items() if text is not None})

    def v2(self, path: str, files: dict[str, str] | None = None, below: str = "") -> Path:
        """A cgroup of version 2, mounted at ``below`` the folder of mounts."""
        write_tree(self.mounts / below, {"cgroup.controllers": "cpu memory\n"})
        return write_tree(self.mounts / below / path.lstrip("/"), V2_LEAF if files is None else files)

    def v1(self, path: str, files: dict[str, str] | None = None) -> Path:
        """A cgroup of version 1."""
        return write_tree(self.mounts / "memory" / path.lstrip("/"), V1_LEAF if files is None else files)

    def of(self, pid: int | str = 77) -> host.Cgroup:
        """What is found for a process."""
        return host.Cgroup.of(pid, self.proc, self.mounts)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """One whose reader is in the root cgroup."""
    return Machine(tmp_path)


def test_version_2_gives_every_figure(machine: Machine) -> None:
    """Under the names of the events; nothing above the cgroup limits it."""
    machine.process(cgroup=f"0::{POD}\n")
    leaf = machine.v2(POD)
    cgroup = machine.of()
    assert (cgroup.path, cgroup.version) == (leaf, 2)
    assert cgroup.read() == V2_FIGURES
    assert set(V2_FIGURES) == set(SCOPES["cgroup"])


def test_version_1_gives_what_it_has(machine: Machine) -> None:
    """With the cgroups below it; a soft limit is none at which anybody is slowed down."""
    machine.process(cgroup=f"12:cpu,cpuacct:/x\n7:memory:{POD}\n1:name=systemd:/y\n0::/z\n")
    leaf = machine.v1(POD)
    cgroup = machine.of()
    assert (cgroup.path, cgroup.version) == (leaf, 1)
    assert cgroup.read() == V1_FIGURES


def test_the_tightest_limit_above_counts_in_version_2(machine: Machine) -> None:
    """As does the tightest threshold, each from whatever level; "max" is no limit."""
    machine.process(cgroup=f"0::{POD}\n")
    machine.v2(POD, V2_LEAF | {"memory.max": "max\n", "memory.high": "max\n"})
    machine.v2("/kubepods/pod1", {"memory.max": f"{3 * GIB}\n", "memory.high": "max\n"})
    machine.v2("/kubepods", {"memory.max": f"{4 * GIB}\n", "memory.high": f"{2 * GIB}\n"})
    write_tree(machine.mounts.parent, {"memory.max": "1\n"})  # above the mount: not a cgroup
    figures = machine.of().read()
    assert (figures["limit"], figures["high"]) == (3 * GIB, 2 * GIB)


def test_the_tightest_limit_above_counts_in_version_1(machine: Machine) -> None:
    """The kernel says it, also of levels that cannot be seen."""
    machine.process(cgroup=f"7:memory:{POD}\n")
    machine.v1(POD, V1_LEAF | {"memory.stat": f"hierarchical_memory_limit {3 * GIB}\n"})
    assert machine.of().read()["limit"] == 3 * GIB


@pytest.mark.parametrize("limit", [NO_LIMIT_V1, 9223372036854710272, (1 << 63) - 1])
def test_no_limit_is_left_out(machine: Machine, limit: int) -> None:
    """Version 2 says max, version 1 a number that depends on the size of pages."""
    machine.process(cgroup=f"0::{POD}\n")
    machine.v2(POD, V2_LEAF | {"memory.max": "max\n", "memory.high": "max\n"})
    assert machine.of().read() == {name: V2_FIGURES[name] for name in V2_FIGURES if name not in {"limit", "high"}}
    machine.process(cgroup=f"7:memory:{POD}\n")
    stat = f"total_rss 1\nhierarchical_memory_limit {limit}\n"
    machine.v1(POD, {"memory.limit_in_bytes": f"{limit}\n", "memory.stat": stat})
    assert machine.of().read() == {"anon": 1}


def test_what_does_not_fit_into_a_word_of_an_event_is_left_out(machine: Machine) -> None:
    """No kernel says such a thing."""
    machine.process(cgroup="0::/a\n")
    machine.v2("/a", {"memory.current": f"{1 << 64}\n", "memory.stat": f"anon {1 << 64}\nfile 5\n"})
    assert machine.of().read() == {"file": 5}


def test_a_limit_of_terabytes_is_a_limit(machine: Machine) -> None:
    """4 TB."""
    machine.process(cgroup=f"7:memory:{POD}\n")
    machine.v1(POD, {"memory.limit_in_bytes": f"{4 * TIB}\n"})
    assert machine.of().read() == {"limit": 4 * TIB}


def test_a_hierarchy_that_is_switched_off_has_own_figures_alone(machine: Machine) -> None:
    """Version 1 then has no totals."""
    machine.process(cgroup="7:memory:/a\n")
    machine.v1("/a", {"memory.stat": "cache 1\nrss 2\nshmem 3\nswap 4\n"})
    assert machine.of().read() == {"file": 1, "anon": 2, "shmem": 3, "swap": 4}


def test_kernel_memory_is_summed_up_where_an_older_kernel_does_not(machine: Machine) -> None:
    """Before 5.18."""
    machine.process(cgroup="0::/a\n")
    stat = "anon 100\nkernel_stack 10\npagetables 20\npercpu 3\nsock 999\nslab 7\nslab_reclaimable 5\n"
    machine.v2("/a", {"memory.stat": stat})
    assert machine.of().read() == {"anon": 100, "kernel": 40}


def test_the_root_of_version_2_has_no_usage(machine: Machine) -> None:
    """Nor a limit: both are left out."""
    machine.process(cgroup="0::/\n")
    machine.v2("/", {"memory.stat": "anon 100\nfile 5\n"})
    assert machine.of().read() == {"anon": 100, "file": 5}


def test_the_nearest_cgroup_with_the_controller_bears_the_memory(machine: Machine) -> None:
    """In version 2 a cgroup need not have it."""
    machine.process(cgroup="0::/a/b/c\n")
    machine.v2("/a")
    machine.v2("/a/b/c", {"cgroup.procs": "77\n"})
    assert machine.of().path == machine.mounts / "a"
    assert machine.of().read() == V2_FIGURES


def test_a_controller_in_version_1_wins_over_version_2_beside_it(machine: Machine) -> None:
    """A hybrid machine has both."""
    machine.process(cgroup="7:memory:/a\n0::/b\n")
    machine.v1("/a")
    machine.v2("/b", {"memory.pressure": ""}, below="unified")
    assert (machine.of().version, machine.of().path) == (1, machine.mounts / "memory/a")


def test_a_hybrid_machine_whose_controller_is_in_version_2(machine: Machine) -> None:
    """Version 1 holds others alone, version 2 has a folder beside theirs."""
    machine.process(cgroup="7:cpu:/a\n0::/b\n")
    machine.v2("/b", below="unified")
    assert machine.of().path == machine.mounts / "unified/b"


def test_within_a_cgroup_namespace_the_root_is_the_containers_own(machine: Machine) -> None:
    """The path is /, and what is mounted is the container's cgroup."""
    machine.process(cgroup="0::/\n")
    machine.v2("/")
    assert machine.of().path == machine.mounts
    assert machine.of().read() == V2_FIGURES


@pytest.mark.parametrize(("line", "version"), [("0::/docker/1a", 2), ("7:memory:/docker/1a", 1)])
def test_a_container_without_a_namespace_finds_itself_at_the_root(machine: Machine, line: str, version: int) -> None:
    """The path counts from the machine's root, which is not mounted; with and without what the mounts say."""
    top = machine.v1("/") if version == 1 else machine.v2("/")
    machine.process(cgroup=f"{line}\n", self_=f"{line}\n")
    assert machine.of().path == machine.of("self").path == top
    machine.process(self_="0::/docker/1a/else\n", mountinfo=f"31 23 0:28 /docker/1a {top} rw - cgroup cgroup rw\n")
    assert machine.of().path == top
    below = machine.v1("/b") if version == 1 else machine.v2("/b")
    machine.process(cgroup=f"{line}/b\n")
    assert machine.of().path == below


@pytest.mark.parametrize("line", ["0::/../other", "0::/docker/2b", "0::/docker/1abc", "0::/docker"])
def test_another_containers_cgroup_is_not_taken_for_ones_own(machine: Machine, line: str) -> None:
    """What is mounted is the reader's; the other's lies elsewhere, also where a folder happens to have its name."""
    machine.v2("/")
    machine.v2("/bc")
    write_tree(machine.mounts.parent / "other", V2_LEAF)
    mountinfo = f"31 23 0:28 /docker/1a {machine.mounts} rw - cgroup2 cgroup rw\n"
    machine.process(cgroup=f"{line}\n", self_="0::/docker/1a\n", mountinfo=mountinfo)
    with pytest.raises(host.UnreadableError, match="cannot be seen under"):
        machine.of()


@pytest.mark.parametrize(
    ("cgroup", "reason"),
    [
        ("0::/gone (deleted)\n", "was removed"),
        ("7:cpu:/a\n", "no cgroup whose memory controller"),
        ("", "no cgroup whose memory controller"),
        ("nonsense\n", "no cgroup whose memory controller"),
        (None, "no such process"),
    ],
)
def test_what_cannot_be_found_is_told_with_the_reason(machine: Machine, cgroup: str | None, reason: str) -> None:
    """As an UnreadableError."""
    machine.v2("/")
    machine.process(cgroup=cgroup, self_=cgroup or "")
    with pytest.raises(host.UnreadableError, match=reason):
        machine.of()


def test_a_table_in_which_the_reader_is_not_tells_of_the_cgroup(machine: Machine) -> None:
    """Another machine's, mounted here: what is missing is the cgroup, not the process."""
    machine.v2("/")
    machine.process(cgroup="0::/elsewhere\n")
    for name in ("mountinfo", "cgroup"):
        (machine.proc / "self" / name).unlink()
    with pytest.raises(host.UnreadableError, match="cannot be seen under"):
        machine.of()


def test_a_cgroup_that_goes_away_is_told(machine: Machine) -> None:
    """Between finding and reading it; as is one without the controller."""
    machine.process(cgroup="0::/a\n")
    leaf = machine.v2("/a")
    cgroup = machine.of()
    for file in leaf.iterdir():
        file.unlink()
    with pytest.raises(host.UnreadableError, match="has no memory controller"):
        cgroup.read()
    leaf.rmdir()
    with pytest.raises(host.UnreadableError, match="was removed"):
        cgroup.read()


def test_a_file_that_cannot_be_read_is_left_out(machine: Machine) -> None:
    """A kernel without pressure figures answers with an error; here a folder stands for that."""
    machine.process(cgroup="0::/a\n")
    leaf = machine.v2("/a")
    (leaf / "memory.pressure").unlink()
    (leaf / "memory.pressure").mkdir()
    (leaf / "memory.current").write_text("-5\n")
    figures = machine.of().read()
    assert set(V2_FIGURES) - set(figures) == {"psi_some_us", "psi_full_us", "usage"}


TEXTS = st.one_of(
    st.binary(max_size=60),
    st.integers(-5, 1 << 80).map(lambda value: b"%d\n" % value),
    st.lists(st.integers(-5, 1 << 80), max_size=3).map(
        lambda them: b"".join(b"anon %d\nrss %d\n" % (n, n) for n in them)
    ),
    st.sampled_from([text.encode() for text in (*V2_LEAF.values(), *V1_LEAF.values())]),
    st.just(b"max\n"),
)


@settings(deadline=None)
@given(
    texts=st.lists(TEXTS, min_size=11, max_size=11),
    membership=st.one_of(TEXTS, st.just(b"7:memory:/a\n"), st.just(b"0::/a\n")),
)
def test_whatever_the_files_say_there_are_sound_figures_or_a_reason(
    tmp_path_factory: pytest.TempPathFactory, texts: list[bytes], membership: bytes
) -> None:
    """Known names, nothing below zero; or UnreadableError."""
    folder = tmp_path_factory.getbasetemp() / "cgroups"
    names = [f"cgroup/a/{name}" for name in V2_LEAF] + [f"cgroup/memory/a/{name}" for name in list(V1_LEAF)[:4]]
    write_tree(folder, dict(zip(names, texts, strict=True)))
    write_tree(folder / "proc", {"77/cgroup": membership, "self/cgroup": b"0::/\n", "self/mountinfo": texts[0]})
    with contextlib.suppress(host.UnreadableError):
        figures = host.Cgroup.of(77, folder / "proc", folder / "cgroup").read()
        assert set(figures) <= set(SCOPES["cgroup"])
        assert all(0 <= value < 1 << 64 for value in figures.values())


def test_this_machines_own_cgroup_is_read() -> None:
    """Whatever kind it is of; the figures are those in its files."""
    cgroup = host.Cgroup.of()
    figures = cgroup.read()
    assert figures["anon"] > 0
    if cgroup.version == 1:
        assert figures["usage"] == pytest.approx(int((cgroup.path / "memory.usage_in_bytes").read_text()), rel=0.2)


@pytest.fixture
def group() -> Iterator[Path]:
    """A real cgroup with a limit of 300 MiB, which can hold a process."""
    own = host.Cgroup.of()
    parent = own.path if own.version == 1 else own.top
    made = parent / f"vllm-kvfix-test-{os.getpid()}"
    limit = made / ("memory.limit_in_bytes" if own.version == 1 else "memory.max")
    try:
        made.mkdir()
        limit.write_text(str(300 * MIB))
    except OSError as error:
        with contextlib.suppress(OSError):
            made.rmdir()
        pytest.skip(f"no cgroup with a limit can be made on this machine: {error}")
    yield made
    made.rmdir()


def test_a_real_cgroups_usage_and_limit_are_those_of_the_kernel(group: Path) -> None:
    """A process with 100 MiB of anonymous and 20 of shared memory; a cgroup below has the same limit."""
    with child() as other:
        (group / "cgroup.procs").write_text(str(other.pid))
        other.run(f"private({100 * MIB}); memfd({20 * MIB})")
        cgroup = host.Cgroup.of(other.pid)
        assert cgroup.path == group
        figures = cgroup.read()
        usage = group / ("memory.usage_in_bytes" if cgroup.version == 1 else "memory.current")
        assert figures["usage"] == int(usage.read_text())
        assert figures["limit"] == 300 * MIB
        assert figures["anon"] == pytest.approx(100 * MIB, abs=2 * MIB)
        assert figures["shmem"] == pytest.approx(20 * MIB, abs=MIB)
        assert figures["file"] >= figures["shmem"]
        assert figures["anon"] + figures["file"] + figures["kernel"] == pytest.approx(figures["usage"], abs=4 * MIB)
        assert figures["oom_kill_count"] == 0
        (group / "sub").mkdir()
        (group / "sub" / "cgroup.procs").write_text(str(other.pid))
        below = host.Cgroup.of(other.pid)
        limit = below.read()["limit"]
    (group / "sub").rmdir()
    assert limit == 300 * MIB
