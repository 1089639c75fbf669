# SPDX-License-Identifier: Apache-2.0
"""The demo: one real engine twice under the same load, without the fix and with it, and a picture of both.

The plugin is on the path of both runs; the first one has it switched off. So the runs differ by one switch.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from vllm_kvfix.demo.engine import (
    MODEL_NAME,
    Engine,
    EngineFailedError,
    EngineSettings,
    engine_environ,
    plugin_lines,
    read_samples,
    rss_anon,
)
from vllm_kvfix.demo.environment import Environment, SetupError, ensure
from vllm_kvfix.demo.measurement import BYTES_PER_ID, MIB, Point, Run
from vllm_kvfix.demo.model import make_model
from vllm_kvfix.demo.plugin_folder import make_plugin_folder
from vllm_kvfix.ring.place import FOLDER_VARIABLE

if TYPE_CHECKING:
    from types import FrameType

DEFAULT_RELEASE = "0.25.1"
LOAD_SCRIPT = Path(__file__).with_name("load.py")
MODE_VARIABLE = "VLLM_KVFIX_PATCH"

_WARM_UP_S = 40.0
_LEAST_SECONDS = 10.0
_SAMPLE_S = 1.0
_SAY_EVERY_S = 2.0
_LOAD_GRACE_S = 60.0
_CONCURRENCY = 16
_PROMPT_TOKENS = 600
_BLOCK_SIZE = 16
# Block size as on a GPU. The pool is small and the prefix cache off, so that the leak is all that can grow: both
# would fill up over minutes, up to a limit, and hide it.
_ENGINE_ARGUMENTS = (
    "--dtype=float32",
    "--max-model-len=2048",
    f"--block-size={_BLOCK_SIZE}",
    "--num-gpu-blocks-override=4096",
    "--no-enable-prefix-caching",
)
_EXIT_INTERRUPTED = 130


class Progress:
    """Lines of progress on standard error; on a terminal a passing line is written over by the next."""

    def __init__(self, stream: TextIO) -> None:
        """Write to ``stream``."""
        self._stream = stream
        self._rewrite = stream.isatty()
        self._passing = False

    def __call__(self, line: str) -> None:
        """Write a line that stays."""
        self._write(line, passing=False)

    def passing(self, line: str) -> None:
        """Write a line that the next one may replace."""
        self._write(line, passing=True)

    def _write(self, line: str, *, passing: bool) -> None:
        start = "\r\x1b[K" if self._rewrite and self._passing else ""
        end = "" if self._rewrite and passing else "\n"
        self._stream.write(f"{start}{line}{end}")
        self._stream.flush()
        self._passing = passing


@dataclass(frozen=True)
class Scene:
    """What both runs share."""

    environment: Environment
    model: Path
    plugin: Path
    work: Path
    seconds: float
    progress: Progress


def main(argv: list[str] | None = None) -> int:
    """Run the demo.

    Returns:
        0: done; 1: set-up or engine failed, or the fix did not hold the line; 2: wrong usage; 130: interrupted.
    """
    options = _parse(argv)
    progress = Progress(sys.stderr)
    # An ended `make` or a closed terminal must end the engine as well; and a shell that starts us in the background has
    # had SIGINT ignored, which we would inherit.
    stops = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, _interrupt) for number in stops}
    try:
        return _demo(options, progress)
    except KeyboardInterrupt:
        progress("interrupted: the engine is stopped, no process is left")
        return _EXIT_INTERRUPTED
    except (SetupError, EngineFailedError) as error:
        progress(f"vllm-kvfix demo: {error}")
        return 1
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vllm-kvfix demo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--release", default=DEFAULT_RELEASE, help="an affected release of vLLM (%(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="measured time of each run (%(default)s)")
    parser.add_argument(
        "--output", type=Path, default=Path("demo-out/leak.png"), help="the picture; data beside it (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON on standard output")
    options = parser.parse_args(argv)
    if options.seconds < _LEAST_SECONDS:
        parser.error(f"--seconds must be at least {_LEAST_SECONDS:.0f}: a slope needs points")
    return options


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt


def _demo(options: argparse.Namespace, progress: Progress) -> int:
    if importlib.util.find_spec("matplotlib") is None:
        raise SetupError("the picture needs matplotlib: pip install 'vllm-kvfix[demo]'")
    environment = ensure(options.release, log=progress)
    started = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix="kvfix-demo-"))
    try:
        plugin = make_plugin_folder(work / "plugin", log=progress)
        scene = Scene(environment, make_model(work / "model"), plugin, work, options.seconds, progress)
        without = _measure(scene, "unpatched", "off")
        fixed = _measure(scene, "with vllm-kvfix", "auto")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return _conclude(options, without, fixed, time.monotonic() - started, progress)


def _measure(scene: Scene, label: str, mode: str) -> Run:
    """Start an engine, put the load on it, and return what was measured."""
    scene.progress(f"{label} ({MODE_VARIABLE}={mode}): starting vLLM {scene.environment.release}")
    settings = EngineSettings(
        scene.model,
        scene.work,
        name=mode,
        arguments=_ENGINE_ARGUMENTS,
        environ={MODE_VARIABLE: mode, FOLDER_VARIABLE: str(scene.work / "rings")},
        plugin_path=scene.plugin,
    )
    report_file = scene.work / f"{mode}-load.json"
    with Engine(scene.environment, settings, log=scene.progress) as engine:
        scene.progress(f"{label}: answers after {engine.start_s:.0f} s; load begins, {_WARM_UP_S:.0f} s are warm-up")
        for line in plugin_lines(engine.log_text()):
            scene.progress(f"  its log: {line}")
        points = _watch(scene, label, engine, report_file)
    report = json.loads(report_file.read_text(encoding="utf-8"))
    if report["failed"]:
        raise EngineFailedError(f"{report['failed']} of {report['sent']} requests failed, so the run proves nothing")
    return Run(label, _WARM_UP_S, engine.start_s, report["completed"], points)


def _watch(scene: Scene, label: str, engine: Engine, report_file: Path) -> list[Point]:
    """Run the load against ``engine`` and sample until it ends."""
    seconds = _WARM_UP_S + scene.seconds
    command = [str(scene.environment.python), "-I", str(LOAD_SCRIPT), "--mode=leak", f"--url={engine.url}"]
    command += [f"--model={MODEL_NAME}", f"--output={report_file}", f"--seconds={seconds}"]
    command += [f"--concurrency={_CONCURRENCY}", f"--prompt-tokens={_PROMPT_TOKENS}"]
    pid = engine.core_pids()[0]
    points: list[Point] = []
    # A session of its own: Ctrl-C is ours to handle, the load need not report it as well.
    with subprocess.Popen(  # noqa: S603  our own command
        command, env=engine_environ({}, ()), stdin=subprocess.DEVNULL, start_new_session=True
    ) as load:
        try:
            began = time.time()
            said = 0.0
            while load.poll() is None:
                engine.check()
                now = time.time() - began
                if now > seconds + _LOAD_GRACE_S:
                    raise EngineFailedError(f"the load did not end {_LOAD_GRACE_S:.0f} s after its time")
                samples = [sample for sample in read_samples(engine.probe_file) if sample.time >= began]
                if samples and now <= seconds:
                    last = samples[-1]
                    points.append(Point(now, rss_anon(pid), sum(last.backlog), last.allocated))
                    if now - said >= _SAY_EVERY_S:
                        said = now
                        scene.progress.passing(_status(label, points, seconds))
                time.sleep(_SAMPLE_S)
        finally:
            load.kill()
    if len([point for point in points if point.time >= _WARM_UP_S]) < 3:  # noqa: PLR2004  a line, and one more
        raise EngineFailedError("the engine made no steps under load, so there is nothing to show")
    return points


def _status(label: str, points: list[Point], seconds: float) -> str:
    last = points[-1]
    base = next((point for point in points if point.time >= _WARM_UP_S), None)
    growth = f"{(last.rss - base.rss) / MIB:+.2f} MiB since warm-up" if base else "warming up"
    return (
        f"  {label}  {last.time:3.0f}/{seconds:.0f} s  backlog {last.backlog:>9,} ids of {last.allocated:,} blocks  "
        f"RssAnon {last.rss / MIB:,.1f} MiB ({growth})"
    )


def _conclude(options: argparse.Namespace, without: Run, fixed: Run, wall_s: float, progress: Progress) -> int:
    from vllm_kvfix.demo import chart  # noqa: PLC0415  it needs the extra, the other modules do not

    load = (
        f"{_CONCURRENCY} clients, {_PROMPT_TOKENS}-token prompts, max_tokens=1, block size {_BLOCK_SIZE}; "
        f"{without.blocks_per_second:,.0f} and {fixed.blocks_per_second:,.0f} blocks/s allocated"
    )
    chart.draw(options.output, options.release, load, without, fixed)
    explained = without.ids_per_second * BYTES_PER_ID * 3600 / MIB
    result = {
        "release": options.release,
        "load": load,
        "measured_s": options.seconds,
        "wall_s": round(wall_s, 1),
        "explained_by_backlog_mib_per_hour": round(explained, 2),
        "runs": [without.summary(), fixed.summary()],
    }
    data = options.output.with_suffix(".json")
    data.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(result))  # noqa: T201  what was asked for
    progress(f"picture: {options.output}   data: {data}   ({wall_s:.0f} s)")
    progress(
        f"slopes over {options.seconds:.0f} s after warm-up, scaled to an hour; {BYTES_PER_ID} bytes an id make "
        f"{explained:.1f} MiB/h of the unpatched growth; what both runs share is a young process settling, which "
        "fades within minutes (--seconds 300 shows it)"
    )
    held = max(point.backlog for point in fixed.points) == 0
    if not held:
        progress("the backlog grew in spite of the plugin: see the lines of its log above for the reason")
    progress(f"growth: {_rates(without)} | {_rates(fixed)}")
    return 0 if held else 1


def _rates(run: Run) -> str:
    return f"{run.label} {run.mib_per_hour:+.1f} MiB/h, {run.ids_per_second:+,.0f} ids/s"
