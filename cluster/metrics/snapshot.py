"""The counts of a process in a form that adds up over processes, and their conversion to Prometheus families.

A snapshot maps a metric's name to its values by labels. A counter has one value; a histogram has its counts by bucket
and then its sum (`workers.stats.histogram.Histogram.values`). Knows nothing of the meaning of metrics.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.utils import floatToGoString

PREFIX = "phalanx:"

Snapshot = dict[str, dict[tuple[str, ...], list[float]]]


@dataclass(frozen=True)
class Family:
    """A metric: a histogram if it has bounds of buckets, else a gauge or a counter."""

    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    is_gauge: bool = False


class SnapshotTotals:
    """The last snapshot of every ingress; the counts of an ingress that has ended stay in the total."""

    def __init__(self) -> None:
        self._last: dict[str, Snapshot] = {}

    def put(self, sender: str, snapshot: Snapshot) -> None:
        """Replace the snapshot of `sender`, which has its counts since its start."""
        self._last[sender] = snapshot

    def retire(self, sender: str, gauges: Container[str]) -> None:
        """Drop the `gauges` of a `sender` that has ended; keep its counts."""
        if sender in self._last:
            last = self._last[sender]
            self._last[sender] = {name: last[name] for name in last if name not in gauges}

    def total(self) -> Snapshot:
        """The sum over all senders."""
        return add(self._last.values())


def add(snapshots: Iterable[Snapshot]) -> Snapshot:
    """The sum of snapshots of equal programs."""
    total: Snapshot = {}
    for snapshot in snapshots:
        for name, children in snapshot.items():
            sums = total.setdefault(name, {})
            for labels, values in children.items():
                old = sums.get(labels)
                sums[labels] = (
                    list(values)
                    if old is None
                    else [a + b for a, b in zip(old, values, strict=True)]
                )
    return total


def to_families(
    snapshot: Snapshot, families: dict[str, Family], common: dict[str, str]
) -> Iterable[Metric]:
    """Prometheus families of a snapshot, each with the `common` labels before its own."""
    for name, family in families.items():
        labels = [*common, *family.labels]
        children = snapshot.get(name, {})
        if family.bounds:
            histogram = HistogramMetricFamily(PREFIX + name, family.help, labels=labels)
            for values, numbers in children.items():
                add_histogram(histogram, [*common.values(), *values], family.bounds, numbers)
            yield histogram
            continue
        make = GaugeMetricFamily if family.is_gauge else CounterMetricFamily
        single = make(PREFIX + name, family.help, labels=labels)
        for values, (number,) in children.items():
            single.add_metric([*common.values(), *values], number)
        yield single


def add_histogram(
    family: HistogramMetricFamily,
    labels: Sequence[str],
    bounds: Sequence[float],
    values: Sequence[float],
) -> None:
    """Add one labelled histogram from counts by bucket and the sum; Prometheus expects cumulative counts."""
    *counts, total = values
    edges = [*map(floatToGoString, bounds), "+Inf"]
    buckets = list(zip(edges, accumulate(counts), strict=True))
    family.add_metric(labels, buckets=buckets, sum_value=total)
