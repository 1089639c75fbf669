# SPDX-License-Identifier: Apache-2.0
"""A process per release, a few at a time, and what each of them said."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests import releases

if TYPE_CHECKING:
    from types import TracebackType

SCRIPT = Path(__file__).with_name("run_release.py")
AT_A_TIME = 2
LONGEST = 1800  # seconds for one release; 200 workloads take some 90 on two busy cores


@dataclass(frozen=True)
class Outcome:
    """What the process of one release said.

    Attributes:
        release: Which.
        result: Its JSON object, None if it gave none.
        said: All that it wrote beside it, for a failing test's message.
        code: Its exit code, None if it ran out of time.
    """

    release: str
    result: dict[str, Any] | None
    said: str
    code: int | None


@dataclass
class Fleet:
    """The processes of a session; use it as a context manager, and ask for outcomes.

    Attributes:
        names: The releases, in the order in which they are to run.
        package: The folder in which the `vllm_kvfix` under test lies.
        seed: What the workloads are drawn from.
        workloads: How many per release.
    """

    names: list[str]
    package: Path
    seed: int
    workloads: int
    _running: set[subprocess.Popen[str]] = field(default_factory=set)
    _outcomes: dict[str, Future[Outcome]] = field(default_factory=dict)
    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(AT_A_TIME))
    _closed: bool = False

    def __enter__(self) -> Fleet:  # noqa: PYI034  typing.Self is 3.11
        """Start."""
        releases.libraries(releases.contract_python())  # once, before two processes would
        self._outcomes = {name: self._pool.submit(self._examine, name) for name in self.names}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End whatever still runs: the session is over or was interrupted."""
        self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in list(self._running):
            process.kill()
        self._pool.shutdown()

    def outcome(self, release: str) -> Outcome:
        """What a release's process said; waits for it."""
        return self._outcomes[release].result()

    def _examine(self, release: str) -> Outcome:
        command = [
            str(releases.contract_python()), str(SCRIPT), "--release", release,
            "--workloads", str(self.workloads), "--seed", str(self.seed), "--json",
        ]  # fmt: skip  # options and their values belong together
        environ = releases.environment(release, self.package)
        with subprocess.Popen(
            command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            self._running.add(process)
            try:
                if self._closed:
                    process.kill()
                out, said = process.communicate(timeout=LONGEST)
                code: int | None = process.returncode
            except subprocess.TimeoutExpired:
                process.kill()
                out, said = process.communicate()
                code = None
            finally:
                self._running.discard(process)
        return Outcome(release, _json_of(out), said if _json_of(out) else f"{out}\n{said}", code)

    def summary(self) -> list[str]:
        """A line per release that has ended, and the coverage of all of them together."""
        lines, covered = [], Counter[str]()
        for name, future in self._outcomes.items():
            if not future.done() or future.cancelled() or future.exception() is not None:
                continue
            result = future.result().result
            if result is None:
                lines.append(f"{name:8} gave no result")
                continue
            covered.update(result["coverage"])
            lines.append(_line(result))
        if covered:
            lines.append("what happened in them: " + ", ".join(f"{k} {v}" for k, v in sorted(covered.items())))
        return lines


def _line(result: dict[str, Any]) -> str:
    differing = "?" if result["differing"] is None else result["differing"]
    return (
        f"{result['release']:8} {result['when']:8} backlog without {result['backlog_without']:6}, "
        f"with {result['backlog_with']}; {result['distinct']} workloads, {result['outputs']} outputs, "
        f"{differing} differing; {len(result.get('scenarios', {}))} scenarios; "
        f"{len(result.get('replaced', ()))} methods replaced; {result['seconds']} s"
        + ("; FAILED" if result["failure"] else "")
    )


def _json_of(text: str) -> dict[str, Any] | None:
    """The JSON object on the last line; vLLM's own words may come before it."""
    lines = text.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
