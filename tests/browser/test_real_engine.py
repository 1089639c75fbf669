# SPDX-License-Identifier: Apache-2.0
"""The live page over a real engine of an affected release: the leak grows on it, and the engine's end is seen."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.browser.test_panels import GROWS_WITHIN_S, check
from tests.browser.viewer import viewing, wait_for
from tests.engine.conftest import workshop  # noqa: F401  # a fixture
from tests.engine.test_verdict import ARGUMENTS, PATH, PROMPT_TOKENS, RELEASE
from tests.sidecar_e2e.sidecar import Sidecar
from vllm_kvfix.demo.engine import MODEL_NAME, Engine, EngineSettings, engine_environ, read_samples
from vllm_kvfix.demo.run import LOAD_SCRIPT

if TYPE_CHECKING:
    from pathlib import Path

    from playwright.sync_api import Browser

    from tests.browser.viewer import Viewer
    from tests.engine.harness import Workshop

pytestmark = pytest.mark.engine

LEAKED = 20_000
FOUND_WITHIN_S = 240.0
LOAD_S = 400


def backlog(viewer: Viewer, card: str) -> int:
    """The ids that the page says are in the list."""
    return int(viewer.raw(f"{card} [data-figure='backlog.0']") or 0)


def test_a_real_leak_is_seen_growing_and_ending(
    browser: Browser,
    workshop: Workshop,  # noqa: F811  # the fixture
    tmp_path: Path,
) -> None:
    """Its list keeps up with a probe in the engine, panels agree with the JSON, and its end is shown as an end."""
    environment = workshop.environment(RELEASE)
    rings = tmp_path / "rings"
    rings.mkdir()
    settings = EngineSettings(
        workshop.model,
        tmp_path,
        arguments=ARGUMENTS,
        environ={"VLLM_KVFIX_PATCH": "off", "VLLM_KVFIX_RING_DIR": str(rings)},
        plugin_path=workshop.plugin,
    )
    with Engine(environment, settings) as engine, Sidecar(tmp_path, rings, {}) as sidecar, viewing(browser) as viewer:
        (core,) = engine.core_pids()
        load = [str(environment.python), "-I", str(LOAD_SCRIPT), "--mode=leak", f"--url={engine.url}"]
        load += [f"--model={MODEL_NAME}", f"--output={tmp_path / 'load.json'}", f"--seconds={LOAD_S}"]
        load += ["--concurrency=8", f"--prompt-tokens={PROMPT_TOKENS}"]
        viewer.open(f"http://127.0.0.1:{sidecar.port}/")
        process = f"article[data-testid=process]:has([data-field=pid]:text-is('pid {core}'))"
        key = viewer.wait(process).get_attribute("data-key")
        card = f"[data-testid=engine][data-key='{key}']"
        viewer.page.select_option("#process", key)  # another engine of this machine may be graver
        with subprocess.Popen(load, env=engine_environ({}, ())) as running:
            try:
                grows(viewer, card, engine)
                viewer.wait(f"#containers tr[data-path='{PATH}']", state="attached")
                viewer.page.locator(f"{process}[data-kind='unbounded growth']").wait_for(timeout=FOUND_WITHIN_S * 1000)
                agrees(viewer, core)
            finally:
                running.kill()
        engine.stop()
        viewer.page.click("#pause")  # it goes on
        viewer.wait(f"{process}[data-ended=true]")
        assert viewer.page.locator(f"{card}[data-state=live]").count() == 0


def grows(viewer: Viewer, card: str, engine: Engine) -> None:
    """Until so much has leaked, what the probe has counted stands on the page within seconds."""
    shown = 0
    while shown < LEAKED:
        counted = sum(sum(sample.backlog) for sample in read_samples(engine.probe_file)[-1:])  # none at first
        wait_for(lambda counted=counted: backlog(viewer, card) >= counted, f"{counted} ids", GROWS_WITHIN_S)
        shown = backlog(viewer, card)


def agrees(viewer: Viewer, core: int) -> None:
    """Held still, the page's figures of that engine are the JSON's, and its list is the culprit."""
    told = viewer.hold()
    (process,) = [one for one in told["processes"] if one["pid"] == core]
    (engine,) = [one for one in told["engines"] if one["pid"] == core]
    assert PATH in [culprit["path"] for culprit in process["verdict"]["culprits"]]
    key = process["key"]
    check(viewer.figures(f"[data-testid=process][data-key='{key}']"), process)
    check(viewer.figures(f"[data-testid=engine][data-key='{key}']"), engine)
    check(viewer.figures("#sidecar"), told["sidecar"], "sidecar.")
    assert viewer.page.locator(f"#containers tr[data-culprit=true][data-path='{PATH}']").count() == 1
