# SPDX-License-Identifier: Apache-2.0
"""deployments: which processes belong together, what each is for, and how it is called."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_kvfix.ring.layout import API_SERVER, ENGINE_CORE, ROLES, WORKER
from vllm_kvfix_sidecar.deployments import CHILD, LONGEST_NAME, describe, is_vllm, members
from vllm_kvfix_sidecar.process_table import Entry, ProcessKey

PYTHON = "/opt/venv/bin/python3.12"
SERVE = (PYTHON, "/opt/venv/bin/vllm", "serve", "some/model", "--api-key", "s3cret")
SPAWN = (
    PYTHON,
    "-c",
    "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)",
    "--multiprocessing-fork",
)


def entry(pid: int, parent: int, *argv: str, name: str = "") -> Entry:
    """A process that started at tick ``pid``."""
    return Entry(ProcessKey(pid, pid), parent, name or (argv[0].rpartition("/")[2][:15] if argv else "kthread"), argv)


def table(*entries: Entry) -> dict[int, Entry]:
    """A process table."""
    return {each.key.pid: each for each in entries}


def named(
    entries: dict[int, Entry], rings: dict[int, str] | None = None, most: int = 512
) -> dict[int, tuple[str, str]]:
    """(role, name) by pid of all members."""
    found, _ = members(entries, {ProcessKey(pid, pid): role for pid, role in (rings or {}).items()}, most)
    return {key.pid: (member.role, member.name) for key, member in found.items()}


class TestKnown:
    """Whether a process says by itself that it is vLLM's."""

    @pytest.mark.parametrize(
        "argv",
        [
            SERVE,
            ("/usr/bin/vllm", "serve", "m"),
            ("vllm", "run-batch", "-i", "x"),
            ("python", "-m", "vllm.entrypoints.openai.api_server", "--model", "m"),
            ("python3", "-u", "-X", "dev", "-m", "vllm.entrypoints.cli.main", "serve", "m"),
            ("python3", "-m", "vllm", "serve", "m"),
            ("VLLM::EngineCore",),
            ("VLLM::EngineCore_DP3   ",),
            ("VLLM::Worker_PP0_TP1", "", ""),
            ("mine::Worker_TP0",),
            ("VllmWorker-3",),
            ("ray::RayWorkerWrapper.execute_method",),
        ],
    )
    def test_servers_and_titles_are_known(self, argv: tuple[str, ...]) -> None:
        """A command that starts a server, and a title that vLLM sets, whatever its prefix."""
        assert is_vllm(entry(7, 1, *argv))

    @pytest.mark.parametrize(
        "argv",
        [
            (),
            ("sh", "-c", "vllm serve m"),
            ("grep", "VLLM::EngineCore"),
            ("pgrep", "-f", "vllm serve"),
            ("vllm", "bench", "serve"),
            ("vllm", "chat"),
            ("vllm",),
            ("python", "-m", "vllm.entrypoints.cli.main", "chat"),
            ("python", "-m", "vllm_kvfix_sidecar"),
            ("/opt/venv/bin/python", "/opt/venv/bin/vllm-kvfix", "sidecar"),
            ("/opt/venv/bin/vllm-kvfix", "serve"),
            ("python", "-c", "import vllm", "serve"),
            ("vim", "vllm", "serve"),
            ("ray::IDLE",),
            ("ray::Worker.step",),
            ("foo::bar",),
        ],
    )
    def test_what_only_speaks_of_vllm_is_not(self, argv: tuple[str, ...]) -> None:
        """Neither shells, searches and clients, nor this sidecar."""
        assert not is_vllm(entry(7, 1, *argv))

    def test_a_command_line_that_cannot_be_read_leaves_the_kernels_name(self) -> None:
        """The kernel keeps the first 15 bytes of a title."""
        assert is_vllm(entry(7, 1, name="VLLM::EngineCor"))


class TestNames:
    """Role and name."""

    @pytest.mark.parametrize(
        ("argv", "name", "role", "called"),
        [
            (("VLLM::EngineCore",), "", ENGINE_CORE, "EngineCore"),
            (("VLLM::EngineCore_DP1",), "", ENGINE_CORE, "EngineCore_DP1"),
            (("VLLM::APIServer_0",), "", API_SERVER, "APIServer_0"),
            (("VLLM::Worker_TP0",), "", WORKER, "Worker_TP0"),
            (("VllmWorker-3",), "", WORKER, "VllmWorker-3"),
            (("VLLM::DPCoordinator",), "", CHILD, "DPCoordinator"),
            (("ray::RayWorkerWrapper.execute_method",), "", WORKER, "RayWorkerWrapper"),
            (("ray::IDLE",), "", CHILD, "ray_IDLE"),
            (SERVE, "", API_SERVER, "APIServer"),
            (("/opt/vllm/vllm-rs", "frontend"), "", API_SERVER, "vllm-rs"),
            (SPAWN, "", CHILD, "spawning"),
            (
                (PYTHON, "-c", "from multiprocessing.resource_tracker import main;main(5)"),
                "",
                CHILD,
                "resource_tracker",
            ),
            ((PYTHON, "/x/torch/_inductor/compile_worker/__main__.py", "--workers=9"), "", CHILD, "compile_worker"),
            (("/usr/lib/gcc/x86_64-linux-gnu/12/cc1plus", "-quiet", "x.cpp"), "cc1plus", CHILD, "cc1plus"),
            (("ninja", "-v", "-j", "8"), "", CHILD, "ninja"),
            ((PYTHON, "tool.py", "--token=s3cret"), "", CHILD, "python3.12"),
            ((), "a b/ü=\n", CHILD, "a_b_ü__"),
        ],
    )
    def test_a_process_is_called_by_what_it_does(
        self, argv: tuple[str, ...], name: str, role: str, called: str
    ) -> None:
        """By its title, by vLLM's command, by what Python's helpers run, else by the kernel's name of the program."""
        assert describe(entry(7, 1, *argv, name=name), None, None) == (role, called)

    def test_a_ring_knows_the_role_best(self) -> None:
        """Without setproctitle, processes have no titles; a ring's role also goes before a title's."""
        assert describe(entry(7, 1, *SPAWN), None, ENGINE_CORE) == (ENGINE_CORE, "EngineCore")
        assert describe(entry(7, 1, "VLLM::Worker_TP0"), None, ENGINE_CORE) == (ENGINE_CORE, "Worker_TP0")

    @pytest.mark.parametrize("argv", [SERVE, ("VLLM::EngineCore",)])
    def test_a_fork_is_no_second_one_of_its_kind(self, argv: tuple[str, ...]) -> None:
        """Workers and compilers begin as forks: until it calls itself otherwise, a fork has its parent's title."""
        above = entry(7, 1, *argv)
        assert describe(entry(8, 7, *argv), above, None) == (CHILD, "fork")
        assert describe(entry(8, 7, *argv), above, WORKER) == (WORKER, "Worker")

    @given(st.text(), st.lists(st.text(min_size=1), max_size=4), st.sampled_from([None, *ROLES]))
    def test_no_argument_gets_into_a_name(self, name: str, arguments: list[str], ring: str | None) -> None:
        """Whatever the arguments behind a program's own name: the name stays short, and the same without them."""
        secret = [f"KEY{argument}" for argument in arguments]
        role, called = describe(entry(7, 1, "/bin/tool", *secret, name=name), None, ring)
        assert role in {*ROLES, CHILD}
        assert 0 < len(called) <= LONGEST_NAME
        assert (role, called) == describe(entry(7, 1, "/bin/tool", name=name), None, ring)


class TestMembers:
    """Who belongs to a deployment."""

    def test_a_deployment_is_the_server_and_all_below_it(self) -> None:
        """From any of them up to the outermost server, not to its shell, and down to the compilers' compilers."""
        entries = table(
            entry(1, 0, "/sbin/init"),
            entry(10, 1, "sh", "-c", "vllm serve m"),
            entry(11, 10, *SERVE),
            entry(12, 11, "VLLM::EngineCore"),
            entry(13, 12, "VLLM::Worker_TP0"),
            entry(14, 13, "ninja"),
            entry(15, 14, "sh", "-c", "c++"),
            entry(16, 15, "cc1plus"),
            entry(20, 10, "sleep", "9"),
            entry(21, 1, "cc1plus"),
        )
        found, left_out = members(entries, {}, 512)
        assert sorted(key.pid for key in found) == [11, 12, 13, 14, 15, 16]
        assert {member.root.pid for member in found.values()} == {11}
        assert left_out == 0

    def test_deployments_beside_each_other_are_two(self) -> None:
        """Each has its own root, and none is in both."""
        entries = table(
            entry(1, 0, "python3", "supervisor.py"),
            entry(11, 1, *SERVE),
            entry(12, 11, "VLLM::EngineCore"),
            entry(21, 1, *SERVE),
            entry(22, 21, "VLLM::EngineCore"),
        )
        found, _ = members(entries, {}, 512)
        assert {key.pid: member.root.pid for key, member in found.items()} == {11: 11, 12: 11, 21: 21, 22: 21}

    def test_the_launcher_of_several_servers_is_none(self) -> None:
        """Only its children are API servers."""
        entries = table(entry(11, 1, *SERVE), entry(12, 11, "VLLM::APIServer_0"), entry(13, 11, "VLLM::APIServer_1"))
        assert named(entries) == {
            11: (CHILD, "launcher"),
            12: (API_SERVER, "APIServer_0"),
            13: (API_SERVER, "APIServer_1"),
        }

    @pytest.mark.parametrize("engine", [("VLLM::EngineCore",), SPAWN, ("python3", "offline.py")])
    def test_an_offline_engine_belongs_to_the_program_that_started_it(self, engine: tuple[str, ...]) -> None:
        """It keeps the requests' texts; its engine has a title, or is still as multiprocessing starts it."""
        entries = table(entry(5, 1, "bash"), entry(11, 5, "python3", "offline.py"), entry(12, 11, *engine))
        assert named(entries, {12: ENGINE_CORE}).keys() == {11, 12}

    def test_an_engine_inside_a_program_does_not_belong_to_the_programs_parent(self) -> None:
        """A Python supervisor that starts it among others is no part of it."""
        entries = table(
            entry(5, 1, "python3", "supervisor.py"),
            entry(11, 5, "python3", "app.py"),
            entry(12, 5, "python3", "other.py"),
        )
        assert named(entries, {11: ENGINE_CORE}) == {11: (ENGINE_CORE, "EngineCore")}

    def test_an_orphan_is_its_own_root(self) -> None:
        """Its server is gone; init is not its server."""
        assert named(table(entry(1, 0, "/sbin/init"), entry(12, 1, "VLLM::EngineCore"))).keys() == {12}

    def test_at_most_so_many_are_taken_engines_first(self) -> None:
        """And it is told how many were left out."""
        crowd = [entry(100 + n, 11, "cc1plus") for n in range(50)]
        entries = table(*crowd, entry(11, 1, *SERVE), entry(300, 11, "VLLM::EngineCore"), entry(301, 11, *SPAWN))
        found, left_out = members(entries, {ProcessKey(301, 301): WORKER}, 10)
        assert [key.pid for key in found][:3] == [301, 11, 300]
        assert (len(found), left_out) == (10, 43)

    def test_a_circle_of_parents_ends(self) -> None:
        """A table that changes while it is read may show one."""
        entries = table(entry(11, 12, *SERVE), entry(12, 11, "VLLM::EngineCore"), entry(13, 13, "VLLM::Worker"))
        assert named(entries).keys() == {11, 12, 13}

    @given(st.lists(st.tuples(st.integers(0, 30), st.sampled_from([("sh",), SERVE, ("VLLM::Worker",)])), max_size=30))
    def test_whoever_has_a_vllm_process_above_belongs_to_it(self, tree: list[tuple[int, tuple[str, ...]]]) -> None:
        """In any table: exactly the processes of vLLM and all their descendants, and each has its parent's root."""
        entries = table(*(entry(n + 1, parent, *argv) for n, (parent, argv) in enumerate(tree)))
        expected = {pid for pid, each in entries.items() if is_vllm(each)}
        while more := {pid for pid, each in entries.items() if each.parent in expected} - expected:
            expected |= more
        found, _ = members(entries, {}, 512)
        assert {key.pid for key in found} == expected
        for key, member in found.items():
            assert member.root in found
            above, seen = entries[key.pid], set()
            while above.key != member.root and above.key.pid not in seen:
                seen.add(above.key.pid)
                above = entries[above.parent]
            assert above.key == member.root
