"""The balance of experts over the ranks as Prometheus families, from the statistics of all ranks.

In lockstep the busiest rank of each layer sets the time. Knows nothing of the source of the statistics.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client.core import GaugeMetricFamily, Metric

from cluster.metrics.snapshot import PREFIX
from workers.stats.expert_counts import LayerRows


def expert_families(stats: Sequence[dict[str, Any]], model_name: str) -> Iterator[Metric]:
    """Yield the families; without samples where the ranks' readings are not of one step."""
    layers = GaugeMetricFamily(
        f"{PREFIX}expert_layer_balancedness",
        "Mean rows of a rank's experts over the rows of the busiest rank, in the last steps; 1 = even.",
        labels=["model_name", "layer"],
    )
    for layer, even in rank_balancedness(_of_ranks(stats, "expert_window")).items():
        layers.add_metric([model_name, str(layer)], even)
    step = GaugeMetricFamily(
        f"{PREFIX}expert_step_imbalance",
        "Rows of the busiest rank's experts over the mean of the ranks, over all layers of one step; 1 = even.",
        labels=["model_name"],
    )
    found = imbalance(_of_ranks(stats, "expert_step"))
    if found is not None:
        step.add_metric([model_name], found)
    yield from (layers, step)


def rank_balancedness(rows_RL: Sequence[Sequence[int]]) -> dict[int, float]:
    """Return by layer the mean rows of a rank over those of the busiest rank, for layers with rows.

    rows_RL   rows of each layer, of each rank
    """
    of_layers = enumerate(zip(*rows_RL, strict=True))
    return {layer: sum(rows) / len(rows) / max(rows) for layer, rows in of_layers if any(rows)}


def imbalance(rows_RL: Sequence[Sequence[int]]) -> float | None:
    """Return the sum over layers of the busiest rank's rows over that of the mean rows; None without rows.

    rows_RL   rows of each layer, of each rank
    """
    busiest = sum(max(rows) for rows in zip(*rows_RL, strict=True))
    return len(rows_RL) * busiest / sum(map(sum, rows_RL)) if busiest else None


def _of_ranks(stats: Sequence[dict[str, Any]], key: str) -> list[list[int]]:
    """Return the rows of each rank, of the last step for which all ranks have them; none if the steps differ."""
    found: list[LayerRows | None] = [values.get(key) for values in stats]
    rows = [one for one in found if one is not None]
    if len(rows) < len(found) or len({(one.step, len(one.rows_L)) for one in rows}) != 1:
        return []
    return [one.rows_L for one in rows]
