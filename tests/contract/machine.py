# SPDX-License-Identifier: Apache-2.0
"""Random workloads: a stock scheduler is driven and recorded, then the same operations meet the back-port.

Each workload compares every field of every `SchedulerOutput`, and the list that the back-port is about: without
it, as long as what recording managers allocated; with it, empty after every operation. What a workload really
did is counted, so that nobody can claim coverage that did not happen.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import seed as with_seed
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests import releases
from tests.contract import accounts, families, running_release, snapshots
from tests.contract import driver as d

if TYPE_CHECKING:
    from collections.abc import Iterator

Operation = tuple[str, dict[str, Any]]

CLOSING_STEPS = 40
LAST_WAVE = 7
ABORTABLE = ("PREEMPTED", "WAITING_FOR_REMOTE_KVS", "RUNNING", "WAITING")


@dataclasses.dataclass(frozen=True)
class Theme:
    """What some of the workloads have in common; all that is not fixed is drawn.

    Attributes:
        family: A key of `driver.FAMILIES`.
        fixed: Options of `driver.Options`.
    """

    family: str
    fixed: dict[str, Any]


THEMES: tuple[Theme, ...] = (
    Theme("full", {"num_blocks": 24, "connector": None}),
    Theme("full", {"connector": "remote", "spec_tokens": 0, "num_blocks": 64}),
    Theme("full", {"connector": "bench", "spec_tokens": 0}),
    Theme("full", {"async_scheduling": True, "spec_tokens": 2, "spec_method": "eagle", "connector": None}),
    Theme("full", {"chunked_prefill": False, "prefix_caching": False, "connector": None}),
    Theme("full", {"chunked_prefill": True, "max_num_batched_tokens": 48, "connector": None, "spec_tokens": 0}),
    Theme("mla", {}),
    Theme("turboquant", {"spec_tokens": 3, "async_scheduling": False}),
    Theme("hidden-state", {}),
    Theme("sliding", {}),
    Theme("chunked-local", {"spec_tokens": 0}),
    Theme("full+sliding", {}),
    Theme("full+mamba", {"prefix_caching": True, "num_blocks": 40}),
    Theme("full+mamba", {"prefix_caching": False}),
    Theme("full, zeroed", {}),
)


class MismatchError(AssertionError):
    """The back-port changed something that it must not, or left something that it should have removed."""


@dataclasses.dataclass
class Totals:
    """What all workloads of a run did.

    Attributes:
        workloads: How many ran to their end.
        distinct: Hashes of what they did.
        backlog_without: Ids left in the lists at the end of the workloads, summed, without the back-port.
        backlog_with: The most ids that any list held after any operation, with it, where nothing is zeroed.
        outputs: `SchedulerOutput`s compared.
        coverage: How often each thing happened.
        upstream_errors: Exceptions of vLLM's own, on the stock scheduler, by text; that workload ends there.
    """

    workloads: int = 0
    distinct: set[int] = dataclasses.field(default_factory=set)
    backlog_without: int = 0
    backlog_with: int = 0
    outputs: int = 0
    coverage: Counter[str] = dataclasses.field(default_factory=Counter)
    upstream_errors: Counter[str] = dataclasses.field(default_factory=Counter)


# What every release's run must have done at least once; those with a family only where the release has it.
REQUIRED: tuple[str, ...] = (
    "step",
    "prefix-cache hit",
    "chunked prefill",
    "preemption",
    "resumption",
    "draft tokens",
    "draft tokens with lookahead slots",
    "async step with a batch in flight",
    "external blocks, loaded at once",
    "external blocks, loaded asynchronously",
    "abort in WAITING",
    "abort in RUNNING",
    "abort in PREEMPTED",
    "abort in WAITING_FOR_REMOTE_KVS",
    "abort of a request already gone",
    "prefix cache reset",
    "prefix cache reset with running requests",
    "without prefix caching",
    "without chunked prefill",
    "recorded: blocks",
    "recorded: reused blocks",
    "recorded: refusals",
    "recorded: takers",
)


def required() -> tuple[str, ...]:
    """The names that `Totals.coverage` must hold for the release in this process."""
    zeroes = ("ids to zero",) if "full+mamba" in families.families() and _release().when != "before" else ()
    drawn = {theme.family for theme in THEMES}
    return (*REQUIRED, *zeroes, *(f"family {name}" for name in families.families() if name in drawn))


def _release() -> releases.Release:
    return releases.BY_VERSION[running_release.release()]


# -- operations ---------------------------------------------------------------------------------------------------


def perform(driver: d.Driver, operation: Operation) -> Any:
    """Carry out one operation; what it gave, as a comparable value, an exception of vLLM's included."""
    kind, arguments = operation
    try:
        if kind == "step":
            # The snapshot comes before the answer: later steps change lists that the output shares.
            output = snapshots.snapshot(driver.schedule())
            depth = d.ASYNC_DEPTH if driver.options.async_scheduling else 0
            while driver.in_flight > depth:
                driver.update()
            return output
        if kind == "add":
            driver.add_request(**arguments)
        elif kind == "abort":
            driver.finish(*arguments["names"])
        elif kind == "reset":
            return driver.reset_prefix_cache(running=arguments["running"])
        else:
            driver.drain()
    except Exception as error:  # noqa: BLE001  vLLM's own failures must be the same on both sides
        return ("raised", type(error).__name__, str(error))
    return None


def _raised(outcome: Any) -> bool:
    return isinstance(outcome, tuple) and len(outcome) == 3 and outcome[0] == "raised"


def _count_output(driver: d.Driver, output: Any, counts: Counter[str]) -> None:
    """Count what a step did, from vLLM's own object."""
    options = driver.options
    counts["step"] += 1
    if options.async_scheduling and driver.in_flight > 1:
        counts["async step with a batch in flight"] += 1
    counts["preemption"] += len(output.preempted_req_ids or ())
    counts["resumption"] += len(output.scheduled_cached_reqs.resumed_req_ids)
    counts["ids to zero"] += len(getattr(output, "new_block_ids_to_zero", None) or ())
    for new in output.scheduled_new_reqs:
        scheduled = output.num_scheduled_tokens[new.req_id]
        if new.num_computed_tokens + scheduled < len(new.prompt_token_ids):
            counts["chunked prefill"] += 1
        if new.num_computed_tokens and options.connector is None:
            counts["prefix-cache hit"] += 1
        if new.num_computed_tokens and options.connector is not None:
            counts["external blocks, loaded at once"] += 1
    drafts = sum(map(len, output.scheduled_spec_decode_tokens.values()))
    counts["draft tokens"] += drafts
    if driver.scheduler.num_lookahead_tokens:
        counts["draft tokens with lookahead slots"] += drafts


# -- the two runs -------------------------------------------------------------------------------------------------


class Stock:
    """A stock scheduler, driven and recorded.

    Attributes:
        operations: What was done to it.
        outcomes: What each gave.
        coverage: What happened.
        broken: The text of an exception of vLLM's own that ended it.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.driver = d.make_scheduler(count=True, **options)
        self.driver.on_output = lambda output: _count_output(self.driver, output, self.coverage)
        self.operations: list[Operation] = []
        self.outcomes: list[Any] = []
        self.lists: list[tuple[int, ...]] = []
        self.coverage: Counter[str] = Counter({f"family {options['family']}": 1})
        self.broken: str | None = None
        self._names = 0
        if not options["prefix_caching"]:
            self.coverage["without prefix caching"] += 1
        if not options["chunked_prefill"]:
            self.coverage["without chunked prefill"] += 1

    def do(self, kind: str, **arguments: Any) -> Any:
        """Carry out and record one operation, unless vLLM broke before."""
        if self.broken is not None:
            return None
        outcome = perform(self.driver, (kind, arguments))
        self.operations.append((kind, arguments))
        self.outcomes.append(outcome)
        self.lists.append(d.backlog(self.driver))
        if _raised(outcome):
            if kind == "reset":  # a refusal, not a failure
                self.coverage["prefix cache reset refused"] += 1
            else:
                self.broken = f"{kind}: {outcome[1]}: {outcome[2]}"
        else:
            self._check_backlog(kind)
            waiting = self.states("WAITING_FOR_REMOTE_KVS")
            self.coverage["external blocks, loaded asynchronously"] += kind == "step" and bool(waiting)
        return outcome

    def add(self, **arguments: Any) -> None:
        """Add a request of a fresh name."""
        self._names += 1
        self.do("add", name=f"r{self._names}", **arguments)

    def abort(self, name: str) -> None:
        """Abort a request, and count in which state it was."""
        state = self.driver.state(name)
        self.do("abort", names=[name])
        self.coverage[f"abort in {state}" if state else "abort of a request already gone"] += 1

    def reset(self, *, running: bool) -> None:
        """Reset the prefix cache."""
        had = bool(self.driver.scheduler.running)
        refused = self.coverage["prefix cache reset refused"]
        self.do("reset", running=running)
        if self.coverage["prefix cache reset refused"] == refused:
            self.coverage["prefix cache reset with running requests" if running and had else "prefix cache reset"] += 1

    def states(self, state: str) -> list[str]:
        """Names of the requests in a state, in the scheduler's order."""
        return [n for n, r in self.driver.scheduler.requests.items() if r.status.name == state]

    def close(self) -> None:
        """A last wave; abort one request in each state as it comes up, twice; then run dry, for a bounded time."""
        remote = self.options["connector"] == "remote"
        for number in range(LAST_WAVE):
            length = 70 + 5 * number
            self.add(prompt_seed=90 + number, prompt_length=length, max_tokens=16, external=64 if remote else 0)
        wanted = set(ABORTABLE)
        for _ in range(CLOSING_STEPS):
            if not self.driver.scheduler.has_unfinished_requests():
                break
            for state in ABORTABLE:
                names = self.states(state)
                if state in wanted and len(names) > (state in {"RUNNING", "WAITING"}):
                    wanted.discard(state)
                    self.abort(names[-1])
                    self.abort(names[-1])
            self.do("step")
        self.do("drain")
        self.reset(running=True)
        self.do("step")

    def _check_backlog(self, kind: str) -> None:
        """The leak is there, and is what the recording managers allocated; else the comparison proves nothing."""
        release, family = _release(), families.FAMILIES[self.options["family"]]
        if family.zeroing or (not release.affected and kind != "step"):
            return
        expected = tuple(
            count if spec in release.records else 0
            for spec, count in zip(family.specs, d.allocated(self.driver), strict=True)
        )
        if self.lists[-1] != expected:
            msg = f"stock vLLM {release.version}, {family.name}: backlog {self.lists[-1]}, but allocated {expected}"
            raise MismatchError(msg)


def replay(stock: Stock) -> int:
    """Do the same to a scheduler that is made with back-port and recorder in force; returns the longest list seen.

    Raises:
        MismatchError: Anything at all differs.
        AccountError: The recorder told what was not so.
    """
    with accounts.ring_folder() as folder:
        driver, outputs, longest = _replay(stock, {"VLLM_KVFIX_RING_DIR": str(folder)})
        if stock.broken is None:
            stock.coverage.update(accounts.check(accounts.read(folder), driver, outputs))
    return longest


def _replay(stock: Stock, environ: dict[str, str]) -> tuple[d.Driver, list[Any], int]:
    from vllm_kvfix import plugin  # noqa: PLC0415  the package under test, only in a release's process

    family = families.FAMILIES[stock.options["family"]]
    longest = 0
    outputs: list[Any] = []
    plugin.register(environ)
    try:
        _check_applied(plugin)
        driver = d.make_scheduler(count=True, **stock.options)
        driver.on_output = lambda _: outputs.append(_state(driver))
        for number, operation in enumerate(stock.operations):
            outcome = perform(driver, operation)
            lists = d.backlog(driver)
            if outcome != stock.outcomes[number]:
                found = snapshots.differences(stock.outcomes[number], outcome)
                raise MismatchError(_where(stock, number, "differs: " + "\n  ".join(found)))
            if family.zeroing:
                if lists != stock.lists[number]:
                    raise MismatchError(_where(stock, number, f"ids waiting {lists}, stock {stock.lists[number]}"))
            else:
                longest = max(longest, *lists)
                if any(lists):
                    raise MismatchError(_where(stock, number, f"backlog {lists} with the back-port"))
        if stock.broken is None:
            _end_all(driver)
    finally:
        left = plugin.restore()
    if left:
        msg = f"restore() left {left}"
        raise MismatchError(msg)
    return driver, outputs, longest


def _state(driver: d.Driver) -> tuple[int, int, int]:
    running, waiting = driver.scheduler.get_request_counts()
    return driver.scheduler.kv_cache_manager.block_pool.get_num_free_blocks(), running, waiting


def _end_all(driver: d.Driver) -> None:
    """Abort what still lives, and step until vLLM has forgotten it: a load from elsewhere must arrive first."""
    driver.finish(*driver.scheduler.requests)
    for _ in range(3):
        driver.step()
        driver.drain()


def _check_applied(plugin: Any) -> None:
    affected = _release().affected
    for report in plugin.report():
        if bool(report.replaced) != affected:
            said = f"{report.decision}, {report.replaced}"
            msg = f"vLLM {running_release.release()}: affected is {affected}, but the plugin says {said}"
            raise MismatchError(msg)
    if affected and not plugin.report():
        msg = "register() left no report"
        raise MismatchError(msg)


def _where(stock: Stock, number: int, what: str) -> str:
    history = "\n".join(f"  {i:3} {op}" for i, op in enumerate(stock.operations[: number + 1]))
    return f"vLLM {running_release.release()}, operation {number} of {stock.options}: {what}\n{history}"


# -- the machine --------------------------------------------------------------------------------------------------


@st.composite
def options(draw: st.DrawFn, theme: Theme) -> dict[str, Any]:
    """Options of a scheduler, as the theme fixes or chance draws them."""
    family = families.FAMILIES[theme.family]
    groups = len(family.specs)
    drawn: dict[str, Any] = {
        "num_blocks": draw(st.sampled_from((18, 24, 40, 64))) * groups,
        "prefix_caching": draw(st.booleans()),
        "async_scheduling": draw(st.booleans()),
        "chunked_prefill": draw(st.sampled_from((True, True, False))),
        "spec_tokens": draw(st.sampled_from((0, 0, 2, 3))),
        "spec_method": draw(st.sampled_from(("ngram", "eagle"))),
        "max_num_seqs": draw(st.sampled_from((4, 8, 16))),
        "max_num_batched_tokens": draw(st.sampled_from((64, 128, 256))),
        "connector": draw(st.sampled_from((None, None, "bench", "remote"))) if family.connector else None,
        **theme.fixed,
    }
    if "MambaSpec" in family.specs:
        drawn["block_align_mamba"] = drawn["prefix_caching"]
        drawn["chunked_prefill"] = drawn["chunked_prefill"] or drawn["prefix_caching"]
    if not drawn["chunked_prefill"]:
        drawn["max_num_batched_tokens"] = 256
    return {"family": theme.family, **drawn}


def make_machine(theme: Theme, totals: Totals) -> type[RuleBasedStateMachine]:  # noqa: C901  its methods are the rules
    """The state machine of one theme, which adds what its workloads did to `totals`."""
    requests = st.fixed_dictionaries(
        {
            "prompt_seed": st.integers(0, 3),
            "prompt_length": st.integers(1, 120),
            "max_tokens": st.integers(1, 24),
            "external": st.integers(0, 96),
        }
    )

    class Workload(RuleBasedStateMachine):
        stock: Stock

        @initialize(drawn=options(theme), first=st.lists(requests, min_size=6, max_size=14))
        def start(self, drawn: dict[str, Any], first: list[dict[str, Any]]) -> None:
            self.stock = Stock(drawn)
            for request in first:
                self.add(request)

        @rule(request=requests)
        def add(self, request: dict[str, Any]) -> None:
            external = request["external"] if self.stock.options["connector"] == "remote" else 0
            self.stock.add(**{**request, "external": external})

        @rule(times=st.integers(1, 6))
        def step(self, times: int) -> None:
            for _ in range(times):
                self.stock.do("step")

        @precondition(lambda self: self.stock.driver.scheduler.requests)
        @rule(data=st.data())
        def abort(self, data: st.DataObject) -> None:
            present = [s for s in ABORTABLE if self.stock.states(s)]
            if present:
                names = self.stock.states(data.draw(st.sampled_from(present)))
                self.stock.abort(data.draw(st.sampled_from(names)))

        @rule(number=st.integers(1, 8))
        def abort_again(self, number: int) -> None:
            self.stock.abort(f"r{number}")

        @rule(running=st.booleans())
        def reset_prefix_cache(self, *, running: bool) -> None:
            self.stock.reset(running=running)

        def teardown(self) -> None:
            if not hasattr(self, "stock"):
                return
            stock = self.stock
            stock.close()
            totals.backlog_with = max(totals.backlog_with, replay(stock))
            totals.workloads += 1
            totals.distinct.add(hash(repr((stock.options, stock.operations))))
            totals.backlog_without += 0 if families.FAMILIES[theme.family].zeroing else sum(stock.lists[-1])
            totals.outputs += sum(kind == "step" for kind, _ in stock.operations)
            totals.coverage.update(stock.coverage)
            if stock.broken is not None:
                totals.upstream_errors[f"{theme.family}: {stock.broken}"] += 1

    Workload.__name__ = Workload.__qualname__ = f"Workload_{theme.family}"
    return Workload


def shares(workloads: int) -> Iterator[tuple[Theme, int]]:
    """The themes that this release can have, each with its share of the workloads (at least one)."""
    themes = [t for t in THEMES if t.family in families.families()]
    for number, theme in enumerate(themes):
        share = workloads // len(themes) + (number < workloads % len(themes))
        yield theme, max(share, 1)


def run(workloads: int, seed: int, totals: Totals, *, shrink: bool = False) -> Totals:
    """Run at least so many workloads, drawn from the seed, and add what they did to `totals`.

    Args:
        workloads: At least so many.
        seed: The same seed draws the same workloads.
        totals: What is added to.
        shrink: Look for the smallest failing workload; takes minutes.

    Raises:
        Exception: What a failing workload raised, a `MismatchError` or vLLM's own.
    """
    for number, (theme, share) in enumerate(shares(workloads)):
        print(f"  {theme.family} {theme.fixed}: {share} workloads", file=sys.stderr, flush=True)  # noqa: T201  progress
        machine = with_seed(seed * len(THEMES) + number)(make_machine(theme, totals))
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=share + 1,  # the first that hypothesis tries is always the same, smallest one
                stateful_step_count=15,
                deadline=None,
                database=None,
                print_blob=False,
                phases=(Phase.generate, Phase.shrink) if shrink else (Phase.generate,),
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
    return totals
