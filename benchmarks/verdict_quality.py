# SPDX-License-Identifier: Apache-2.0
"""How good the verdict is, on made-up days: `python -m benchmarks.verdict_quality [--seeds 200] [--quick] [--json]`.

Every class of `benchmarks.growth_series` with so many seeds, each judged every ten minutes of its day (and every minute
in the first half hour of a leak). Any alarm in a day that has no leak is a false one. Beside it, what the usual
rules say of the same series. The seeds begin where those end that thresholds were tried on.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
import sys
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import growth_series
from benchmarks.growth_series import COUNT, HARMLESS, HOUR, LEAKS, MIB, STEP, TIME, Array, Life
from vllm_kvfix_sidecar.verdict import Kind, Verdict, judge

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Flags = NDArray[np.bool_]

FIRST_SEED = 40_000
EVERY = 60  # samples: ten minutes
NAIVE = ("predict_linear 1h -> 4h", "deriv > 20 MiB/h, 3x1h", "Mann-Kendall 4h")
# What is asked for; the share of runs, in percent.
MOST_FALSE = {
    "warm-up + plateau": 0.0,
    "sawtooth": 1.0,
    "steps": 1.0,
    "mixed": 1.0,
    "prefix cache fills": 5.0,
    "encoder cache fills": 5.0,
    "log buffer (maxlen)": 5.0,
    "cache no container shows": 5.0,
}
LEAST_RIGHT = {
    "process": 100.0,
    "category": 95.0,
    "container": 95.0,
    "bounded or not": 95.0,
    "precision": 95.0,
    "recall": 95.0,
    "forecast": 80.0,
}


@dataclass
class Outcome:
    """What came of one day; times in seconds from the leak's onset, or from the day's begin where there is none.

    ``alarm``: the first; ``early``: one came before the leak; ``kinds``: how often each was said; ``container`` and
    ``category``: whether they were right an hour after the alarm (``at_once``: the category with the alarm itself);
    ``forecast``: whether the limit was reached in the interval, how wide it was (high over low) and how far off the
    best estimate (as a ratio); ``naive``: the first alarm of each usual rule.
    """

    name: str
    seed: int
    alarm: float | None = None
    early: bool = False
    kinds: dict[str, int] = field(default_factory=dict)
    container: bool | None = None
    category: bool | None = None
    at_once: bool | None = None
    process: bool | None = None
    in_time: bool = True
    retained: bool | None = None
    forecast: tuple[bool, float, float] | None = None
    naive: dict[str, float | None] = field(default_factory=dict)


def run(task: tuple[str, int, int]) -> Outcome:
    """Judge the day of one class and seed, every so many samples."""
    name, seed, every = task
    life = growth_series.live(name, seed)
    outcome = Outcome(name, seed)
    _watch(life, outcome, every)
    for rule, alarms in zip(NAIVE, _naive(life), strict=True):
        outcome.naive[rule] = _first_after(alarms, life.truth.onset if life.truth.leak else 0.0)
    return outcome


def _judged(life: Life, k: int) -> Verdict:
    return judge(*life.history(min(k, COUNT - 2)))


def _watch(life: Life, outcome: Outcome, every: int) -> None:
    for k in _moments(life, every):
        verdict = _judged(life, k)
        outcome.kinds[verdict.kind.value] = outcome.kinds.get(verdict.kind.value, 0) + 1
        if life.truth.retained and TIME[k] >= life.truth.onset + HOUR:
            outcome.retained = bool(outcome.retained) or verdict.kind is Kind.RETAINED
        if not verdict.alarming:
            continue
        if life.truth.leak and TIME[k] < life.truth.onset:
            outcome.early = True
            return
        outcome.alarm = float(TIME[k]) - (life.truth.onset if life.truth.leak else 0.0)
        if life.truth.leak:
            _look_closer(life, outcome, k, verdict)
        return


def _moments(life: Life, every: int) -> list[int]:
    moments = set(range(every, COUNT - 1, every))
    if life.truth.leak:
        onset = int(life.truth.onset / STEP)
        moments |= set(range(onset + 6, min(COUNT - 1, onset + 180), 6))
    return sorted(moments)


def _look_closer(life: Life, outcome: Outcome, k: int, verdict: Verdict) -> None:
    truth = life.truth
    outcome.at_once = verdict.category in truth.categories
    later = _judged(life, k + 360)
    outcome.category = later.category in truth.categories
    if truth.containers:
        outcome.container = {culprit.path for culprit in later.culprits} == set(truth.containers)
    outcome.in_time = life.reached_at is None or TIME[k] < life.reached_at
    sibling = growth_series.live("steady", outcome.seed)
    outcome.process = not any(_judged(sibling, moment).alarming for moment in {k, *range(360, COUNT, 720)})
    if life.reached_at is None or not outcome.in_time:
        return
    moment = k + int(np.random.default_rng(outcome.seed).uniform(0, 1) * (life.reached_at / STEP - k))
    left = life.reached_at - float(TIME[min(moment, COUNT - 2)]) - STEP
    if left < 5 * 60:  # nothing to foretell
        return
    interval = _judged(life, moment).time_to_limit_s
    if interval is None:
        outcome.forecast = (False, math.inf, math.inf)
    else:
        inside = interval.low <= left <= interval.high
        outcome.forecast = (inside, interval.high / max(1.0, interval.low), interval.best / left)


# ---- the usual rules ----


def _naive(life: Life) -> list[Flags]:
    """For each rule, when it alarms: 1 or 0 every ten minutes."""
    usage, anon = life.usage[::6], life.anon[::6]  # a sample a minute, as Prometheus has it
    moments = np.arange(10, len(usage), 10)
    of_usage, of_anon = _slopes(usage, moments), _slopes(anon, moments)
    predicted = usage[moments] + of_usage * 4 * HOUR > life.limit
    rising = of_anon * HOUR > 20 * MIB
    lasting = rising & np.roll(rising, 6) & np.roll(rising, 12) & (moments >= 180)  # noqa: PLR2004  # three hours
    return [predicted & (moments >= 60), lasting, _mann_kendall(anon, moments)]  # noqa: PLR2004  # an hour


def _slopes(values: Array, moments: Any) -> Array:
    """Bytes a second in the hour before each moment."""
    x = (np.arange(60) - 29.5) * 60
    found = np.zeros(len(moments))
    for i, moment in enumerate(moments):
        if moment >= 60:  # noqa: PLR2004  # an hour
            found[i] = x @ values[moment - 60 : moment] / (x @ x)
    return found


def _mann_kendall(values: Array, moments: Any) -> Flags:
    """A rise that chance makes once in a hundred, of the five-minute means of four hours."""
    means = values[: len(values) // 5 * 5].reshape(-1, 5).mean(axis=1)
    alarms = np.zeros(len(moments), dtype=bool)
    sigma = math.sqrt(48 * 47 * (2 * 48 + 5) / 18)
    for i, moment in enumerate(moments):
        part = means[: moment // 5][-48:]
        if len(part) == 48:  # noqa: PLR2004  # four hours
            alarms[i] = np.sign(np.subtract.outer(part, part))[np.tril_indices(48)].sum() / sigma > 2.33  # noqa: PLR2004
    return alarms


def _first_after(alarms: Flags, onset: float) -> float | None:
    times = np.arange(1, len(alarms) + 1) * 600.0
    late = np.nonzero(alarms & (times > onset))[0]
    return float(times[late[0]]) - onset if len(late) else None


# ---- the tables ----


def measure(classes: Iterable[str], seeds: int, every: int = EVERY, processes: int = 2) -> list[Outcome]:
    """Judge so many days of each class, in two processes."""
    tasks = [(name, FIRST_SEED + seed, every) for name in classes for seed in range(seeds)]
    if processes == 1:
        return [run(task) for task in tasks]
    outcomes = []
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for outcome in pool.imap(run, tasks, chunksize=4):
            outcomes.append(outcome)
            if len(outcomes) % seeds == 0:
                sys.stderr.write(f"  {len(outcomes):,} of {len(tasks):,} days: {outcome.name}\n")
    return outcomes


def _percent(hits: Sequence[bool]) -> float:
    return 100 * sum(hits) / len(hits) if hits else math.nan


def figures(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """The shares of runs that are right, in percent."""
    leaks = [o for o in outcomes if o.name in LEAKS]
    harmless = [o for o in outcomes if o.name in HARMLESS]
    found = [o for o in leaks if o.alarm is not None]
    right = len([o for o in found if o.in_time])
    false = len([o for o in harmless if o.alarm is not None]) + len([o for o in leaks if o.early])
    kept = [o.retained for o in outcomes if o.retained is not None]
    return {
        "process": _percent([bool(o.process) for o in found]),
        "category": _percent([bool(o.category) for o in found]),
        "category at once": _percent([bool(o.at_once) for o in found]),
        "container": _percent([o.container for o in found if o.container is not None]),
        "bounded or not": _percent([o.alarm is None for o in harmless] + [o.alarm is not None for o in leaks]),
        "precision": 100 * right / max(1, right + false),
        "recall": 100 * right / max(1, len(leaks)),
        "forecast": _percent([o.forecast[0] for o in leaks if o.forecast]),
        "retained": _percent(kept),
    }


def failures(outcomes: Sequence[Outcome]) -> list[str]:
    """What is not as good as it is asked for."""
    missed = []
    for name, most in MOST_FALSE.items():
        share = _percent([o.alarm is not None for o in outcomes if o.name == name])
        if share > most:
            missed.append(f"{name}: false alarms in {share:.1f} % of the days, at most {most:.0f} % are asked for")
    for name, share in figures(outcomes).items():
        if share < LEAST_RIGHT.get(name, 0.0):
            missed.append(f"{name}: {share:.1f} %, at least {LEAST_RIGHT[name]:.0f} % are asked for")
    return missed


def _minutes(seconds: Sequence[float]) -> str:
    if not seconds:
        return f"{'never':>15}"
    cuts = sorted(seconds)
    p90 = cuts[min(len(cuts) - 1, math.ceil(0.9 * len(cuts)) - 1)]
    return f"{statistics.median(cuts) / 60:6.0f} / {p90 / 60:5.0f} "


def report(outcomes: Sequence[Outcome]) -> str:
    """The tables for a reader."""
    lines = [f"{len(outcomes):,} days; false alarms in percent of the days"]
    lines.append(
        f"{'no leak':26s} {'verdict':>8} " + " ".join(f"{rule:>24}" for rule in NAIVE) + "   said, % of the time"
    )
    for name in HARMLESS:
        ours = [o for o in outcomes if o.name == name]
        if ours:
            naive = [_percent([o.naive[rule] is not None for o in ours]) for rule in NAIVE]
            shares = " ".join(f"{share:24.1f}" for share in naive)
            lines.append(f"{name:26s} {_percent([o.alarm is not None for o in ours]):8.1f} {shares}   {_said(ours)}")
    lines.append("")
    lines.append("found in percent of the days; minutes until then: median / p90")
    lines.append(f"{'leak':26s} {'verdict':>8} {'minutes':>15} " + " ".join(f"{rule:>24}" for rule in NAIVE))
    for name in LEAKS:
        ours = [o for o in outcomes if o.name == name]
        if ours:
            seconds = [o.alarm for o in ours if o.alarm is not None]
            cells = []
            for rule in NAIVE:
                theirs = [time for o in ours if (time := o.naive[rule]) is not None]
                cells.append(f"{100 * len(theirs) / len(ours):6.1f} {_minutes(theirs):>17}")
            share = _percent([o.alarm is not None for o in ours])
            lines.append(f"{name:26s} {share:8.1f} {_minutes(seconds):>15} {' '.join(cells)}")
    lines.append("")
    for name, share in figures(outcomes).items():
        asked = f"(asked for: {LEAST_RIGHT[name]:.0f})" if name in LEAST_RIGHT else ""
        lines.append(f"{name:26s} {share:8.1f} % {asked}")
    foretold = [o.forecast for o in outcomes if o.forecast]
    if foretold:
        widths = sorted(width for _, width, _ in foretold)
        off = sorted(max(ratio, 1 / max(1e-9, ratio)) for _, _, ratio in foretold)
        lines.append(
            f"{'width of the forecasts':26s} {statistics.median(widths):8.2f} (median of high / low of {len(widths)}); "
            f"the best estimate is off by a factor of {statistics.median(off):.2f} (median)"
        )
    for rule in NAIVE:
        false = sum(o.naive[rule] is not None for o in outcomes if o.name in HARMLESS)
        true = sum(o.naive[rule] is not None for o in outcomes if o.name in LEAKS)
        leaks = sum(o.name in LEAKS for o in outcomes)
        lines.append(
            f"{rule:26s} precision {100 * true / max(1, true + false):.1f} %, recall {100 * true / max(1, leaks):.1f} %"
        )
    return "\n".join([*lines, *(f"NOT REACHED: {line}" for line in failures(outcomes))]) + "\n"


def _said(outcomes: Sequence[Outcome]) -> str:
    total = sum(sum(o.kinds.values()) for o in outcomes)
    parts = []
    for kind in Kind:
        count = sum(o.kinds.get(kind.value, 0) for o in outcomes)
        if count:
            parts.append(f"{kind.value.split()[0]} {100 * count / total:.0f}")
    return ", ".join(parts)


def main(arguments: list[str] | None = None) -> int:
    """Measure and print; 1 if a figure is not reached."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.verdict_quality", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--seeds", type=int, default=200, help="days of each class")
    parser.add_argument("--quick", action="store_true", help="six days of each class, judged every half hour")
    parser.add_argument("--classes", nargs="*", choices=[*HARMLESS, *LEAKS], default=[*HARMLESS, *LEAKS])
    parser.add_argument("--json", action="store_true", help="the outcomes as JSON in place of the tables")
    chosen = parser.parse_args(arguments)
    outcomes = measure(chosen.classes, 6, 180) if chosen.quick else measure(chosen.classes, chosen.seeds)
    if chosen.json:
        found = {"figures": figures(outcomes), "failures": failures(outcomes), "days": [asdict(o) for o in outcomes]}
        sys.stdout.write(json.dumps(found) + "\n")
    else:
        sys.stdout.write(report(outcomes))
    return 1 if failures(outcomes) else 0


if __name__ == "__main__":
    raise SystemExit(main())
