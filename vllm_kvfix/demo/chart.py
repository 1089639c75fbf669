# SPDX-License-Identifier: Apache-2.0
"""The picture of the demo: one time line, the leak and then the fix; the backlog above, the memory below."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

from vllm_kvfix.demo.measurement import MIB
from vllm_kvfix.demo.story import LOAD

if TYPE_CHECKING:
    from pathlib import Path

    from vllm_kvfix.demo.story import Story

# Okabe and Ito's vermillion and blue: told apart with any colour vision, and by their line styles in print.
_COLOURS = ("#D55E00", "#0072B2")
_STYLES = ("-", (0, (5, 1)))
_INK, _FAINT = "#333333", "#777777"


def draw(file: Path, release: str, story: Story) -> None:
    """Write the picture to ``file`` (PNG)."""
    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(9.6, 6.4), dpi=125, layout="constrained")
        backlog, memory = figure.subplots(2, 1, sharex=True)
        title = f"One engine of vLLM {release}: {_how(story)}"
        figure.suptitle(title, fontsize=14, fontweight="bold")
        backlog.set_title(f"{LOAD}; {_blocks(story)}", fontsize=9.5, color=_INK, loc="left")
        backlog.set_ylabel("ids kept in new_block_ids\n(thousands)")
        memory.set_ylabel("RssAnon of the engine core,\nsince its warm-up (MiB)")
        memory.set_xlabel("seconds since the load began (grey: not counted; first the warm-up)")
        base = story.leak.counted[0].rss
        for phase, colour, style in zip((story.leak, story.fixed), _COLOURS, _STYLES, strict=True):
            line: dict[str, Any] = {"color": colour, "linestyle": style, "linewidth": 2.2}
            times = [point.time for point in phase.points]
            backlog.plot(times, [point.backlog / 1000 for point in phase.points], label=phase.label, **line)
            memory.plot(times, [(point.rss - base) / MIB for point in phase.points], **line)
            last, ends = phase.points[-1], phase is story.fixed
            ids, grown = (last.time, last.backlog / 1000), (last.time, (last.rss - base) / MIB)
            _note(backlog, ids, f"{_plus(phase.ids_per_second, 0)} ids/s", colour, ends=ends)
            _note(memory, grown, f"{_plus(phase.mib_per_hour, 1)} MiB/h", colour, ends=ends)
        for axes in (backlog, memory):
            for begin, end in _uncounted(story):
                axes.axvspan(begin, end, color="#000000", alpha=0.06, linewidth=0)
            axes.axvline(story.fixed_at, color=_INK, linewidth=1.2)
            if story.first is not None:
                axes.axvline(story.first.at, color=_FAINT, linewidth=1.0, linestyle=":")
            axes.grid(visible=True, axis="y", color="#DDDDDD", linewidth=0.8)
            axes.set_xlim(left=0)
            axes.margins(y=0.14)
        came = " fix attached, no restart" if story.why_restarted is None else " restarted"
        _tell(backlog, story.fixed_at, came, _INK)
        if story.first is not None:
            _tell(backlog, story.first.at, f"verdict: {story.first.kind} ", _FAINT, before=True)
        backlog.legend(loc="upper left", frameon=False)
        file.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(file)


def _how(story: Story) -> str:
    if story.why_restarted is None:
        return "leaking, then fixed while it runs"
    return "leaking, then restarted with the fix"


def _blocks(story: Story) -> str:
    before, after = story.leak.blocks_per_second, story.fixed.blocks_per_second
    return f"{before:,.0f} and then {after:,.0f} blocks/s allocated"


def _uncounted(story: Story) -> list[tuple[float, float]]:
    """What each phase shows without counting it: a young process settles, freed memory is given back."""
    return [
        (phase.points[0].time if i else 0.0, phase.counted_from) for i, phase in enumerate((story.leak, story.fixed))
    ]


def _plus(value: float, digits: int) -> str:
    # A slope that rounds to zero is zero, not "-0.0".
    rounded = round(value, digits) or 0.0
    return f"{rounded:+,.{digits}f}" if rounded else "0"


def _note(axes: Any, at: tuple[float, float], text: str, colour: str, *, ends: bool) -> None:
    """Write behind the last line; above one that another follows."""
    place: dict[str, Any] = {"xytext": (6, 0), "ha": "left", "va": "center"}
    if not ends:
        place = {"xytext": (-4, 6), "ha": "right", "va": "bottom"}
    axes.annotate(text, at, textcoords="offset points", color=colour, fontweight="bold", annotation_clip=False,
                  **place)  # fmt: skip


def _tell(axes: Any, x: float, text: str, colour: str, *, before: bool = False) -> None:
    """Write beside a moment: behind it at the top, or before it at the bottom, where no line is that rises."""
    y, ha, va = (0.03, "right", "bottom") if before else (1.0, "left", "top")
    axes.text(x, y, text, transform=axes.get_xaxis_transform(), color=colour, ha=ha, va=va, fontsize=9)
