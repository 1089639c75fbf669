# SPDX-License-Identifier: Apache-2.0
"""The two pages for Grafana: whether host memory is a problem and why, and what requests do with their KV blocks."""

from __future__ import annotations

from vllm_kvfix_sidecar import conventions as names
from vllm_kvfix_sidecar.monitoring.grafana import (
    COLUMNS,
    RATE,
    TEMPO,
    Annotation,
    Page,
    Panel,
    Query,
    Search,
    Variable,
    heatmap,
    lines,
    number,
    table,
)
from vllm_kvfix_sidecar.monitoring.promql import (
    BUCKET_BOUND,
    INSTANCE,
    JOB,
    among,
    buckets,
    equals,
    label,
    labels,
    select,
)

PROCESS, ENGINE = "process", "engine"
_HERE = (f'{JOB}=~"$job"', f'{INSTANCE}=~"$instance"')
_PROCESS = (*_HERE, f'{label(names.ATTR_PROCESS_NAME)}=~"${PROCESS}"')
_ENGINE = (*_HERE, f'{label(names.ATTR_ENGINE_INDEX)}=~"${ENGINE}"')
_WHO = labels(INSTANCE, names.ATTR_PROCESS_NAME, names.ATTR_PID)
_WHICH = labels(INSTANCE, names.ATTR_ENGINE_INDEX, names.ATTR_PID)
_BEST = equals(names.ATTR_BOUND, "best")


def _shown(*attributes: str) -> str:
    """A legend of these labels."""
    return " ".join(f"{{{{{label(name)}}}}}" for name in attributes)


_NAMED = _shown(INSTANCE, names.ATTR_PROCESS_NAME, names.ATTR_PID)
_NUMBERED = _shown(INSTANCE, names.ATTR_ENGINE_INDEX)


def _says(text: str, *metrics: names.Metric) -> str:
    return f"{text}\n\n{', '.join(metric.series for metric in metrics)}"


def _of_process(metric: names.Metric, *matchers: str, by: str = _WHO) -> str:
    return f"max by ({by}) ({select(metric, *_PROCESS, *matchers)})"


def _of_engine(metric: names.Metric, *matchers: str, by: str = _WHICH) -> str:
    return f"max by ({by}) ({select(metric, *_ENGINE, *matchers)})"


def _rate(metric: names.Metric, *matchers: str, by: str = _WHICH) -> str:
    return f"sum by ({by}) (rate({select(metric, *matchers, window=RATE)}))"


# ---- on call ----


def _alarming() -> Panel:
    return number(
        "Processes that grow without a known end",
        _says("Verdicts that somebody must act on: unbounded, or unexplained growth.", names.VERDICT_ALARMING),
        Query(f"sum({select(names.VERDICT_ALARMING, *_PROCESS)})"),
        "short",
        [(None, "green"), (1, "red")],
    )


def _shortest() -> Panel:
    return number(
        "Shortest time to the limit",
        _says(
            "Of all processes that grow, a warm-up included; none: no growth reaches it.", names.VERDICT_TIME_TO_LIMIT
        ),
        Query(f"min({select(names.VERDICT_TIME_TO_LIMIT, *_PROCESS, _BEST)})"),
        "s",
        [(None, "red"), (4 * 3600, "orange"), (24 * 3600, "green")],
    )


def _unpatched() -> Panel:
    states = among(names.ATTR_STATE, "refused", "off", "unknown")
    return number(
        "Engines without the fix",
        _says("The fix is refused, off, or not decided yet; not those that need none.", names.PATCH_STATE),
        Query(f"sum({select(names.PATCH_STATE, *_HERE, states)})"),
        "short",
        [(None, "green"), (1, "orange")],
    )


def _health() -> Panel:
    return number(
        "Sidecars that answer",
        _says("Share of the scrapes that succeed now; and up, of Prometheus itself.", names.ENGINES),
        Query(f"avg(up{{{', '.join(_HERE)}}})"),
        "percentunit",
        [(None, "red"), (1, "green")],
    )


def _verdicts() -> Panel:
    kind = label(names.ATTR_VERDICT_KIND)
    path, category = label(names.ATTR_CONTAINER_PATH), label(names.ATTR_MEMORY_CATEGORY)
    fastest = f"topk by ({_WHO}) (1, {_of_process(names.VERDICT_CULPRIT, by=f'{_WHO}, {path}')})"
    return table(
        "Verdicts",
        _says(
            "What each process's memory does, how fast, until when, which part of it, and which container owns most.",
            *(names.VERDICT, names.VERDICT_SLOPE, names.VERDICT_TIME_TO_LIMIT, names.VERDICT_CULPRIT),
            names.VERDICT_CATEGORY,
        ),
        [
            Query(f"{_of_process(names.VERDICT, by=f'{_WHO}, {kind}')} == 1", instant=True),
            Query(_of_process(names.VERDICT_SLOPE, _BEST), instant=True),
            Query(_of_process(names.VERDICT_TIME_TO_LIMIT, _BEST), instant=True),
            Query(fastest, instant=True),
            Query(_of_process(names.VERDICT_CATEGORY, by=f"{_WHO}, {category}"), instant=True),
        ],
        {
            INSTANCE: "instance",
            label(names.ATTR_PROCESS_NAME): "process",
            label(names.ATTR_PID): "pid",
            kind: "verdict",
            "Value #B": "growth per hour",
            "Value #C": "time to the limit",
            category: "category",
            path: "container",
            "Value #D": "of it, per hour",
        },
        {"growth per hour": "bytes", "time to the limit": "s", "of it, per hour": "bytes"},
    )


def _categories_of_growth() -> Panel:
    """What part of each process grows: a verdict's category in numbers."""
    grown = f"delta({select(names.MEMORY_CATEGORY, *_PROCESS, window='1h')})"
    return lines(
        "What grew in the last hour, by category",
        _says("Of each process and category, by how much it is more than an hour ago.", names.MEMORY_CATEGORY),
        Query(
            f"max by ({_WHO}, {label(names.ATTR_MEMORY_CATEGORY)}) ({grown})",
            f"{_NAMED} {_shown(names.ATTR_MEMORY_CATEGORY)}",
        ),
        unit="bytes",
    )


def _patches() -> Panel:
    state = label(names.ATTR_STATE)
    backlog = f"sum by ({_WHICH}) ({select(names.BACKLOG, *_HERE)})"
    return table(
        "Engines",
        _says(
            "State of the fix, block ids in new_block_ids, seconds since the engine last wrote.",
            *(names.PATCH_STATE, names.BACKLOG, names.RING_AGE),
        ),
        [
            Query(f"max by ({_WHICH}, {state}) ({select(names.PATCH_STATE, *_HERE)}) == 1", instant=True),
            Query(backlog, instant=True),
            Query(f"max by ({_WHICH}) ({select(names.RING_AGE, *_HERE)})", instant=True),
        ],
        {
            INSTANCE: "instance",
            label(names.ATTR_ENGINE_INDEX): "engine",
            label(names.ATTR_PID): "pid",
            state: "fix",
            "Value #B": "backlog",
            "Value #C": "last wrote",
        },
        {"last wrote": "s"},
    )


def _cgroups() -> list[Panel]:
    cgroup, state = label(names.ATTR_CGROUP), label(names.ATTR_MEMORY_STATE)
    states = among(names.ATTR_MEMORY_STATE, "anon", "file", "shmem", "kernel", "swap")
    usage = select(names.CGROUP_USAGE, *_HERE)
    limit = select(names.CGROUP_LIMIT, *_HERE)
    by = f"{INSTANCE}, {cgroup}"
    return [
        lines(
            "Memory of the cgroup against its limit",
            _says(
                "By state, not stacked: shmem is a part of file. Beyond the limit the kernel kills; file is given back "
                "before that, but for shmem.",
                *(names.CGROUP_STATE, names.CGROUP_LIMIT, names.CGROUP_HIGH),
            ),
            Query(
                f"max by ({by}, {state}) ({select(names.CGROUP_STATE, *_HERE, states)})", f"{{{{{state}}}}} {_CGROUP}"
            ),
            Query(f"max by ({by}) ({limit})", f"limit {_CGROUP}"),
            Query(f"max by ({by}) ({select(names.CGROUP_HIGH, *_HERE)})", f"high mark {_CGROUP}"),
            unit="bytes",
        ),
        lines(
            "Share of the limit in use",
            _says("File pages are counted in.", names.CGROUP_USAGE, names.CGROUP_LIMIT),
            Query(f"max by ({by}) ({usage} / {limit})", _CGROUP),
            unit="percentunit",
        ),
        lines(
            "Time spent waiting for memory",
            _says("Share of the time in which some, or all, processes waited.", names.CGROUP_PRESSURE),
            Query(
                _rate(names.CGROUP_PRESSURE, *_HERE, by=f"{by}, {label(names.ATTR_PRESSURE)}"),
                f"{_shown(names.ATTR_PRESSURE)} {_CGROUP}",
            ),
            unit="percentunit",
        ),
        lines(
            "OOM kills and other events of the cgroup",
            _says("How many in the last hour.", names.CGROUP_EVENTS),
            Query(
                f"sum by ({by}, {label(names.ATTR_CGROUP_EVENT)}) "
                f"(increase({select(names.CGROUP_EVENTS, *_HERE, window='1h')}))",
                f"{_shown(names.ATTR_CGROUP_EVENT)} {_CGROUP}",
            ),
        ),
    ]


_CGROUP = _shown(INSTANCE, names.ATTR_CGROUP)


def _memory() -> list[Panel]:
    anonymous = among(names.ATTR_MEMORY_STATE, "anon", "swap")
    category = label(names.ATTR_MEMORY_CATEGORY)
    return [
        lines(
            "RssAnon and swap",
            _says("What a process has of its own and cannot be read from a file again.", names.MEMORY_STATE),
            Query(f"sum by ({_WHO}) ({select(names.MEMORY_STATE, *_PROCESS, anonymous)})", _NAMED),
            unit="bytes",
        ),
        lines(
            "RSS, PSS and USS",
            _says(
                "Resident memory; with a share of what others have, too; without that.",
                *(names.PROCESS_MEMORY, names.MEMORY_PSS, names.MEMORY_USS),
            ),
            Query(_of_process(names.PROCESS_MEMORY), f"RSS {_NAMED}"),
            Query(_of_process(names.MEMORY_PSS), f"PSS {_NAMED}"),
            Query(_of_process(names.MEMORY_USS), f"USS {_NAMED}"),
            unit="bytes",
        ),
        lines(
            "Categories, with the rest",
            _says("Resident memory by what it is for; the rest is what fits no category.", names.MEMORY_CATEGORY),
            Query(
                _of_process(names.MEMORY_CATEGORY, by=f"{_WHO}, {category}"),
                f"{_NAMED} {_shown(names.ATTR_MEMORY_CATEGORY)}",
            ),
            unit="bytes",
        ).stacked(),
        _categories_of_growth(),
        lines(
            "malloc: in use, and kept though freed",
            _says("What glibc has handed out, and what it keeps.", names.MALLOC_IN_USE, names.MALLOC_RETAINED),
            Query(_of_process(names.MALLOC_IN_USE), f"in use {_NAMED}"),
            Query(_of_process(names.MALLOC_RETAINED), f"kept {_NAMED}"),
            unit="bytes",
        ),
        lines(
            "Share of the growth that containers explain",
            _says("1: known containers make up all of it.", names.VERDICT_EXPLAINED),
            Query(_of_process(names.VERDICT_EXPLAINED), _NAMED),
            unit="percentunit",
        ),
    ]


def _containers() -> list[Panel]:
    path = label(names.ATTR_CONTAINER_PATH)
    by = f"{_WHO}, {path}"
    figures = (
        (names.CONTAINER_LENGTH, "entries", "short"),
        (names.CONTAINER_CAPACITY, "capacity", "short"),
        (names.CONTAINER_SIZE, "size", "bytes"),
        (names.CONTAINER_DRAINED, "drained", "percentunit"),
        (names.CONTAINER_ORPHANS, "orphans", "short"),
        (names.CONTAINER_ORPHAN_AGE, "age of the orphans", "s"),
    )
    letters = {chr(ord("A") + at): heading for at, (_, heading, _) in enumerate(figures)}
    return [
        table(
            "Tracked containers",
            _says(
                "Drained: entries that left, of those that came; near 0 and without a capacity: it leaks. Orphans: "
                "keys of no live request.",
                *(metric for metric, _, _ in figures),
            ),
            [Query(_of_process(metric, by=by), instant=True) for metric, _, _ in figures],
            {
                INSTANCE: "instance",
                label(names.ATTR_PROCESS_NAME): "process",
                label(names.ATTR_PID): "pid",
                path: "container",
                **{f"Value #{letter}": heading for letter, heading in letters.items()},
            },
            {heading: unit for _, heading, unit in figures},
        ),
        lines(
            "Entries of the ten largest containers",
            _says("By their size in bytes.", names.CONTAINER_LENGTH, names.CONTAINER_SIZE),
            Query(
                f"max by ({by}) ({select(names.CONTAINER_LENGTH, *_PROCESS)})\n"
                f"and topk(10, max by ({by}) ({select(names.CONTAINER_SIZE, *_PROCESS)}))",
                f"{_NAMED} {_shown(names.ATTR_CONTAINER_PATH)}",
            ),
        ),
        lines(
            "Block ids in new_block_ids",
            _says("One that only grows is the leak of vLLM 0.17.1 to 0.25.1.", names.BACKLOG),
            Query(
                f"max by ({_WHICH}, {label(names.ATTR_GROUP)}) ({select(names.BACKLOG, *_HERE)})",
                f"{_NUMBERED} group {_shown(names.ATTR_GROUP)}",
            ),
        ),
    ]


def _pool(matchers: tuple[str, ...]) -> Panel:
    state = label(names.ATTR_STATE)
    return lines(
        "KV-cache blocks",
        _says("Blocks that requests hold, and free ones; they add up to the pool.", names.POOL_USAGE, names.POOL_LIMIT),
        Query(f"max by ({_WHICH}, {state}) ({select(names.POOL_USAGE, *matchers)})", f"{{{{{state}}}}} {_NUMBERED}"),
        Query(f"max by ({_WHICH}) ({select(names.POOL_LIMIT, *matchers)})", f"limit {_NUMBERED}"),
    ).stacked()


def _quantiles(
    title: str, text: str, metric: names.Metric, matchers: tuple[str, ...] = _ENGINE, unit: str = "short"
) -> Panel:
    counted = f"sum by ({BUCKET_BOUND}) (rate({buckets(metric, *matchers, window=RATE)}))"
    return lines(
        title,
        _says(f"{text} Dots are single requests: click one for its trace.", metric),
        *(
            Query(f"histogram_quantile({share}, {counted})", f"p{share * 100:g}", exemplars=True)
            for share in (0.5, 0.9, 0.99)
        ),
        unit=unit,
    )


def _queues(matchers: tuple[str, ...]) -> Panel:
    state = label(names.ATTR_STATE)
    return lines(
        "Requests that run and that wait",
        _says("As the scheduler counts them.", names.REQUESTS),
        Query(f"max by ({_WHICH}, {state}) ({select(names.REQUESTS, *matchers)})", f"{{{{{state}}}}} {_NUMBERED}"),
    )


def _scarcity(matchers: tuple[str, ...]) -> Panel:
    return lines(
        "Preemptions and refusals",
        _says("Requests a second that lost their blocks, and that found too few.", names.PREEMPTIONS, names.REFUSALS),
        Query(_rate(names.PREEMPTIONS, *matchers), f"preempted {_NUMBERED}"),
        Query(_rate(names.REFUSALS, *matchers), f"refused {_NUMBERED}"),
        unit="reqps",
    )


def _sidecars() -> list[Panel]:
    state, outcome = label(names.ATTR_STATE), label(names.ATTR_OUTCOME)
    scope, reason = label(names.ATTR_SCOPE_READ), label(names.ATTR_UNREAD_REASON)
    return [
        lines(
            "Engines and processes that are followed",
            _says(
                "By their rings, by the process table, and files not followed.",
                *(names.ENGINES, names.PROCESSES, names.FILES_REFUSED),
            ),
            Query(
                f"sum by ({INSTANCE}, {state}) ({select(names.ENGINES, *_HERE)})", f"engines {_shown(INSTANCE, state)}"
            ),
            Query(
                f"sum by ({INSTANCE}, {label(names.ATTR_ROLE)}) ({select(names.PROCESSES, *_HERE)})",
                f"processes {_shown(INSTANCE, names.ATTR_ROLE)}",
            ),
            Query(f"sum by ({INSTANCE}) ({select(names.FILES_REFUSED, *_HERE)})", f"refused {_shown(INSTANCE)}"),
        ),
        lines(
            "Events lost between engine and sidecar",
            _says(
                "Overwritten or damaged, given up by the engine, not understood; a second.",
                *(names.RING_LOST, names.RING_DROPPED, names.RING_MALFORMED),
            ),
            Query(_rate(names.RING_LOST, *_HERE), f"lost {_NUMBERED}"),
            Query(_rate(names.RING_DROPPED, *_HERE), f"dropped {_NUMBERED}"),
            Query(_rate(names.RING_MALFORMED, *_HERE), f"malformed {_NUMBERED}"),
        ),
        lines(
            "What became of spans, metrics and events",
            _says("A second, by outcome.", names.SPANS, names.METRIC_EXPORTS, names.GROWTH_EVENT_EXPORTS),
            *(
                Query(_rate(metric, *_HERE, by=f"{INSTANCE}, {outcome}"), f"{what} {_shown(INSTANCE, outcome)}")
                for metric, what in (
                    (names.SPANS, "spans"),
                    (names.METRIC_EXPORTS, "metrics"),
                    (names.GROWTH_EVENT_EXPORTS, "events"),
                )
            ),
        ),
        lines(
            "What cannot be read",
            _says("Scopes of processes, with the reason; what is not read is missing, not 0.", names.UNREAD),
            Query(
                f"sum by ({INSTANCE}, {scope}, {reason}) ({select(names.UNREAD, *_HERE)})",
                _shown(INSTANCE, scope, reason),
            ),
        ),
        lines(
            "What the sidecar itself takes: CPU",
            _says("Cores.", names.CPU_TIME),
            Query(_rate(names.CPU_TIME, *_HERE, by=INSTANCE), _shown(INSTANCE)),
        ),
        lines(
            "What the sidecar itself takes: memory",
            _says("Resident.", names.PROCESS_MEMORY),
            Query(
                f"max by ({INSTANCE}) ({select(names.PROCESS_MEMORY, *_HERE, equals(names.ATTR_ROLE, 'sidecar'))})",
                _shown(INSTANCE),
            ),
            unit="bytes",
        ),
    ]


def _job_and_instance() -> list[Variable]:
    return [
        Variable("job", "Job", JOB, select(names.ENGINES)),
        Variable("instance", "Instance", INSTANCE, select(names.ENGINES, f'{JOB}=~"$job"')),
    ]


def _marks() -> list[Annotation]:
    """Where an engine is new, or counts from 0 again under the same labels; and where the fix came into force.

    What was there is looked for in ten minutes, so that a scrape that failed is no restart.
    """

    def before(metric: names.Metric, *matchers: str) -> str:
        return f"max_over_time({select(metric, *_HERE, *matchers, window='10m')} offset 2m)"

    engines = f"max by ({_WHICH}) ({select(names.PATCH_STATE, *_HERE)})"
    steps = f"max by ({_WHICH}) (resets({select(names.STEPS, *_HERE, window='2m')}) > 0)"
    applied = equals(names.ATTR_STATE, "applied")
    now = f"{select(names.PATCH_STATE, *_HERE, applied)} == 1"
    text = f"engine {_shown(names.ATTR_ENGINE_INDEX)}, pid {_shown(names.ATTR_PID)}, {_shown(INSTANCE)}"
    return [
        Annotation(
            "Restarts",
            f"({engines} unless max by ({_WHICH}) ({before(names.PATCH_STATE)})) + 1\nor {steps}",
            "An engine began",
            text,
            "blue",
        ),
        Annotation(
            "Patches",
            f"max by ({_WHICH}) (({now}) unless ({before(names.PATCH_STATE, applied)} == 1))",
            "The fix is in force",
            text,
            "green",
        ),
    ]


def on_call() -> Page:
    """Is host memory a problem, why, and what to do."""
    return Page(
        uid="vllm-kvfix-on-call",
        title="vLLM host memory: on call",
        description="Which vLLM process grows, what owns the growth, and when the limit is reached (vllm-kvfix).",
        variables=[
            *_job_and_instance(),
            Variable(PROCESS, "Process", label(names.ATTR_PROCESS_NAME), select(names.VERDICT_ALARMING, *_HERE)),
        ],
        annotations=_marks(),
        rows=[
            ("Verdict", [_alarming(), _shortest(), _unpatched(), _health(), _verdicts(), _patches()]),
            ("Memory against the limit", _cgroups()),
            ("Processes", _memory()),
            ("Containers", _containers()),
            (
                "KV cache",
                [
                    _pool(_HERE),
                    _quantiles("Blocks per request", "Most blocks at a time.", names.PEAK_BLOCKS, _HERE),
                    _queues(_HERE),
                    _scarcity(_HERE),
                ],
            ),
            ("Sidecar", _sidecars()),
        ],
    )


# ---- requests ----

_HISTOGRAMS = (
    ("Peak blocks", "Most blocks that a request held at a time.", names.PEAK_BLOCKS, "short"),
    ("Block residency", "First run until the blocks were given back.", names.RESIDENCY, "s"),
    ("Block seconds", "Blocks held, times the seconds.", names.BLOCK_SECONDS, "short"),
    ("Queue duration", "Arrival until it first ran.", names.QUEUE_DURATION, "s"),
)


def _distribution(title: str, text: str, metric: names.Metric, unit: str) -> list[Panel]:
    counted = f"sum by ({BUCKET_BOUND}) (increase({buckets(metric, *_ENGINE, window=RATE)}))"
    drawn = Query(counted, f"{{{{{BUCKET_BOUND}}}}}", heatmap=True, exemplars=True)
    return [
        heatmap(f"{title}: all", _says(f"{text} How many requests, by bucket.", metric), drawn, unit),
        _quantiles(f"{title}: quantiles", text, metric, unit=unit),
    ]


def _cache() -> Panel:
    hit = f"sum by ({_WHICH}) (rate({select(names.PREFIX_HIT, *_ENGINE, window=RATE)}))"
    queried = f"sum by ({_WHICH}) (rate({select(names.PREFIX_QUERIED, *_ENGINE, window=RATE)}))"
    return lines(
        "Prefix cache",
        _says("Share of the tokens looked up that were found.", names.PREFIX_HIT, names.PREFIX_QUERIED),
        Query(f"{hit} / {queried}", _NUMBERED),
        unit="percentunit",
    )


def _ends() -> Panel:
    reason = label(names.ATTR_FINISH_REASON)
    return lines(
        "Requests that ended, by reason",
        _says("A second.", names.FINISHED),
        Query(_rate(names.FINISHED, *_ENGINE, by=reason), f"{{{{{reason}}}}}"),
        unit="reqps",
    )


def _blocks() -> Panel:
    metrics = ((names.BLOCKS_ALLOCATED, "new"), (names.BLOCKS_REUSED, "reused"), (names.BLOCKS_RELEASED, "given back"))
    return lines(
        "Blocks taken and given back",
        _says("A second.", *(metric for metric, _ in metrics)),
        *(Query(_rate(metric, *_ENGINE), f"{what} {_NUMBERED}") for metric, what in metrics),
    )


def _traces(title: str, text: str, condition: str) -> Panel:
    """A table of spans whose ids lead to their traces; TraceQL names an attribute of a span ``span.NAME``."""
    shown = (
        *(names.ATTR_REQUEST_ID, names.ATTR_FINISH_REASON, names.ATTR_PEAK_BLOCKS, names.ATTR_BLOCK_SECONDS),
        *(names.ATTR_RESIDENCY, names.ATTR_QUEUE_DURATION, names.ATTR_PREEMPTIONS),
    )
    chosen = ", ".join(f"span.{name}" for name in shown)
    return Panel(
        "table",
        title,
        f"{text} Needs a trace store that speaks TraceQL (Grafana {TEMPO.capitalize()}); span {names.SPAN_NAME}.",
        (Search(f'{{ name = "{names.SPAN_NAME}" && {condition} }} | select({chosen})'),),
        width=COLUMNS,
        options={"showHeader": True, "cellHeight": "sm"},
    )


def requests() -> Page:
    """What requests do with their blocks, down to the trace of one."""
    return Page(
        uid="vllm-kvfix-requests",
        title="vLLM KV-cache blocks: requests",
        description="How many KV-cache blocks requests hold and for how long, with their traces (vllm-kvfix).",
        variables=[
            *_job_and_instance(),
            Variable(ENGINE, "Engine", label(names.ATTR_ENGINE_INDEX), select(names.RING_AGE, *_HERE)),
        ],
        annotations=_marks(),
        traces=True,
        rows=[
            ("Blocks", [_pool(_ENGINE), _blocks(), *_distribution(*_HISTOGRAMS[0]), *_distribution(*_HISTOGRAMS[2])]),
            ("Time", [*_distribution(*_HISTOGRAMS[1]), *_distribution(*_HISTOGRAMS[3])]),
            ("Scarcity", [_scarcity(_ENGINE), _queues(_ENGINE), _ends(), _cache()]),
            (
                "Traces",
                [
                    _traces("Requests that held the most", "At least a block.", f"span.{names.ATTR_PEAK_BLOCKS} > 0"),
                    _traces(
                        "Requests that were preempted or refused",
                        "Too few blocks were free for them.",
                        f"(span.{names.ATTR_PREEMPTIONS} > 0 || span.{names.ATTR_REFUSALS} > 0)",
                    ),
                ],
            ),
        ],
    )


PAGES = (on_call, requests)
