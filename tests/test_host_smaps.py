# SPDX-License-Identifier: Apache-2.0
"""vllm_kvfix.host.smaps: every page of a process is in one kind of memory, and in the right one."""
# ruff: noqa: S108  # the paths are names of mappings, and no files

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.host_support import GIB, KIB, MIB, TIB, Child, child, mapping_text, stat_text, write_tree
from tests.support import run_python
from vllm_kvfix import host
from vllm_kvfix.events import CATEGORIES, SCOPES
from vllm_kvfix.host import mappings

if TYPE_CHECKING:
    from collections.abc import Iterator

HEAP = mappings.HEAP
AREA = 0x7F00_0000_0000
UNRESERVED = "rd wr mr mw me nr"
NEVER_HUGE = "rd wr mr mw me ac nh"


def read(folder: Path, *texts: str | bytes, chunk: int = 4096) -> dict[str, int]:
    """What smaps() makes of such mappings."""
    whole = b"".join(text if isinstance(text, bytes) else text.encode() for text in texts)
    return host.smaps("self", write_tree(folder, {"self/smaps": whole}), chunk=chunk)


def categories(figures: dict[str, int]) -> dict[str, int]:
    """The categories in which there is anything."""
    return {name: figures[name] for name in CATEGORIES if figures[name]}


@pytest.mark.parametrize(
    ("path", "access", "category"),
    [
        ("[heap]", "rw-p", "heap"),
        ("[anon: glibc: malloc arena]", "rw-p", "heap"),
        ("[stack]", "rw-p", "stacks"),
        ("[stack:123]", "rw-p", "stacks"),
        ("[anon: glibc: pthread stack: 123]", "rw-p", "stacks"),
        ("/dev/shm/psm_1a2b3c", "rw-s", "shared_memory"),
        ("/dev/shm/sem.mp-x (deleted)", "rw-s", "shared_memory"),
        ("/memfd:a name (deleted)", "rw-s", "shared_memory"),
        ("/SYSV00000000 (deleted)", "rw-s", "shared_memory"),
        ("/dev/zero (deleted)", "rw-s", "shared_memory"),
        ("[anon_shmem:weights]", "rw-s", "shared_memory"),
        ("/anon_hugepage (deleted)", "rw-s", "shared_memory"),
        ("", "rw-s", "shared_memory"),
        ("/usr/lib/libtorch.so", "r-xp", "files"),
        ("/models/a b/model.safetensors", "r--s", "files"),
        ("/tmp/gone (deleted)", "rw-s", "files"),
        ("/tmp/new\\012line [heap]", "r--p", "files"),
        ("/dev/hugepages/x", "rw-s", "files"),
        ("/tmp/vllm-kvfix-0/9-ab.ring", "rw-s", "ring"),
        ("/dev/shm/9-ab.ring", "rw-s", "ring"),
        ("/dev/shm/9-ab.ring (deleted)", "rw-s", "ring"),
        ("/tmp/9-ab.ring.so", "r--p", "files"),
        ("/dev/nvidia0", "rw-s", "driver"),
        ("/dev/nvidiactl", "rw-s", "driver"),
        ("/dev/nvidia-uvm", "rw-s", "driver"),
        ("/dev/kfd", "rw-s", "driver"),
        ("/dev/dri/renderD128", "rw-s", "driver"),
        ("/dev/davinci_manager", "rw-s", "driver"),
        ("/dev/infiniband/uverbs0", "rw-s", "driver"),
        ("anon_inode:[io_uring]", "rw-s", "driver"),
        ("anon_inode:i915.gem", "rw-s", "driver"),
        ("[vdso]", "r-xp", "rest"),
        ("[vvar_vclock]", "r--p", "rest"),
        ("[vsyscall]", "--xp", "rest"),
        ("[uprobes]", "--xp", "rest"),
        ("socket:[1234]", "rw-s", "rest"),
        ("/anon_hugepage (deleted)", "rw-p", "anonymous"),
        ("/dev/zero", "rw-p", "anonymous"),
        ("[anon:v8]", "rw-p", "anonymous"),
        ("", "rw-p", "anonymous"),
        ("", "rwxp", "anonymous"),
        ("", "r--p", "anonymous"),
        ("", "---p", "anonymous"),
    ],
)
def test_a_mapping_is_of_the_kind_that_its_name_and_access_say(
    tmp_path: Path, path: str, access: str, category: str
) -> None:
    """All of its RSS goes to that category and to no other."""
    figures = read(tmp_path, mapping_text(AREA + MIB, 8 * MIB, access, path, rss=3 * MIB))
    assert categories(figures) == {category: 3 * MIB}
    assert figures["rss"] == figures["pss"] == figures["uss"] == 3 * MIB


def heap(start: int, used: int, rss: int, flags: str = UNRESERVED) -> str:
    """A thread's heap as glibc lays it out."""
    return mapping_text(start, used, rss=rss, flags=flags) + mapping_text(start + used, HEAP - used, "---p", flags="nr")


def stack(start: int, size: int, rss: int, flags: str = NEVER_HUGE, guard: int = 4 * KIB) -> str:
    """A thread's stack as glibc lays it out; ``size`` with the guard."""
    return mapping_text(start, guard, "---p", flags="mr mw me") + mapping_text(
        start + guard, size - guard, rss=rss, flags=flags
    )


def test_heaps_of_threads_are_heap(tmp_path: Path) -> None:
    """Heaps that have room, are nearly full, follow each other, are full, or are joined with the full one below."""
    at = [AREA + HEAP * number for number in range(20)]
    text = heap(at[0], 2 * MIB, MIB) + heap(at[1], HEAP - 4 * KIB, 50 * MIB) + heap(at[2], 4 * MIB, 4 * MIB)
    text += mapping_text(at[5], HEAP, rss=60 * MIB, flags=UNRESERVED)
    text += mapping_text(at[7], 2 * HEAP + MIB, rss=129 * MIB, flags=UNRESERVED)
    text += mapping_text(at[9] + MIB, HEAP - MIB, "---p", flags="nr")
    assert categories(read(tmp_path, text)) == {"heap": 244 * MIB}


def test_a_heap_that_was_parted_by_a_fork_is_heap(tmp_path: Path) -> None:
    """What was there before the fork, what came later, and freed pages in the unused rest all count."""
    text = mapping_text(AREA, 2 * MIB, rss=2 * MIB, flags=UNRESERVED)
    text += mapping_text(AREA + 2 * MIB, MIB, rss=MIB, flags=UNRESERVED)
    text += mapping_text(AREA + 3 * MIB, HEAP - 3 * MIB, "---p", rss=MIB, flags="nr")
    assert categories(read(tmp_path, text)) == {"heap": 4 * MIB}


def test_a_full_heap_below_a_stack_is_heap(tmp_path: Path) -> None:
    """The guard of the stack is no unused rest of the heap, and takes nothing from it."""
    text = mapping_text(AREA, HEAP, rss=60 * MIB, flags=UNRESERVED) + stack(AREA + HEAP, 8 * MIB, MIB)
    assert categories(read(tmp_path, text)) == {"heap": 60 * MIB, "stacks": MIB}


def test_each_figure_is_of_the_lines_that_it_should_be(tmp_path: Path) -> None:
    """Private pages are USS, clean, dirty or huge; nothing but "Pss" and "Swap" is PSS and swap."""
    lines = ["7f00-8f00 rw-p 00000000 00:00 0 ", "Rss: 1 kB", "Pss: 2 kB", "Pss_Dirty: 4 kB", "Shared_Clean: 8 kB"]
    lines += [
        "Private_Clean: 16 kB",
        "Private_Dirty: 32 kB",
        "Private_Hugetlb: 64 kB",
        "Swap: 128 kB",
        "SwapPss: 256 kB",
    ]
    figures = read(tmp_path, "".join(f"{line}\n" for line in [*lines, *lines]))
    names = ("rss", "pss", "uss", "swap")
    assert {name: figures[name] // KIB for name in names} == {"rss": 2, "pss": 4, "uss": 224, "swap": 256}


def test_a_heap_right_behind_a_guard_is_no_stack(tmp_path: Path) -> None:
    """Stacks are never unreserved."""
    text = mapping_text(AREA - 4 * KIB, 4 * KIB, "---p") + heap(AREA, 2 * MIB, MIB)
    assert categories(read(tmp_path, text)) == {"heap": MIB}


def test_heaps_are_found_where_nothing_is_unreserved(tmp_path: Path) -> None:
    """With strict overcommit the kernel reserves heaps as well; the unused rest tells them all the same."""
    assert categories(read(tmp_path, heap(AREA, 2 * MIB, MIB, flags="rd wr mr mw me ac"))) == {"heap": MIB}


@pytest.mark.parametrize(
    "text",
    [
        mapping_text(AREA, 2 * MIB, rss=MIB) + mapping_text(AREA + 2 * MIB, HEAP, "---p"),
        mapping_text(AREA, 2 * MIB, rss=MIB) + mapping_text(AREA + 3 * MIB, HEAP - 3 * MIB, "---p"),
        mapping_text(AREA + MIB, MIB, rss=MIB) + mapping_text(AREA + 2 * MIB, HEAP - 2 * MIB, "---p"),
        mapping_text(AREA, 2 * MIB, rss=MIB) + mapping_text(AREA + 2 * MIB, HEAP - 2 * MIB, "---p", "/usr/lib/x.so"),
        mapping_text(AREA, HEAP, rss=MIB),
        mapping_text(AREA + MIB, HEAP, rss=MIB, flags=UNRESERVED),
        mapping_text(AREA + MIB, HEAP - MIB, rss=MIB, flags=UNRESERVED),
    ],
    ids=["rest ends late", "a gap", "begins amidst", "rest is a file's", "full, reserved", "full, amidst", "ends full"],
)
def test_what_only_looks_like_a_heap_is_not(tmp_path: Path, text: str) -> None:
    """It is anonymous memory."""
    assert categories(read(tmp_path, text)) == {"anonymous": MIB}


def test_a_reserved_mapping_below_a_heap_is_not_heap(tmp_path: Path) -> None:
    """The kernel cannot have made one of them, since their flags differ; so neither do we."""
    text = mapping_text(AREA, HEAP, rss=40 * MIB) + heap(AREA + HEAP, 2 * MIB, MIB)
    assert categories(read(tmp_path, text)) == {"heap": MIB, "anonymous": 40 * MIB}


def test_stacks_of_threads_are_stacks(tmp_path: Path) -> None:
    """Those behind a guard, of any size, and on new kernels those whose guard is no mapping of its own."""
    text = stack(AREA + MIB, 8 * MIB, MIB) + stack(AREA + 9 * MIB, 8 * MIB, 2 * MIB)
    text += stack(AREA + 20 * MIB, 512 * MIB, 100 * MIB)
    text += stack(AREA + GIB, MIB, 64 * KIB, flags="rd wr mr mw me ac", guard=64 * KIB)
    text += mapping_text(AREA + 2 * GIB, 8 * MIB, rss=MIB, flags=NEVER_HUGE)
    assert categories(read(tmp_path, text)) == {"stacks": 104 * MIB + 64 * KIB}


def test_a_mapping_that_old_kernels_join_to_a_stack_is_anonymous(tmp_path: Path) -> None:
    """A stack of 8 MiB with 100 MiB behind it, of which 100.25 are used: what has no room there is stack."""
    text = stack(AREA + MIB, 108 * MIB + 4 * KIB, 100 * MIB + 256 * KIB, flags="rd wr mr mw me ac")
    assert categories(read(tmp_path, text)) == {"stacks": 256 * KIB, "anonymous": 100 * MIB}


@pytest.mark.parametrize(
    "text",
    [
        mapping_text(AREA, 4 * KIB, "---p") + mapping_text(AREA + 8 * KIB, 8 * MIB, rss=MIB),
        mapping_text(AREA + KIB, 2 * MIB, "---p") + mapping_text(AREA + KIB + 2 * MIB, 8 * MIB, rss=MIB),
        mapping_text(AREA, 4 * KIB, "---p", "/usr/lib/x.so") + mapping_text(AREA + 4 * KIB, 8 * MIB, rss=MIB),
        mapping_text(AREA, 4 * KIB, "---p")
        + mapping_text(AREA + 4 * KIB, MIB, rss=KIB * 512)
        + mapping_text(AREA + 4 * KIB + MIB, MIB, "rwxp", rss=KIB * 512),
    ],
    ids=["a gap", "far too large a guard", "the guard is a file's", "behind the stack"],
)
def test_what_only_looks_like_a_stack_is_not(tmp_path: Path, text: str) -> None:
    """What is not directly behind a guard is anonymous memory."""
    assert read(tmp_path, text)["anonymous"] >= 512 * KIB


def test_a_mapping_behind_the_rest_of_a_heap_is_no_stack(tmp_path: Path) -> None:
    """The rest of a heap that is nearly full is as small as a guard."""
    text = heap(AREA, HEAP - 4 * KIB, MIB) + mapping_text(AREA + HEAP, 4 * MIB, rss=2 * MIB)
    assert categories(read(tmp_path, text)) == {"heap": MIB, "anonymous": 2 * MIB}


def test_terabytes_and_ten_thousands_of_mappings_are_added_up(tmp_path: Path) -> None:
    """70,000 mappings of 64 MiB each, 4.3 TiB: nothing is lost at the seams of the chunks."""
    count = 70_000
    text = b"".join(mapping_text(AREA + n * 2 * HEAP + MIB, HEAP, rss=HEAP).encode() for n in range(count))
    figures = read(tmp_path, text)
    assert figures["rss"] == figures["anonymous"] == figures["uss"] == count * HEAP > 4 * TIB


@settings(deadline=None)
@given(chunk=st.integers(1, 3000))
def test_the_size_of_chunks_changes_nothing(tmp_path_factory: pytest.TempPathFactory, chunk: int) -> None:
    """Wherever lines are torn."""
    folder = tmp_path_factory.getbasetemp() / "chunks"
    text = heap(AREA, 2 * MIB, MIB) + stack(AREA + HEAP + MIB, 8 * MIB, 8 * KIB) + mapping_text(1 << 46, MIB, rss=4096)
    figures = read(folder, text, chunk=chunk)
    assert categories(figures) == {"heap": MIB, "stacks": 8 * KIB, "anonymous": 4096}


def test_a_pause_is_made_after_each_chunk(tmp_path: Path) -> None:
    """Ten chunks of 500 bytes: ten pauses."""
    proc = write_tree(tmp_path, {"self/smaps": mapping_text(AREA, MIB).ljust(5000, "\n")})
    pauses: list[None] = []
    host.smaps("self", proc, pause=lambda: pauses.append(None), chunk=500)
    assert len(pauses) == 10


LINES = st.one_of(
    st.sampled_from(mapping_text(AREA, MIB, rss=MIB).encode().splitlines()),
    st.sampled_from([heap(AREA, MIB, MIB).encode(), stack(AREA, MIB, MIB).encode()]),
    st.binary(max_size=60),
    st.from_regex(rb"[0-9a-f]{1,18}-[0-9a-f]{1,18} [-rwxps]{4} 0+ 00:00 [0-9]{1,30} +[/\[]?\w*", fullmatch=True),
    st.from_regex(rb"(Rss|Pss|Swap|Private_Dirty|VmFlags): +-?[0-9]{1,30} (kB)?", fullmatch=True),
)


@settings(deadline=None)
@given(lines=st.lists(LINES, max_size=40))
def test_whatever_the_file_says_there_are_sound_figures_or_a_reason(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    """All the names, nothing below zero, categories that sum to the RSS; or UnreadableError."""
    try:
        figures = read(tmp_path_factory.getbasetemp() / "fuzz", b"\n".join(lines), chunk=64)
    except host.UnreadableError:
        return
    assert set(figures) == set(SCOPES["smaps"])
    assert min(figures.values()) >= 0
    assert sum(figures[name] for name in CATEGORIES) == figures["rss"]


def test_an_endless_line_is_refused(tmp_path: Path) -> None:
    """It would take memory without a bound."""
    with pytest.raises(host.UnreadableError, match="malformed"):
        read(tmp_path, b"x" * 10 * MIB)


@pytest.mark.parametrize(
    ("stat", "reason"),
    [
        (stat_text(start_time=6000), "another process took its pid"),
        (stat_text(stack=0x7FFD0000), "another program"),
        (stat_text(state="Z"), "it has ended and awaits its parent"),
        ("77 (x) S", "malformed"),
        (None, "no such process"),
    ],
    ids=["pid reused", "another program", "zombie", "malformed", "gone"],
)
def test_a_process_that_changes_while_it_is_read_is_refused(tmp_path: Path, stat: str | None, reason: str) -> None:
    """What was read until then is a part of its mappings, and maybe not its."""
    proc = write_tree(tmp_path, {"77/smaps": mapping_text(AREA, MIB, rss=MIB), "77/stat": stat_text()})
    assert host.smaps(77, proc)["rss"] == MIB

    def change() -> None:
        if stat is None:
            (proc / "77/stat").unlink()
        else:
            (proc / "77/stat").write_text(stat)

    with pytest.raises(host.UnreadableError, match=reason):
        host.smaps(77, proc, pause=change)


@pytest.fixture
def other() -> Iterator[Child]:
    """Another process."""
    with child() as made:
        yield made


def test_a_process_that_is_killed_while_it_is_read_is_refused(other: Child) -> None:
    """A real one: its mappings go at once, and the file simply ends."""
    with pytest.raises(host.UnreadableError, match=r"no such process|it has ended and awaits its parent"):
        host.smaps(other.pid, pause=other.end)


def test_a_zombie_is_refused(other: Child) -> None:
    """It has no memory, which is not the same as memory of 0 bytes."""
    other.end(wait=False)
    for read_it in (host.smaps, host.status, host.start_time):
        with pytest.raises(host.UnreadableError, match="it has ended and awaits its parent"):
            read_it(other.pid)


def test_a_thread_of_the_kernel_is_refused(tmp_path: Path) -> None:
    """Its file is empty."""
    with pytest.raises(host.UnreadableError, match="no memory of its own"):
        read(tmp_path)


def test_files_are_closed_whatever_happens(tmp_path: Path) -> None:
    """A process that asks every second must not run out of them."""
    proc = write_tree(tmp_path, {"self/smaps": mapping_text(AREA, MIB)})

    def fail() -> None:
        raise KeyError

    before = os.listdir("/proc/self/fd")  # noqa: PTH208  # numbers, no paths
    host.smaps("self", proc)
    with pytest.raises(KeyError):
        host.smaps("self", proc, pause=fail)
    assert os.listdir("/proc/self/fd") == before  # noqa: PTH208  # as above


def test_no_such_process_is_told() -> None:
    """Of a pid that no Linux gives."""
    with pytest.raises(host.UnreadableError, match="no such process"):
        host.smaps(1 << 30)


def test_another_users_process_is_refused_with_the_reason(other: Child) -> None:
    """Its status may be read by everybody, its smaps not."""
    code = f"""
import os, sys
from vllm_kvfix import host
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
pid = {other.pid if os.getuid() == 0 else 1}
assert host.status(pid)["rss"] > 0
try:
    host.smaps(pid)
except host.UnreadableError as error:
    print(error)
"""
    assert "permission denied (another user's process, or ptrace is not allowed)" in run_python(code).stdout


@pytest.mark.parametrize(
    ("line", "category"),
    [
        ("malloc({})", "heap"),
        ("in_thread(malloc, {})", "heap"),
        ("in_thread(malloc, {}, 1000)", "heap"),
        ("in_thread(malloc, 2_000_000); forked(in_thread, malloc, {})", "heap"),
        ("forked(malloc, {})", "heap"),
        ("malloc({0}, {0})", "anonymous"),
        ("private({})", "anonymous"),
        ("threading.stack_size({} + 1_000_000); in_thread(stack, {})", "stacks"),
        ("[in_thread(stack, {} // 20) for _ in range(20)]", "stacks"),
        ("memfd({})", "shared_memory"),
        ("of_file({}, '/dev/shm')", "shared_memory"),
        ("mapped(-1, {})", "shared_memory"),
        ("of_file({}, '.')", "files"),
        ("of_file({}, '/dev/shm', '.ring')", "ring"),
    ],
)
def test_what_a_real_process_takes_is_found_in_its_category(
    other: Child, tmp_path: Path, line: str, category: str
) -> None:
    """100 MiB more there, within 2 %, and less than 2 MiB in all others."""
    size = 100 * MIB
    other.run(f"os.chdir({str(tmp_path)!r}); in_thread(malloc, 100_000)")
    before = host.smaps(other.pid)
    if "forked" in line:
        other.run("forked()")
        before = host.smaps(other.pid)
    other.run(line.replace("{0}", str(size)).replace("{}", str(size)))
    after = host.smaps(other.pid)
    more = {name: after[name] - before[name] for name in CATEGORIES}
    assert more.pop(category) == pytest.approx(size, rel=0.02)
    assert max(more.values()) < 2 * MIB, more


def test_objects_of_python_are_anonymous(other: Child) -> None:
    """CPython maps arenas for them, and malloc maps a large list singly."""
    before = host.smaps(other.pid)
    other.run("held.append([(n,) for n in range(1_000_000)])")
    after = host.smaps(other.pid)
    assert 1.05 * (after["anonymous"] - before["anonymous"]) > after["rss"] - before["rss"] > 80 * MIB


def test_categories_sum_to_what_the_status_file_calls_rss(other: Child) -> None:
    """Within 1 % (the kernel adds up those counts lazily), for a process that has some of everything."""
    other.run("malloc(20_000_000); in_thread(malloc, 150_000_000); private(50_000_000); memfd(10_000_000)")
    other.run("[in_thread(stack, 1_000_000) for _ in range(20)]; of_file(5_000_000, '/dev/shm', '.ring')")
    figures, status = host.smaps(other.pid), host.status(other.pid)
    text = Path(f"/proc/{other.pid}/smaps").read_text()
    assert sum(figures[name] for name in CATEGORIES) == figures["rss"]
    assert figures["rss"] == sum(map(int, re.findall(r"^Rss: +(\d+) kB$", text, re.MULTILINE))) * KIB
    assert figures["rss"] == pytest.approx(status["rss"], rel=0.01)
    assert status["rss"] == status["anon"] + status["file"] + status["shmem"]


def test_rss_pss_uss_and_swap_are_those_of_psutil(
    other: Child, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the byte, from what the kernel said at one moment of a stopped process; right after, within 1 %.

    Others who map the same files change PSS and USS of a process all the time, even of a stopped one. Where psutil asks
    for the sums of all mappings, its PSS is not rounded down in each: up to a KiB a mapping more.
    """
    other.run("in_thread(malloc, 150_000_000); private(50_000_000); memfd(10_000_000); of_file(5_000_000, '/tmp')")
    os.kill(other.pid, signal.SIGSTOP)
    os.waitpid(other.pid, os.WUNTRACED)
    names = [f"{other.pid}/{name}" for name in ("smaps", "status", "stat", "statm")]
    write_tree(tmp_path, {name: Path("/proc", name).read_bytes() for name in [*names, "stat"]})
    live, live_psutil = host.smaps(other.pid), psutil.Process(other.pid).memory_full_info()

    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    process = psutil.Process(other.pid)
    theirs, maps = process.memory_full_info(), process.memory_maps(grouped=False)
    ours = host.smaps(other.pid, tmp_path)
    assert (ours["pss"], ours["uss"], ours["swap"]) == (theirs.pss, theirs.uss, theirs.swap)
    assert ours["rss"] == sum(mapping.rss for mapping in maps) > 200 * MIB
    assert host.status(other.pid, tmp_path)["rss"] == theirs.rss == pytest.approx(ours["rss"], rel=0.01)

    assert (live["rss"], live["swap"]) == (ours["rss"], live_psutil.swap)
    assert live["uss"] == pytest.approx(live_psutil.uss, rel=0.01)
    assert live["pss"] == pytest.approx(live_psutil.pss, rel=0.01)
