# SPDX-License-Identifier: Apache-2.0
"""The live screen of ``vllm-kvfix top``; what it shows is made by :mod:`top_view`, where it lies is decided here."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from typing import TYPE_CHECKING, ClassVar, Protocol

from rich.text import Text
from textual.app import App
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Static

from vllm_kvfix_sidecar import top_view
from vllm_kvfix_sidecar.client import NoAnswerError
from vllm_kvfix_sidecar.report_text import KIND_WORDS
from vllm_kvfix_sidecar.top_lines import cells, cut, fitted, line, wrapped
from vllm_kvfix_sidecar.top_told import Facts
from vllm_kvfix_sidecar.words import clean, duration

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from textual.app import ComposeResult
    from textual.events import Resize
    from textual.geometry import Size

    from vllm_kvfix_sidecar.top_lines import Line
    from vllm_kvfix_sidecar.top_told import Process, Told

# What is drawn small does not need newer points more often.
HISTORY_EVERY_S = 10.0
_SECOND = 1.0
TERMINATED = 128 + signal.SIGTERM
PANES = ("Processes", "Details", "Engines", "Requests", "Sidecar")
PROCESSES, DETAILS, ENGINES, REQUESTS, SIDECAR = range(len(PANES))
# From so many columns and rows on all panes are shown at once.
ALL_COLUMNS, ALL_ROWS = 100, 36
_TABS_ROWS, _KEYS_ROWS, _LIMITS_ROWS, _RULE_ROWS = 10, 7, 14, 20
# However many processes there are, so much is left below them for what to do about the selected one.
_BELOW = 7
_MOST_BANNER, _LEAST_TITLE = 6, 14
_KEYS = "q quit  ? help  ↑↓ select  Enter details  s sort  r reverse  p pause"
_FEW_KEYS = "q quit  ? help  Tab next"
HELP = (
    ("q, Ctrl-C", "quit"),
    ("↑ ↓, k j", "select a process; in other panes: scroll, as do PgUp, PgDn, Home and End"),
    ("Enter, Esc", "details of the selected process, and back"),
    ("1 to 5, Tab", "panes: processes, details, engines, requests, sidecar"),
    ("s, r", "sort by the next column; reverse the order"),
    ("p", "pause: the figures stay as they are until p is pressed again"),
    ("?", "this; any key closes it"),
)


class Source(Protocol):
    """What tells of processes: a sidecar that is asked, or what watches here. Used by one thread."""

    name: str

    def now(self) -> Told:
        """What is known now.

        Raises:
            NoAnswerError: Nobody answers.
        """

    def history(self) -> Facts:
        """The hour before.

        Raises:
            NoAnswerError: Nobody answers.
        """

    def rest(self, stop: threading.Event, seconds: float) -> None:
        """Let so much time pass, or until told to stop."""

    def close(self) -> None:
        """The end."""


class Arrived(Message):
    """There are figures."""

    def __init__(self, told: Told, history: Facts) -> None:
        super().__init__()
        self.told = told
        self.history = history


class Silent(Message):
    """Nobody answered."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why = why


def rendered(lines: Sequence[Line]) -> Text:
    """Lines as Textual shows them: no markup is looked for, nothing is wrapped."""
    text = Text(no_wrap=True, overflow="crop", end="")
    for at, row in enumerate(lines):
        if at:
            text.append("\n")
        for part, style in row:
            text.append(part, style or None)
    return text


class Pane(VerticalScroll, can_focus=False):
    """One of ``PANES``."""

    def __init__(self, number: int) -> None:
        super().__init__(id=f"pane{number}")
        self.border_title = f"{number + 1} {PANES[number]}"
        self._body = Static(markup=False)

    def compose(self) -> ComposeResult:
        """What it holds."""
        yield self._body

    def show(self, lines: Sequence[Line]) -> None:
        """Show that."""
        self._body.update(rendered(lines))


class Help(ModalScreen[None]):
    """The keys, and what the verdicts mean."""

    def compose(self) -> ComposeResult:
        """All of it."""
        with VerticalScroll(can_focus=False):
            yield Static(markup=False)

    def on_resize(self, event: Resize) -> None:
        """Fit it to the terminal."""
        width = max(1, event.size.width - 1)
        told: list[Line] = [line("Keys", "bold")]
        for key, words in HELP:
            told += wrapped(words, width, f"  {key:<12} ")
        told += [line(), line("Verdicts", "bold")]
        for kind, words in KIND_WORDS.items():
            told += wrapped(f"{kind.value}: {words}", width, "  - ")
        self.query_one(Static).update(rendered([fitted(row, width) for row in told]))

    def on_key(self) -> None:
        """Any key closes it."""
        self.dismiss()


class Top(App[int]):
    """The screen; its result is the exit code."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen, ModalScreen, Vertical, VerticalScroll, Static { background: ansi_default; color: ansi_default; }
    Static { text-wrap: nowrap; text-overflow: clip; }
    #head, #tabs, #keys { height: auto; }
    #panes { height: 1fr; }
    Pane { height: 1fr; scrollbar-size-vertical: 1; scrollbar-gutter: stable; border-title-style: bold; }
    Pane.bordered { border-top: solid ansi_default; }
    Pane.current { border-title-style: bold reverse; }
    """
    BINDINGS: ClassVar = [
        Binding("q,ctrl+c", "leave", priority=True),
        Binding("tab", "next_pane(1)", priority=True),
        Binding("shift+tab", "next_pane(-1)", priority=True),
        *(Binding(str(number + 1), f"pane({number})") for number in range(len(PANES))),
        Binding("up,k", "move(-1)"),
        Binding("down,j", "move(1)"),
        Binding("pageup", "page(-1)"),
        Binding("pagedown,space", "page(1)"),
        Binding("home,g", "far(-1)"),
        Binding("end,G", "far(1)"),
        Binding("enter", f"pane({DETAILS})"),
        Binding("escape", f"pane({PROCESSES})"),
        Binding("s", "sort"),
        Binding("r", "reverse"),
        Binding("p", "pause"),
        Binding("question_mark,h", "help"),
    ]

    def __init__(self, source: Source, interval_s: float, *, clock: Callable[[], float] = time.time) -> None:
        super().__init__(ansi_color=True)
        self._source = source
        self._interval_s = interval_s
        self._wall = clock
        self._stop = threading.Event()
        self._latest: Arrived | None = None
        self._shown: Arrived | None = None
        self._silent: tuple[float, str] | None = None
        self._paused_at: float | None = None
        self._pane, self._sort, self._reversed, self._selected = PROCESSES, 0, False, ""
        self._panes = [Pane(number) for number in range(len(PANES))]

    def compose(self) -> ComposeResult:
        """Head, panes, keys."""
        yield Static(id="head", markup=False)
        with Vertical(id="panes"):
            yield from self._panes
        yield Static(id="tabs", markup=False)
        yield Static(id="keys", markup=False)

    def on_mount(self) -> None:
        """Begin to ask; a signal to end leaves the terminal as it was."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self.exit, 128 + number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGHUP})
        threading.Thread(target=self._ask_on, name="ask for figures", daemon=True).start()
        self.set_interval(_SECOND, self._draw)

    def _ask_on(self) -> None:
        """In a thread: an answer may take its time, and no key waits for it."""
        history, asked_at = Facts(), -HISTORY_EVERY_S
        while not self._stop.is_set():
            try:
                told = self._source.now()
                if time.monotonic() - asked_at >= HISTORY_EVERY_S:
                    history, asked_at = self._source.history(), time.monotonic()
                message: Message = Arrived(told, history)
            except NoAnswerError as error:
                message = Silent(str(error))
            except Exception as error:  # noqa: BLE001  # the screen says so, and asks again
                message = Silent(f"{error!r}. Please report this.")
            self.post_message(message)
            self._source.rest(self._stop, self._interval_s)
        self._source.close()

    def on_arrived(self, message: Arrived) -> None:
        """Show it."""
        self._silent, self._latest = None, message
        if self._paused_at is None:
            self._shown = message
        self._draw()

    def on_silent(self, message: Silent) -> None:
        """Say so, and since when."""
        self._silent = (self._silent[0] if self._silent else self._wall(), message.why)
        self._draw()

    def on_resize(self, event: Resize) -> None:
        """Fit it all anew; the app itself learns of its size after this."""
        self._draw(event.size)

    # ---- keys ----

    def action_leave(self) -> None:
        """The end."""
        self._stop.set()
        self.exit(0)

    def action_pane(self, number: int) -> None:
        """Go to a pane."""
        self._pane = number
        self._draw()

    def action_next_pane(self, by: int) -> None:
        """Go to the next one."""
        self.action_pane((self._pane + by) % len(PANES))

    def action_move(self, by: int) -> None:
        """Select another process, or scroll."""
        if self._pane == PROCESSES:
            self._select(self._position + by)
        else:
            self._panes[self._pane].scroll_relative(y=by, animate=False)

    def action_page(self, by: int) -> None:
        """A screenful."""
        pane = self._panes[self._pane]
        if self._pane == PROCESSES:
            self._select(self._position + by * max(1, pane.size.height - 2))
        else:
            pane.scroll_relative(y=by * max(1, pane.size.height - 1), animate=False)

    def action_far(self, by: int) -> None:
        """The very first, or last."""
        if self._pane == PROCESSES and by < 0:
            self._selected = ""
            self._draw()
        elif self._pane == PROCESSES:
            self._select(len(self._processes) - 1)
        elif by < 0:
            self._panes[self._pane].scroll_home(animate=False)
        else:
            self._panes[self._pane].scroll_end(animate=False)

    def action_sort(self) -> None:
        """By the next column."""
        self._sort = (self._sort + 1) % len(top_view.SORTS)
        self._draw()

    def action_reverse(self) -> None:
        """The other way round."""
        self._reversed = not self._reversed
        self._draw()

    def action_pause(self) -> None:
        """Keep what is shown, or go on."""
        self._paused_at = self._wall() if self._paused_at is None else None
        if self._paused_at is None:
            self._shown = self._latest
        self._draw()

    def action_help(self) -> None:
        """Say what the keys do."""
        self.push_screen(Help())

    @property
    def _processes(self) -> list[Process]:
        told = self._shown.told.processes if self._shown else ()
        return top_view.ordered(told, self._sort, reverse=self._reversed)

    @property
    def _position(self) -> int:
        keys = [process.key for process in self._processes]
        return keys.index(self._selected) if self._selected in keys else 0

    def _select(self, position: int) -> None:
        found = self._processes
        if found:
            self._selected = found[min(max(0, position), len(found) - 1)].key
        self._panes[DETAILS].scroll_home(animate=False)
        self._draw()

    # ---- drawing ----

    def _draw(self, size: Size | None = None) -> None:
        """Lay all of it out for the size that there is."""
        width, height = size or self.size
        screen = self.screen_stack[0] if self.screen_stack else None  # none while it ends
        if width < 1 or height < 1 or screen is None or not screen.query("#head"):
            return
        everything = width >= ALL_COLUMNS and height >= ALL_ROWS
        head = self._head(width, height)
        screen.query_one("#head", Static).update(rendered(head))
        tabs = height >= _TABS_ROWS and not everything
        self._line("#tabs", self._tabs(width) if tabs else None)
        keys = _KEYS if width >= cells(_KEYS) else _FEW_KEYS
        self._line("#keys", fitted(line(keys, "dim"), width) if height >= _KEYS_ROWS else None)
        room = height - len(head) - tabs - (height >= _KEYS_ROWS)
        for number, pane in enumerate(self._panes):
            pane.display = everything or number == self._pane
            pane.set_class(everything, "bordered")
            pane.set_class(everything and number == self._pane, "current")
        if self._shown is not None:
            self._fill(self._shown, max(1, width - 1), max(1, room), everything=everything)

    def _line(self, name: str, told: Line | None) -> None:
        found = self.screen_stack[0].query_one(name, Static)
        found.display = told is not None
        found.update(rendered([told or []]))

    def _head(self, width: int, height: int) -> list[Line]:
        """Who is asked and when; that nobody answers; the answer; and where there is room what qualifies it."""
        tight = height < _KEYS_ROWS and self._shown is not None and self._paused_at is None
        rows = [] if tight else [self._title(width)]
        if self._silent is not None:
            since, why = self._silent
            ago = duration(max(0.0, self._wall() - since))
            text = f"NO ANSWER since {top_view.moment(since)} ({ago}): {clean(why)}"
            rows += wrapped(text, width, style="bold red")[: max(1, height // 8)]
        if self._shown is None:
            return [*rows, fitted(line("Waiting for the first figures ..."), width)]
        told = self._shown.told
        rows += top_view.banner(told, width, max(1, min(_MOST_BANNER, height // 4)))
        if height >= _LIMITS_ROWS:
            rows += top_view.limits(told, width)[:2]
            rows += top_view.troubles(told, width)[: max(1, height // 10)]
        if height >= _RULE_ROWS:
            rows.append(line("─" * width, "dim"))
        return rows[: max(1, height - 1)]

    def _title(self, width: int) -> Line:
        state = f"every {self._interval_s:g} s"
        at = top_view.moment(self._shown.told.time_unix_s) if self._shown else ""
        if self._paused_at is not None:
            state = f"PAUSED at {top_view.moment(self._paused_at)}, p goes on"
        right = "  ".join(part for part in (state, at) if part)
        room = width - cells(right) - 2
        if room < _LEAST_TITLE:
            right = "" if self._paused_at is None else "  PAUSED"
            room = width - cells(right)
        left = cut(f"vllm-kvfix top  {self._source.name}", room)
        gap = " " * max(0, width - cells(left) - cells(right))
        return fitted(
            [(left, "bold"), (gap, ""), (right, "bold yellow" if self._paused_at is not None else "dim")], width
        )

    def _tabs(self, width: int) -> Line:
        told: Line = []
        for number, name in enumerate(PANES):
            told += [(f" {number + 1} {name} ", "reverse" if number == self._pane else ""), (" ", "")]
        if width < sum(cells(text) for text, _ in told):
            told = [(f" {self._pane + 1} {PANES[self._pane]} ", "reverse")]
        return fitted(told, width)

    def _fill(self, shown: Arrived, width: int, room: int, *, everything: bool) -> None:
        told, history = shown.told, shown.history
        found = self._processes
        if not any(process.key == self._selected for process in found):
            self._selected = ""  # nobody has chosen one that is there: the first, whichever that will be
        chosen = found[self._position] if found else None
        details = top_view.detail(chosen, history, width, answer=told.answer) if chosen else []
        others = {
            ENGINES: top_view.engines(told, width),
            REQUESTS: top_view.requests(told, width),
            SIDECAR: top_view.sidecar(told, width),
        }
        height = max(4, room // 4) if everything else room - _BELOW if room >= 2 * _BELOW else room
        table = top_view.processes(
            told,
            history,
            width,
            height=height,
            sort=self._sort,
            reverse=self._reversed,
            selected=chosen.key if chosen else "",
        )
        if everything:
            most = {ENGINES: 4, REQUESTS: 6, SIDECAR: 3}
            heights = [len(table), None, *(min(rows, len(others[number])) for number, rows in most.items())]
            for pane, rows in zip(self._panes, heights, strict=True):
                pane.styles.height = "1fr" if rows is None else rows + 1
        else:
            for pane in self._panes:
                pane.styles.height = "1fr"
            table = [*table, *top_view.to_tell(told, width)]
            table = [*table, [], *details][:room] if room > len(table) + 1 else table
        for number, lines in {PROCESSES: table, DETAILS: details or table, **others}.items():
            self._panes[number].show(lines)


def run(source: Source, interval_s: float) -> int:
    """Show it until somebody quits; the exit code."""
    signals = {signal.SIGTERM, signal.SIGHUP}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # until the screen can be put back
    try:
        return Top(source, interval_s).run(mouse=False) or 0  # without a mouse, so that text can be copied
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
