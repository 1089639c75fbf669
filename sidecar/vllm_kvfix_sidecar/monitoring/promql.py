# SPDX-License-Identifier: Apache-2.0
"""Writes selectors of PromQL from the names in ``conventions``, so that no query has a name of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_kvfix_sidecar.conventions import Kind, label_name

if TYPE_CHECKING:
    from vllm_kvfix_sidecar.conventions import Metric, Name

# What Prometheus itself puts on every series that it scrapes.
JOB, INSTANCE = "job", "instance"
BUCKET_BOUND = "le"


def word(value: str) -> str:
    """A value in words as attributes have it."""
    return value.replace(" ", "_")


def label(name: Name | str) -> str:
    """The label of an attribute."""
    return label_name(name)


def labels(*names: Name | str) -> str:
    """Labels as in ``by (...)``."""
    return ", ".join(label(name) for name in names)


def equals(name: Name | str, value: str) -> str:
    """A matcher."""
    return f'{label(name)}="{value}"'


def among(name: Name | str, *values: str) -> str:
    """A matcher of several values, plain words all."""
    return f'{label(name)}=~"{"|".join(values)}"'


def select(metric: Metric, *matchers: str, window: str = "") -> str:
    """The series of a metric that is no histogram; with a window, a range of them."""
    return _select(metric.series, matchers, window)


def buckets(metric: Metric, *matchers: str, window: str = "") -> str:
    """The buckets of a histogram."""
    if metric.kind is not Kind.HISTOGRAM:
        raise ValueError(f"{metric.name} has no buckets")
    return _select(f"{metric.series}_bucket", matchers, window)


def _select(name: str, matchers: tuple[str, ...], window: str) -> str:
    inside = f"{{{', '.join(matchers)}}}" if matchers else ""
    return f"{name}{inside}" + (f"[{window}]" if window else "")
