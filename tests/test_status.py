# SPDX-License-Identifier: Apache-2.0
"""status: what the command says of an environment, by exit code, text and JSON; it imports neither vLLM nor torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import packaging
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import releases
from tests.support import ROOT, copy_fake
from vllm_kvfix import status

DIST_INFO = "vllm_kvfix-9.9.dist-info"


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """A folder that has the plugin's metadata, as an installation has."""
    info = tmp_path / "installed" / DIST_INFO
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: vllm-kvfix\nVersion: 9.9\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nkvfix = vllm_kvfix.plugin:register\n")
    return info.parent


@pytest.fixture(scope="session", autouse=True)
def bare(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A folder with this package and packaging alone: neither is installed there, so no entry point is seen."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "vllm_kvfix").symlink_to(ROOT / "vllm_kvfix")
    (folder / "packaging").symlink_to(Path(packaging.__file__).parent)
    BARE.append(folder)


BARE: list[Path] = []


def vllm_kvfix(*arguments: str, path: tuple[Path, ...] = (), **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m vllm_kvfix` with ``path`` first on PYTHONPATH and no site-packages."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    return subprocess.run(
        [sys.executable, "-S", "-m", "vllm_kvfix", *arguments],
        env={**clean, "PYTHONPATH": os.pathsep.join(map(str, (*path, *BARE))), **environ},
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )


@pytest.mark.contract
class TestReleases:
    """On the released sources."""

    def test_affected_and_not_installed_is_1(self) -> None:
        """0.25.1 without the plugin: exit code 1, the models that leak, and the command that helps."""
        done = vllm_kvfix("status", path=(releases.sources("0.25.1"),))
        assert done.returncode == 1
        assert done.stdout.startswith("NOT PROTECTED: a vLLM started from this environment leaks host memory")
        assert "multi-head latent attention" in done.stdout
        assert f"{sys.executable} -m pip install vllm-kvfix, then restart vLLM" in done.stdout

    def test_affected_and_installed_is_0(self, plugin: Path) -> None:
        """0.25.1 with the plugin: exit code 0 and its version."""
        done = vllm_kvfix("status", path=(releases.sources("0.25.1"), plugin))
        assert done.returncode == 0
        assert done.stdout.startswith("OK: a vLLM started from this environment is protected")
        assert "vllm-kvfix 9.9" in done.stdout
        assert "will be applied: version and source are known" in done.stdout

    def test_old_releases_name_the_models_that_they_leak_for(self) -> None:
        """0.17.1 leaks for full attention alone, so MLA is not named."""
        said = json.loads(vllm_kvfix("status", "--json", path=(releases.sources("0.17.1"),)).stdout)
        assert said["leaking_models"] == ["full attention (Llama, Qwen, Mistral and most others)"]

    @pytest.mark.parametrize(
        ("release", "words"), [("0.26.0", "upstream fix"), ("0.32.0", "upstream fix"), ("0.17.0", "older")]
    )
    def test_not_affected_is_0(self, release: str, words: str) -> None:
        """Fixed and older releases: exit code 0, and why there is nothing to fix."""
        done = vllm_kvfix("status", path=(releases.sources(release),))
        assert done.returncode == 0
        assert done.stdout.startswith("OK: nothing to fix: ")
        assert words in done.stdout

    @pytest.mark.parametrize("installed", [True, False])
    def test_one_edited_line_is_2(self, plugin: Path, tmp_path: Path, *, installed: bool) -> None:
        """A release with one edited line in a target: exit code 2, the target's name, and force as the way out."""
        source = releases.sources("0.25.1") / "vllm"
        edited = tmp_path / "edited"
        shutil.copytree(source / "v1", edited / "vllm/v1")
        for name in ("__init__.py", "_version.py"):
            shutil.copy(source / name, edited / "vllm" / name)
        target = edited / "vllm/v1/core/sched/scheduler.py"
        text = target.read_text()
        line = "        new_block_ids_to_zero = ("
        assert line in text
        target.write_text(text.replace(line, f"        # a vendor's comment\n{line}"))
        path = (edited, plugin) if installed else (edited,)
        done = vllm_kvfix("status", path=path)
        assert done.returncode == 2
        assert done.stdout.startswith("CANNOT TELL: the source is not that of a release we know: Scheduler.schedule")
        forced = vllm_kvfix("status", path=path, VLLM_KVFIX_PATCH="force")
        assert forced.returncode == (0 if installed else 2)


def test_it_imports_neither_vllm_nor_torch(tmp_path: Path, plugin: Path) -> None:
    """With a vLLM and a torch whose import ends the process, status answers as ever."""
    fake = copy_fake(tmp_path / "site")
    for name in ("vllm/__init__.py", "torch.py"):
        (fake / name).write_text("raise SystemExit(99)\n")
    done = vllm_kvfix("status", path=(fake, plugin), VLLM_KVFIX_PATCH="force")
    assert (done.returncode, done.stderr) == (0, "")


def test_no_vllm_is_2() -> None:
    """Without a vLLM: exit code 2, in words and in JSON."""
    done = vllm_kvfix("status")
    assert (done.returncode, done.stdout.splitlines()[0]) == (2, "CANNOT TELL: no vLLM in this environment")
    said = json.loads(vllm_kvfix("status", "--json").stdout)
    assert (said["exit_code"], said["vllm_path"]) == (2, None)


@pytest.mark.parametrize(
    ("value", "code", "words"),
    [
        ("kvfix", 0, "lets us load"),
        ("a,kvfix,b", 0, "lets us load"),
        ("", 1, "keeps us out"),
        ("a,b", 1, "keeps us out"),
        ("a, kvfix", 1, "keeps us out"),
    ],
)
def test_vllm_plugins_is_read_as_vllm_reads_it(plugin: Path, tmp_path: Path, value: str, code: int, words: str) -> None:
    """Exact names between commas, blanks count, empty means none; where we are kept out it says what to add."""
    fake = copy_fake(tmp_path / "site", edits={})
    done = vllm_kvfix("status", path=(fake, plugin), VLLM_PLUGINS=value, VLLM_KVFIX_PATCH="force")
    assert words in done.stdout
    # The fake's digests are unknown: kept out, it stays at "cannot tell" rather than "not protected".
    assert done.returncode == (0 if code == 0 else 2)
    if code:
        assert "add kvfix to VLLM_PLUGINS, then restart vLLM" in done.stdout


@given(st.lists(st.sampled_from(["kvfix", " kvfix", "a", "b", ""]), max_size=5))
def test_the_filter_allows_exactly_what_a_split_at_commas_holds(names: list[str]) -> None:
    """filter_allows is vLLM's own rule: membership among the parts."""
    assert status.filter_allows(",".join(names), "kvfix") is ("kvfix" in names)


@pytest.mark.contract
def test_off_is_affected_and_not_protected(plugin: Path) -> None:
    """VLLM_KVFIX_PATCH=off is named as the reason, with what to unset."""
    done = vllm_kvfix("status", path=(releases.sources("0.25.1"), plugin), VLLM_KVFIX_PATCH="off")
    assert done.returncode == 1
    assert "off: VLLM_KVFIX_PATCH=off" in done.stdout
    assert "unset VLLM_KVFIX_PATCH, then restart vLLM" in done.stdout


def test_another_interpreter_can_be_named(plugin: Path, tmp_path: Path) -> None:
    """--python looks at that interpreter's environment, which need not have this package."""
    fake = copy_fake(tmp_path / "site")
    wrapper = tmp_path / "other-python"
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={fake}:{plugin} exec {sys.executable} -S "$@"\n')
    wrapper.chmod(0o755)
    said = json.loads(vllm_kvfix("status", "--json", "--python", str(wrapper)).stdout)
    assert said["vllm_path"] == str(fake / "vllm")
    assert said["plugin_version"] == "9.9"


@pytest.mark.parametrize(
    ("python", "words"),
    [("/does/not/exist", "cannot run /does/not/exist"), ("/bin/ls", "is no Python of 3.10 or newer")],
)
@pytest.mark.parametrize("as_json", [True, False])
def test_an_interpreter_that_does_not_run_is_2_with_the_reason(python: str, words: str, *, as_json: bool) -> None:
    """A wrong --python gives exit code 2 and says which program and why, in the form that was asked for."""
    done = vllm_kvfix("status", "--python", python, *(["--json"] if as_json else []))
    assert done.returncode == 2
    assert words in (json.loads(done.stdout)["error"] if as_json else done.stderr)


@pytest.mark.parametrize("arguments", [("--help",), ("status", "--help"), ("--version",)])
def test_help_and_version_succeed(arguments: tuple[str, ...]) -> None:
    """--help and --version exit with 0 and print to stdout."""
    done = vllm_kvfix(*arguments)
    assert done.returncode == 0
    assert "vllm-kvfix" in done.stdout


def test_there_is_no_colour_off_a_terminal() -> None:
    """Piped output holds no escape sequence."""
    assert "\x1b" not in vllm_kvfix("status").stdout


def test_a_reader_that_stops_early_changes_neither_exit_code_nor_peace() -> None:
    """With its output closed at the other end, status exits as ever and prints no traceback."""
    with subprocess.Popen(
        [sys.executable, "-S", "-m", "vllm_kvfix", "status"],
        env={**os.environ, "PYTHONPATH": str(BARE[0])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 2
