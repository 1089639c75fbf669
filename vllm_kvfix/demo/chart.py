# SPDX-License-Identifier: Apache-2.0
"""The picture of the demo: both runs, their backlog above, the engine core's memory below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_kvfix.demo.measurement import Run

# Okabe and Ito's vermillion and blue: told apart with any colour vision, and by their line styles in print.
_COLOURS = ("#D55E00", "#0072B2")
_STYLES = ("-", "--")
_INK = "#333333"


def draw(file: Path, release: str, load: str, without: Run, fixed: Run) -> None:
    """Write the picture to ``file`` (PNG); ``load`` is the line that says what the engine was asked to do."""
    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9.6, 6.4), dpi=125, layout="constrained")
        backlog, memory = figure.subplots(2, 1, sharex=True)
        figure.suptitle(f"vLLM {release}: host memory of the engine core under load", fontsize=14, fontweight="bold")
        backlog.set_title(load, fontsize=9.5, color=_INK, loc="left")
        backlog.set_ylabel("ids kept in new_block_ids\n(thousands)")
        memory.set_ylabel("growth of RssAnon\nsince warm-up (MiB)")
        memory.set_xlabel("time under load (s)")
        for run, colour, style in zip((without, fixed), _COLOURS, _STYLES, strict=True):
            times = [point.time for point in run.points]
            line: dict[str, Any] = {"color": colour, "linestyle": style, "linewidth": 2.2}
            backlog.plot(times, [point.backlog / 1000 for point in run.points], label=run.label, **line)
            memory.plot(times, run.rss_growth, **line)
            ids = f"{_plus(run.ids_per_second, 0)} ids/s"
            _note(backlog, run.points[-1].time, run.points[-1].backlog / 1000, ids, colour)
            _note(memory, run.points[-1].time, run.rss_growth[-1], f"{_plus(run.mib_per_hour, 1)} MiB/h", colour)
        for axes in (backlog, memory):
            axes.axvspan(0, without.warm_up_s, color="#000000", alpha=0.06, linewidth=0)
            axes.grid(visible=True, axis="y", color="#DDDDDD", linewidth=0.8)
            axes.set_xlim(left=0)
            axes.margins(y=0.12)
        memory.text(without.warm_up_s / 2, 0.96, "warm-up", transform=memory.get_xaxis_transform(), color=_INK,
                    ha="center", va="top", fontsize=8.5)  # fmt: skip
        backlog.legend(loc="upper left", frameon=False, bbox_to_anchor=(0.14, 1.0))
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file)


def _plus(value: float, digits: int) -> str:
    # A slope that rounds to zero is zero, not "-0.0".
    rounded = round(value, digits) or 0.0
    return f"{rounded:+,.{digits}f}" if rounded else "0"


def _note(axes: Any, x: float, y: float, text: str, colour: str) -> None:
    axes.annotate(text, (x, y), xytext=(6, 0), textcoords="offset points", color=colour, fontweight="bold", va="center",
                  annotation_clip=False)  # fmt: skip
