# SPDX-License-Identifier: Apache-2.0
"""The demo: a real engine of an affected release leaks, a live page names the leak, the fix goes in without a restart.

The engine has a tiny model with made-up weights and runs on the CPU. Nothing is left when it ends but the picture.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_kvfix.demo import screenshots
from vllm_kvfix.demo.beside import Sidecar, SidecarFailedError
from vllm_kvfix.demo.engine import EngineFailedError
from vllm_kvfix.demo.environment import SetupError, ensure
from vllm_kvfix.demo.measurement import BYTES_PER_ID, MIB
from vllm_kvfix.demo.model import make_model
from vllm_kvfix.demo.plugin_folder import make_plugin_folder
from vllm_kvfix.demo.progress import Progress
from vllm_kvfix.demo.served import LOAD_SCRIPT, Scene
from vllm_kvfix.demo.stopping import STOPS, uninterrupted
from vllm_kvfix.demo.story import LEAKS, Teller, Terms, explained

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import FrameType

    from vllm_kvfix.demo.measurement import Phase
    from vllm_kvfix.demo.served import Served
    from vllm_kvfix.demo.story import Story

__all__ = ["LOAD_SCRIPT", "main"]

DEFAULT_RELEASE = "0.25.1"
DONE, FAILED, INTERRUPTED = 0, 1, 130
NEEDED = ("matplotlib", "opentelemetry.sdk", "prometheus_client", "psutil")

_LEAST_SECONDS = 10.0
_KEEP_POLL_S = 0.5
_EPILOG = f"""\
exit codes:
  {DONE}    done: the leak was named, and with the fix nothing piled up
  {FAILED}    set-up, engine or sidecar failed, the leak was not named in time, or the fix did not hold the line
  2    wrong usage
  {INTERRUPTED}  interrupted before the end; nothing is left running

examples:
  vllm-kvfix demo                                   on a terminal the page stays until Ctrl-C
  vllm-kvfix demo --no-browser --no-keep            ends by itself
  vllm-kvfix demo --json > result.json              for machines; progress is on standard error
  vllm-kvfix demo --seconds 300                     longer lines, so less noise in the slopes
  vllm-kvfix demo --screenshots docs/images         pictures of the page ({screenshots.INSTALL})
"""


def main(argv: list[str] | None = None) -> int:
    """Run the demo; the exit code."""
    options = _parse(argv)
    progress = Progress(sys.stderr)
    # SIGINT, too: a shell that starts us in the background has had it ignored, which we would inherit.
    previous = {number: signal.signal(number, _interrupt) for number in STOPS}
    try:
        return _demo(options, progress)
    except KeyboardInterrupt:
        progress("interrupted: engine, load and sidecar are stopped, nothing is left")
        return INTERRUPTED
    except (SetupError, EngineFailedError, SidecarFailedError) as error:
        progress(f"vllm-kvfix demo: {error}")
        return FAILED
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="vllm-kvfix demo",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--release", default=DEFAULT_RELEASE, help="an affected release of vLLM (%(default)s)")
    add("--seconds", type=float, default=60.0, help="least measured time of each phase (%(default)s)")
    add(
        "--wait",
        type=float,
        default=240.0,
        metavar="SECONDS",
        help="how long the leak may go on until it is named; 0: go on after --seconds, named or not (%(default)s)",
    )
    add("--output", type=Path, default=Path("demo-out/leak.png"), help="the picture; data beside it (%(default)s)")
    add("--json", action="store_true", help="print the result as JSON on standard output")
    add("--no-browser", action="store_true", help="do not open the page; it is not opened without a display either")
    add(
        "--keep",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="go on serving at the end until Ctrl-C (the default on a terminal), or do not",
    )
    add(
        "--screenshots",
        type=Path,
        metavar="DIR",
        help="write pictures of the page there, by Playwright and Chromium; implies --no-browser and --no-keep",
    )
    options = parser.parse_args(argv)
    if options.seconds < _LEAST_SECONDS:
        parser.error(f"--seconds must be at least {_LEAST_SECONDS:.0f}: a slope needs points")
    return options


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt


def _demo(options: argparse.Namespace, progress: Progress) -> int:
    missing = [name for name in NEEDED if not _is_installed(name)]
    if missing:
        raise SetupError(f"not installed here: {', '.join(missing)}; pip install 'vllm-kvfix[demo]'")
    if options.screenshots:
        screenshots.check()
    environment = ensure(options.release, log=progress)
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        with uninterrupted():
            work = Path(tempfile.mkdtemp(prefix="kvfix-demo-"))
            stack.callback(shutil.rmtree, work, ignore_errors=True)
        scene = Scene(environment, work / "model", work / "plugin", work, progress)
        sidecar = stack.enter_context(Sidecar(scene.rings, work / "sidecar.log"))
        progress(f"live page: {sidecar.page}")
        if not options.no_browser and not options.screenshots and _has_display(os.environ):
            webbrowser.open(sidecar.page)
        make_plugin_folder(scene.plugin, log=progress)
        make_model(scene.model)
        camera = screenshots.Camera(sidecar.page, options.screenshots) if options.screenshots else None
        teller = Teller(scene, Terms(options.seconds, options.wait, camera), sidecar)
        story, served = teller.tell(stack)
        code = _conclude(options, story, sidecar.page, time.monotonic() - started, progress)
        keep = progress.on_terminal and not options.screenshots if options.keep is None else options.keep
        if keep:
            _keep(served, sidecar, progress)
    return code


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that it is part of
        return False


def _has_display(environ: Mapping[str, str]) -> bool:
    return any(environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def _conclude(options: argparse.Namespace, story: Story, page: str, wall_s: float, progress: Progress) -> int:
    from vllm_kvfix.demo import chart  # noqa: PLC0415  it needs the extra, the other modules do not

    chart.draw(options.output, options.release, story)
    data = options.output.with_suffix(".json")
    named = not options.wait or (story.first is not None and story.first.kind == LEAKS)
    code = DONE if named and story.held else FAILED
    result: dict[str, Any] = {
        "exit_code": code,
        "release": options.release,
        "page": page,
        "wall_s": round(wall_s, 1),
        "picture": str(options.output),
        **story.summary(),
    }
    data.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(result), flush=True)  # noqa: T201  what was asked for
    _say_end(story, progress)
    progress(f"picture: {options.output}   data: {data}")
    progress(f"time line: {', '.join(f'{what} {at:.0f} s' for at, what in story.marks)}; {wall_s:.0f} s in all")
    progress(f"page: {page}")
    progress(f"growth: {_rates(story.leak)} | {_rates(story.fixed)}")
    return code


def _say_end(story: Story, progress: Progress) -> None:
    ids, rss = story.released
    if story.why_restarted is None:
        progress(
            f"given back by the running engine: {ids:,} ids, {ids * BYTES_PER_ID / MIB:.2f} MiB; RssAnon changed by "
            f"{-rss / MIB:+.2f} MiB, with the code of the fix, which takes some 1 MiB once"
        )
    progress(
        f"slopes are scaled to an hour; {BYTES_PER_ID} bytes an id make {explained(story.leak):.1f} MiB/h of that "
        "without the fix; the rest, of both, is a young process settling (--seconds 300 shows less of it)"
    )
    if not story.held:
        progress("the backlog grew in spite of the fix: see the lines above for the reason")


def _rates(phase: Phase) -> str:
    return f"{phase.label} {phase.mib_per_hour:+.1f} MiB/h, {phase.ids_per_second:+,.0f} ids/s"


def _keep(served: Served, sidecar: Sidecar, progress: Progress) -> None:
    """Serve on, under load for the first hour, until somebody ends it; the result stands already."""
    served.put_load_on()
    progress(f"{sidecar.page} stays; Ctrl-C ends and removes everything")
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            served.engine.check()
            sidecar.check()
            time.sleep(_KEEP_POLL_S)
    progress("stopping engine, load and sidecar")
