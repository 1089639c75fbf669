# SPDX-License-Identifier: Apache-2.0
"""guard: version x source x mode -> decision and reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support import copy_fake
from vllm_kvfix import guard, upstream
from vllm_kvfix.backports import BACKPORTS
from vllm_kvfix.guard import Mode, State

if TYPE_CHECKING:
    from pathlib import Path

(BACKPORT,) = BACKPORTS
MANAGERS = "v1/core/single_type_kv_cache_manager.py"
STOCK: dict[str, tuple[str, str]] = {}
GATED = {MANAGERS: ("self.new_block_ids: list[int] = []", "self.new_block_ids = self._record_new_block_ids = []")}
SECOND_WRITER = {MANAGERS: ("return blocks", "self.new_block_ids = list(self.new_block_ids); return blocks")}
OTHER_GUARD = {MANAGERS: ("if type(self.kv_cache_spec) is FullAttentionSpec:", "if self.kv_cache_spec:")}


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the digests of the fake pass for known ones."""
    monkeypatch.setattr(upstream, "unknown_targets", lambda *_: [])


def decide(
    folder: Path, version: str | None, edits: dict[str, tuple[str, str]], mode: Mode | None = Mode.AUTO
) -> guard.Decision:
    """The decision on a copy of the fake."""
    root = copy_fake(folder, version, edits) / "vllm"
    installation = upstream.Installation(root, upstream.read_version(root))
    return guard.decide(BACKPORT, installation, upstream.Sources(root), mode)


IN_RANGE: list[str | None] = [
    "0.17.1",
    "0.18.0",
    "0.25.1",
    "0.25.1+cu129",
    "0.25.2.dev3+gabc",
    "0.18.1.dev3",
    "0.26.0.dev7",
    "0.26.0rc1",
]
SAYS_NOTHING: list[str | None] = [None, "0.1.dev1+gabcdef", "unknown", "1.0.0.dev0"]


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("version", IN_RANGE + SAYS_NOTHING)
def test_known_source_and_fitting_version_is_applied(tmp_path: Path, version: str | None) -> None:
    """With every digest known, a version in range or one that says nothing gives APPLY."""
    assert decide(tmp_path, version, STOCK) == guard.Decision(
        State.APPLY, affected=True, reason="version and source are known"
    )


@pytest.mark.parametrize("version", IN_RANGE + SAYS_NOTHING)
def test_unknown_source_is_refused_whatever_the_version(tmp_path: Path, version: str | None) -> None:
    """Without known digests nothing is applied, and the reason names a target and the way out."""
    decision = decide(tmp_path, version, STOCK)
    assert (decision.state, decision.affected) == (State.REFUSED, None)
    assert "SingleTypeKVCacheManager.__init__ (source " in decision.reason
    assert "VLLM_KVFIX_PATCH=force" in decision.next_step


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("version", "words"),
    [("0.26.0", "should carry the fix"), ("0.32.0", "should carry the fix"), ("0.17.0", "should be older")],
)
def test_version_and_source_that_disagree_are_refused(tmp_path: Path, version: str, words: str) -> None:
    """A version outside the range with a source that leaks is refused, even with known digests."""
    decision = decide(tmp_path, version, STOCK)
    assert (decision.state, decision.affected) == (State.REFUSED, None)
    assert words in decision.reason


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("version", ["0.25.1", "0.26.0", "0.32.0", None])
def test_a_source_with_the_gate_is_not_affected(tmp_path: Path, version: str | None) -> None:
    """Upstream's own gate, by release or cherry-picked, means that there is nothing to do."""
    decision = decide(tmp_path, version, GATED)
    assert (decision.state, decision.affected) == (State.NOT_AFFECTED, False)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("mode", "state"),
    [(Mode.OFF, State.OFF), (None, State.REFUSED), (Mode.AUTO, State.APPLY), (Mode.FORCE, State.APPLY)],
)
def test_the_mode_decides_where_the_source_is_known(tmp_path: Path, mode: Mode | None, state: State) -> None:
    """Off is off, a word that is no mode applies nothing, auto and force apply; affected all the same."""
    decision = decide(tmp_path, "0.25.1", STOCK, mode)
    assert (decision.state, decision.affected) == (state, True)


def test_force_applies_an_unknown_source_with_every_feature(tmp_path: Path) -> None:
    """Force applies to a source of unknown digest that has all that the back-port relies on."""
    assert decide(tmp_path, "0.25.1", STOCK, Mode.FORCE).state is State.APPLY


@pytest.mark.parametrize(
    ("edits", "words"),
    [
        (SECOND_WRITER, "only __init__ and take_new_block_ids assign"),
        (OTHER_GUARD, "one and the same test of the spec's type"),
        ({MANAGERS: ("def take_new_block_ids", "def take_ids")}, "only __init__ and take_new_block_ids assign"),
        ({MANAGERS: ("self.block_pool = block_pool", "self.pool = block_pool")}, "sets new_block_ids, kv_cache_spec"),
        ({MANAGERS: ("def allocate_new_blocks", "def allocate")}, "allocate_new_blocks records"),
        (
            {"v1/core/kv_cache_coordinator.py": ("self.single_type_managers =", "self.managers =")},
            "sets single_type_managers",
        ),
        ({"v1/core/kv_cache_manager.py": ("self.coordinator =", "self.inner =")}, "sets coordinator"),
        (
            {"v1/core/sched/scheduler.py": ("(self.kv_cache_manager.take_new_block_ids() or None)", "[]")},
            "drains only where needs_kv_cache_zeroing",
        ),
        (
            {"v1/kv_cache_interface.py": ("def needs_kv_cache_zeroing", "def zeroing")},
            "needs_kv_cache_zeroing is there",
        ),
    ],
)
def test_force_names_the_feature_that_is_missing(tmp_path: Path, edits: dict[str, tuple[str, str]], words: str) -> None:
    """Each feature that is taken away is refused by name under force."""
    decision = decide(tmp_path, "0.25.1", edits, Mode.FORCE)
    assert (decision.state, decision.affected) == (State.REFUSED, None)
    assert words in decision.reason


@pytest.mark.parametrize("name", ["v1/core/single_type_kv_cache_manager.py", "v1/core/sched/scheduler.py"])
@pytest.mark.parametrize("damage", ["remove", "break"])
def test_a_source_that_cannot_be_read_is_refused(tmp_path: Path, name: str, damage: str) -> None:
    """A missing or unparsable file (an install without sources) applies nothing."""
    root = copy_fake(tmp_path) / "vllm"
    if damage == "remove":
        (root / name).unlink()
    else:
        (root / name).write_text("def broken(:\n")
    for mode in (Mode.AUTO, Mode.FORCE):
        decision = guard.decide(BACKPORT, upstream.Installation(root, "0.25.1"), upstream.Sources(root), mode)
        assert (decision.state, decision.affected) == (State.REFUSED, None)


def test_no_vllm_is_absent() -> None:
    """Without a vLLM there is nothing to decide, and the next step says so."""
    decision = guard.decide(BACKPORT, None, None, Mode.AUTO)
    assert decision.state is State.ABSENT
    assert "Python that runs vLLM" in decision.next_step


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        (None, Mode.AUTO), ("", Mode.AUTO), ("auto", Mode.AUTO), (" Force ", Mode.FORCE), ("OFF", Mode.OFF),
        ("0", None), ("yes", None),
    ],
)  # fmt: skip
def test_the_variable_is_read_kindly_but_not_guessed(text: str | None, mode: Mode | None) -> None:
    """Case and blanks do not matter; a word that is no mode is none."""
    assert guard.parse_mode(text) is mode
