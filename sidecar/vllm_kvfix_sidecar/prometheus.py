# SPDX-License-Identifier: Apache-2.0
"""The readings in the text formats of Prometheus."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Exemplar

from vllm_kvfix_sidecar.conventions import Kind, label_name
from vllm_kvfix_sidecar.readings import HistogramValue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client.metrics_core import Metric as Family

    from vllm_kvfix_sidecar.conventions import Metric
    from vllm_kvfix_sidecar.readings import Point, Reader

    _Bucket: TypeAlias = tuple[str, float] | tuple[str, float, Exemplar]


class Exposition(Collector):
    """Answers scrapes. ``target``: the resource's attributes, told as ``target_info``, by which series are joined."""

    def __init__(self, reader: Reader, target: Mapping[str, object], *, exemplars: bool) -> None:
        self._reader = reader
        self._target = {label_name(name): str(value) for name, value in target.items()}
        self._exemplars = exemplars
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def body(self, accept: str) -> tuple[bytes, str]:
        """The exposition in the best format that an Accept header takes, and its content type."""
        encoder: Callable[[CollectorRegistry], bytes]
        encoder, content_type = choose_encoder(accept)
        return encoder(self._registry), content_type

    def describe(self) -> list[Family]:
        """Nothing, so that registering reads nothing."""
        return []

    def collect(self) -> Iterator[Family]:
        """The families, in the order of the conventions; none without a sample."""
        info = GaugeMetricFamily("target_info", "Target metadata", labels=list(self._target))
        info.add_metric(list(self._target.values()), 1)
        yield info
        for metric, points in self._reader.read().items():
            if points:
                yield self._family(metric, points)

    def _family(self, metric: Metric, points: list[Point]) -> Family:
        # Labels may differ from point to point (a ring's name is told only where it must be), so each is whole.
        names = tuple(dict.fromkeys(name for point in points for name in point.attributes))
        labels = [label_name(name) for name in names]
        family: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
        if metric.kind is Kind.HISTOGRAM:
            family = HistogramMetricFamily(metric.prometheus, metric.description, labels=labels)
        elif metric.kind is Kind.COUNTER:
            family = CounterMetricFamily(metric.prometheus, metric.description, labels=labels)
        else:
            family = GaugeMetricFamily(metric.prometheus, metric.description, labels=labels)
        for point in points:
            values = [str(point.attributes.get(name, "")) for name in names]
            if isinstance(family, HistogramMetricFamily):
                if isinstance(point.value, HistogramValue):
                    family.add_metric(values, self._buckets(metric, point.value), point.value.sum)
            elif not isinstance(point.value, HistogramValue):
                family.add_metric(values, point.value)
        return family

    def _buckets(self, metric: Metric, value: HistogramValue) -> list[_Bucket]:
        buckets: list[_Bucket] = []
        total = 0
        for bound, count, found in zip((*metric.bounds, math.inf), value.counts, value.exemplars, strict=True):
            total += count
            text = "+Inf" if math.isinf(bound) else str(bound)
            if self._exemplars and found is not None:
                ids = {"trace_id": f"{found.trace_id:032x}", "span_id": f"{found.span_id:016x}"}
                buckets.append((text, float(total), Exemplar(ids, found.value, found.time / 1e9)))
            else:
                buckets.append((text, float(total)))
        return buckets
