# SPDX-License-Identifier: Apache-2.0
"""vllm_kvfix.host.own and .budget: what a process tells of itself, and how often it may be asked."""

from __future__ import annotations

import gc
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import run_python
from vllm_kvfix import host
from vllm_kvfix.events import SCOPES
from vllm_kvfix.host import own

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LIBC = "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.malloc.restype = ctypes.c_void_p\n"


@pytest.fixture
def fresh() -> Iterator[None]:
    """Whose malloc it is is found out anew, before and after."""
    own._mallinfo2.cache_clear()
    yield
    own._mallinfo2.cache_clear()


def test_malloc_tells_what_is_in_use_mapped_and_retained() -> None:
    """3 GiB in one mapped piece (more than 32 bits hold), 20 MB in small ones of a thread; then half of these freed."""
    code = f"""{LIBC}
import threading
from vllm_kvfix import host
first = host.malloc()
assert set(first) == {set(SCOPES["malloc"])}
big = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(3 << 30)))
pieces = []
thread = threading.Thread(target=lambda: pieces.extend(libc.malloc(2000) for _ in range(10_000)))
thread.start()
thread.join()
second = host.malloc()
assert abs(second["mapped"] - first["mapped"] - (3 << 30)) < 1 << 20, (first, second)
assert abs(second["in_use"] - first["in_use"] - (3 << 30) - 20_000_000) < 1 << 20, (first, second)
for piece in pieces[::2]:
    libc.free(ctypes.c_void_p(piece))
third = host.malloc()
assert abs(third["retained"] - second["retained"] - 10_000_000) < 1 << 20, (second, third)
assert abs(second["in_use"] - third["in_use"] - 10_000_000) < 1 << 20, (second, third)
libc.free(big)
assert host.malloc()["mapped"] < 1 << 30
"""
    run_python(code)


@pytest.mark.parametrize(
    "name", ["libtcmalloc_minimal.so.4", "libjemalloc.so.2", "libmimalloc.so", "ld-musl-x86_64.so.1"]
)
@pytest.mark.usefixtures("fresh")
def test_another_malloc_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The figures of glibc would say next to nothing of it."""
    monkeypatch.setattr(own, "_owner", lambda *_: name)
    with pytest.raises(
        host.UnreadableError, match=rf"^malloc is {name.partition('.')[0]}'s, which mallinfo2 knows nothing"
    ):
        host.malloc()


@pytest.mark.usefixtures("fresh")
def test_an_old_glibc_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mallinfo counts in 32 bits, which is wrong rather than missing."""

    class Old:
        """A C library without the function."""

    monkeypatch.setattr("ctypes.CDLL", lambda _: Old())
    monkeypatch.setattr(own, "_owner", lambda *_: "libc-2.31.so")
    with pytest.raises(host.UnreadableError, match=r"no mallinfo2, which came with 2\.33"):
        host.malloc()


@pytest.mark.usefixtures("fresh")
def test_a_python_without_ctypes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in some slim builds."""
    monkeypatch.setitem(sys.modules, "ctypes", None)
    with pytest.raises(host.UnreadableError, match="no ctypes"):
        host.malloc()


def test_a_preloaded_malloc_is_noticed(tmp_path: Path) -> None:
    """One that is really in front of glibc's, by LD_PRELOAD."""
    if not (compiler := shutil.which("cc")):
        pytest.skip("there is no C compiler to make another malloc with")
    source, library = tmp_path / "my.c", tmp_path / "libmymalloc.so"
    source.write_text(
        "#include <stddef.h>\nvoid *__libc_malloc(size_t);\nvoid *malloc(size_t n) {return __libc_malloc(n);}"
    )
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    code = (
        "from vllm_kvfix import host\ntry:\n    host.malloc()\nexcept host.UnreadableError as error:\n    print(error)"
    )
    said = run_python(code, environ={"LD_PRELOAD": str(library)}).stdout
    assert said.strip() == "malloc is libmymalloc's, which mallinfo2 knows nothing of"


@pytest.mark.parametrize(
    ("maps", "name"),
    [
        ("7f00-7f01 r-xp 0 00:00 1    /usr/lib/libtcmalloc_minimal.so.4\n", "libtcmalloc_minimal"),
        ("7f00-7f01 r-xp 0 00:00 1    /opt/a b/libjemalloc.so.2 (deleted)\n", "libjemalloc"),
        ("7f00-7f01 r-xp 0 00:00 1    /usr/lib/libc.so.6\n", ""),
    ],
)
def test_an_allocator_is_known_by_its_file(maps: str, name: str) -> None:
    """Where the linker only says that malloc is the program's own."""
    assert own._allocator_in(maps.encode()) == name


def test_python_counts_blocks_generations_and_collections() -> None:
    """Tuples are blocks; collecting shows, and freezing is not asked about, for it takes too long."""
    code = f"""
import gc
import shutil
import subprocess
from vllm_kvfix import host
first = host.python()
assert set(first) == {set(SCOPES["python"])}
kept = [(n,) for n in range(1000, 100_000)]
second = host.python()
assert 150_000 < second["blocks_count"] - first["blocks_count"] < 250_000, (first, second)
gc.collect()
gc.get_freeze_count = None
third = host.python()
assert third["collections_count"] > second["collections_count"]
"""
    run_python(code)


def test_generations_are_told_youngest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the collector counts them."""
    monkeypatch.setattr(gc, "get_count", lambda: (7, 8, 9))
    assert [host.python()[f"gen{number}_count"] for number in range(3)] == [7, 8, 9]


@pytest.mark.parametrize("missing", ["getallocatedblocks", "get_count", "get_stats"])
def test_another_python_leaves_out_what_it_does_not_count(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """PyPy lacks most of it; the rest is still told."""
    monkeypatch.delattr(sys if missing == "getallocatedblocks" else gc, missing)
    figures = host.python()
    assert set(figures) < set(SCOPES["python"])
    assert len(figures) == len(SCOPES["python"]) - (3 if missing == "get_count" else 1)


class Clock:
    """A clock that is set by hand, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """What it shows."""
        return self.now


def spend(budget: host.Budget, clock: Clock, seconds: float) -> None:
    """Make a read that takes so long."""
    with budget.spending():
        clock.now += seconds


def waits(budget: host.Budget, clock: Clock) -> float:
    """Seconds until the next read is due, found by bisection."""
    began, low, high = clock.now, 0.0, 1e9
    for _ in range(80):
        clock.now = began + (low + high) / 2
        low, high = (low, clock.now - began) if budget.due() else (clock.now - began, high)
    clock.now = began
    return high


@pytest.mark.parametrize(
    ("spent", "rest"),
    [(0.0, 5.0), (0.001, 5.0), (0.005, 5.0), (0.02, 20.0), (0.05, 50.0), (0.06, 120.0), (4.5, 9000.0)],
)
def test_a_read_is_paid_for_before_the_next(spent: float, rest: float) -> None:
    """By its share of the time, by no less than the least, and twice where it took over 50 ms."""
    clock = Clock()
    budget = host.Budget(share=0.001, least_s=5.0, clock=clock)
    assert budget.due()
    clock.now = 0.0  # where sums of floating point are exact enough
    spend(budget, clock, spent)
    assert not budget.due()
    assert waits(budget, clock) == pytest.approx(rest)


@settings(deadline=None)
@given(spent=st.lists(st.floats(0, 10), min_size=1, max_size=30), share=st.floats(0.0001, 0.5))
def test_reads_never_take_more_than_their_share(spent: list[float], share: float) -> None:
    """Over any number of reads, each made as soon as it is due, and its wait."""
    clock = Clock()
    began = clock.now
    budget = host.Budget(share=share, least_s=0.0, clock=clock)
    for seconds in spent:
        spend(budget, clock, seconds)
        clock.now += waits(budget, clock)
    assert sum(spent) <= share * (clock.now - began) * (1 + 1e-6) + 1e-6


def test_a_read_that_fails_is_paid_for_as_well() -> None:
    """Else a process that cannot be read would be tried all the time."""
    clock = Clock()
    budget = host.Budget(least_s=1.0, clock=clock)

    def fail() -> Any:
        with budget.spending():
            clock.now += 0.01
            raise host.UnreadableError("no")

    with pytest.raises(host.UnreadableError):
        fail()
    assert waits(budget, clock) == pytest.approx(10.0)


def test_pauses_within_a_read_cost_nothing_by_another_meter() -> None:
    """A second of pauses and 10 ms of work: 20 seconds, doubled for the others' sake who were held up."""
    clock, meter = Clock(), Clock()
    budget = host.Budget(clock=clock, meter=meter)
    with budget.spending():
        clock.now += 1.0
        meter.now += 0.01
    assert waits(budget, clock) == pytest.approx(20.0)
