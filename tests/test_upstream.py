# SPDX-License-Identifier: Apache-2.0
"""upstream: what is said of vLLM's releases is so in their released sources."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import digests, releases
from tests.support import copy_fake
from vllm_kvfix import guard, upstream
from vllm_kvfix.backports import BACKPORTS

if TYPE_CHECKING:
    from pathlib import Path

    from tests.releases import Release


(BACKPORT,) = BACKPORTS


def installed(release: str) -> tuple[upstream.Installation, upstream.Sources]:
    """A released vLLM's sources as an installation."""
    root = releases.sources(release) / upstream.PACKAGE
    return upstream.Installation(root, upstream.read_version(root)), upstream.Sources(root)


def test_the_affected_releases_are_those_of_the_table() -> None:
    """The product's list of affected releases is the tests' own."""
    assert upstream.AFFECTED == releases.AFFECTED


@pytest.mark.contract
@pytest.mark.parametrize("target", upstream.TARGETS, ids=str)
def test_known_digests_are_those_of_the_affected_releases(target: upstream.Target) -> None:
    """No digest is missing, none is left over, each names the first release that has it."""
    assert target.digests == digests.known_digests(target)


@pytest.mark.contract
@pytest.mark.parametrize("release", releases.RELEASES, ids=lambda r: r.version)
@pytest.mark.parametrize("mode", [guard.Mode.AUTO, guard.Mode.FORCE])
def test_the_guard_knows_every_release(release: Release, mode: guard.Mode) -> None:
    """Affected releases are applied to; those before and after are not affected; none is unknown."""
    installation, sources = installed(release.version)
    assert installation.version == release.version
    decision = guard.decide(BACKPORT, installation, sources, mode)
    expected = guard.State.APPLY if release.affected else guard.State.NOT_AFFECTED
    assert (decision.state, decision.affected) == (expected, release.affected)


@pytest.mark.contract
@pytest.mark.parametrize("release", releases.AFFECTED)
def test_force_needs_no_digest(release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On each affected release every feature is found, so force applies were its digests unknown."""
    monkeypatch.setattr(upstream, "unknown_targets", lambda *_: ["everything"])
    assert guard.decide(BACKPORT, *installed(release), guard.Mode.FORCE).state is guard.State.APPLY
    assert guard.decide(BACKPORT, *installed(release), guard.Mode.AUTO).state is guard.State.REFUSED


@pytest.mark.contract
@pytest.mark.parametrize("release", releases.RELEASES, ids=lambda r: r.version)
def test_recorded_specs_are_read_from_the_source(release: Release) -> None:
    """The tuple of recorded spec types is that of the release, and each has a name for users."""
    assert upstream.recorded_specs(installed(release.version)[1]) == release.records
    assert set(release.records) <= set(upstream.SPEC_FAMILIES)


@given(st.text(st.characters(codec="utf-8", exclude_characters="\r\n"), min_size=1), st.integers(0, 8))
def test_a_digest_does_not_depend_on_indentation(line: str, depth: int) -> None:
    """The same text, moved right as a whole, has the same digest."""
    source = f"def f():\n    x = {line!r}\n"
    moved = "".join(" " * depth + part for part in source.splitlines(keepends=True))
    assert upstream.digest(source) == upstream.digest(moved)


@given(st.integers(0, 10_000))
def test_one_changed_character_changes_the_digest(position: int) -> None:
    """No single replaced character of a source keeps its digest."""
    source = "def f(self):\n    self.new_block_ids.extend(b.block_id for b in new_blocks)\n"
    position %= len(source)
    assert upstream.digest(source) != upstream.digest(source[:position] + "~" + source[position + 1 :])


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("__version__ = version = '0.25.1'\n", "0.25.1"),
        ('__version__ = version = "0.25.1+cu129"\n', "0.25.1+cu129"),
        ("version: str\n__version__: str\n\n__version__ = version = '0.19.0'\n", "0.19.0"),
        ("__version__: str = '1.2'\n", "1.2"),
        ("from somewhere import __version__\n", None),
    ],
)
def test_the_version_is_read_without_running_anything(tmp_path: Path, text: str, version: str | None) -> None:
    """The forms in which build tools write _version.py are read; others give none."""
    root = copy_fake(tmp_path) / "vllm"
    (root / "_version.py").write_text(text)
    assert upstream.read_version(root) == version


def test_metadata_serves_where_the_package_states_no_version(tmp_path: Path) -> None:
    """A vendor's distribution of another name gives the version where _version.py is missing."""
    root = copy_fake(tmp_path, version=None) / "vllm"
    (tmp_path / "vllm_vendor-0.22.0.dist-info").mkdir()
    (tmp_path / "vllm_vendor-0.22.0.dist-info" / "METADATA").write_text("Name: vllm-vendor\nVersion: 0.22.0\n")
    assert upstream.read_version(root) == "0.22.0"
