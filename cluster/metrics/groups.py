"""The states of the groups (`cluster.supervisor.status.GroupStatus.to_json`) as Prometheus families."""

from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from cluster.metrics.snapshot import PREFIX

GroupStates = Sequence[dict[str, Any]]
STATES = ("starting", "serving", "rebuilding", "draining", "failed", "stopped")


def group_families(groups: GroupStates, model_name: str) -> Iterator[Metric]:
    """All families of all groups; the groups are numbered."""
    labels = ["model_name", "group"]
    state = GaugeMetricFamily(
        f"{PREFIX}group_state",
        "1 for the state of the group, 0 for others.",
        labels=[*labels, "state"],
    )
    stage = GaugeMetricFamily(
        f"{PREFIX}group_stage", "1 for the stage of a start or rebuild.", labels=[*labels, "stage"]
    )
    since = GaugeMetricFamily(
        f"{PREFIX}group_state_seconds", "Time since the state began.", labels=labels
    )
    epoch = GaugeMetricFamily(f"{PREFIX}group_epoch", "Number of the epoch.", labels=labels)
    rebuilds = CounterMetricFamily(
        f"{PREFIX}group_rebuilds", "Rebuilds that ended in service.", labels=labels
    )
    seconds = CounterMetricFamily(
        f"{PREFIX}group_rebuild_seconds", "Time of rebuilds by stage.", labels=[*labels, "stage"]
    )
    ages = GaugeMetricFamily(
        f"{PREFIX}vote_age_seconds",
        "Time since a rank's last vote; 0 while it sleeps.",
        labels=["model_name", "rank"],
    )
    slow = GaugeMetricFamily(
        f"{PREFIX}slow_rank",
        "1 for a rank that holds up the others.",
        labels=["model_name", "rank"],
    )
    slowdowns = GaugeMetricFamily(
        f"{PREFIX}rank_slowdown",
        "Own time of a rank in a step over that of the other ranks with equal work, as last measured.",
        labels=["model_name", "rank"],
    )
    first_rank = 0
    for number, group in enumerate(groups):
        head = [model_name, str(number)]
        for name in STATES:
            state.add_metric([*head, name], float(group["state"] == name))
        if group["stage"]:
            stage.add_metric([*head, group["stage"]], 1)
        since.add_metric(head, group["seconds"])
        epoch.add_metric(head, group["epoch"])
        rebuilds.add_metric(head, group["rebuilds"])
        for name, spent in group["rebuild_seconds"].items():
            seconds.add_metric([*head, name], spent)
        for rank, age in enumerate(group["vote_age_seconds"]):
            ages.add_metric([model_name, str(first_rank + rank)], age)
        for rank, slowdown in enumerate(group["rank_slowdowns"]):
            slow.add_metric([model_name, str(first_rank + rank)], rank in group["slow_ranks"])
            slowdowns.add_metric([model_name, str(first_rank + rank)], slowdown)
        first_rank += len(group["vote_age_seconds"])
    yield from (state, stage, since, epoch, rebuilds, seconds, ages, slow, slowdowns)
