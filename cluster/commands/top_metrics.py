"""The figures of `phalanx top`, from two scrapes of /metrics. Pure arithmetic on parsed Prometheus text."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

PREFIX = "phalanx:"
Labels = dict[str, str]


class NotPhalanxError(ValueError):
    """The text is not from a Phalanx server's /metrics."""


class Scrape:
    """One scrape: its samples by name, and its time."""

    def __init__(self, text: str, moment: float):
        self.moment = moment
        self._samples: dict[str, list[tuple[Labels, float]]] = {}
        try:
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name.startswith(PREFIX):
                        entry = (sample.labels, sample.value)
                        self._samples.setdefault(sample.name[len(PREFIX) :], []).append(entry)
        except ValueError as error:
            raise NotPhalanxError(f"its /metrics cannot be read: {error}") from error
        if not self._samples:
            raise NotPhalanxError("its /metrics has nothing of Phalanx")

    def samples(self, name: str, **labels: str) -> Iterable[tuple[Labels, float]]:
        """The samples of a name that have these labels."""
        for found, value in self._samples.get(name, ()):
            if labels.items() <= found.items():
                yield found, value

    def sum(self, name: str, **labels: str) -> float:
        """The sum of the samples of a name that have these labels; 0 without samples."""
        return sum(value for _, value in self.samples(name, **labels))

    def values(self, name: str, label: str) -> list[str]:
        """The values of a label of a name, in order of appearance."""
        return list(dict.fromkeys(found[label] for found, _ in self.samples(name)))

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """A histogram's cumulative counts by upper bound, summed over its samples."""
        counts: dict[float, float] = {}
        for found, value in self.samples(f"{name}_bucket", **labels):
            bound = float(found["le"])
            counts[bound] = counts.get(bound, 0.0) + value
        return counts


@dataclass(frozen=True, kw_only=True)
class RankRow:
    """One rank between two scrapes. Rates a second, times in milliseconds, shares from 0 to 1; None = no step ran.

    prefill_cap   most prompt tokens of a step in which a rank decodes; None = no limit
    """

    rank: int
    prompt_tokens_per_s: float
    generation_tokens_per_s: float
    running: int
    waiting: int
    kv_cache_usage: float
    prefix_hit_rate: float | None
    steps_per_s: float
    step_ms: float | None
    vote_share: float | None
    vote_age_s: float
    queue_p50_ms: float | None
    preemptions: int
    prefill_cap: int | None


@dataclass(frozen=True, kw_only=True)
class GroupRow:
    """The state of one group; `stage` while it starts or rebuilds, else ""."""

    state: str
    stage: str
    seconds: float
    epoch: int
    rebuilds: int


@dataclass(frozen=True, kw_only=True)
class Overview:
    """The whole server between two scrapes; latencies are of requests of that time."""

    model: str
    seconds: float
    groups: list[GroupRow] = field(default_factory=list)
    ranks: list[RankRow] = field(default_factory=list)
    requests_per_s: float
    errors_per_s: float
    ttft_p50_ms: float | None
    inter_token_p50_ms: float | None
    e2e_p50_ms: float | None


def overview(before: Scrape, now: Scrape) -> Overview:
    """The figures between two scrapes of one server."""
    seconds = max(now.moment - before.moment, 1e-9)
    models = now.values("num_requests_running", "model_name") or now.values(
        "group_epoch", "model_name"
    )
    ended = [
        (labels["finished_reason"], _rate(before, now, seconds, "request_success_total", **labels))
        for labels, _ in now.samples("request_success_total")
    ]

    def p50(name: str) -> float | None:
        return _median_ms(before, now, name)

    return Overview(
        model=models[0] if models else "",
        seconds=seconds,
        groups=[_group(now, group) for group in now.values("group_epoch", "group")],
        ranks=[_rank(before, now, seconds, rank) for rank in sorted(_ranks(now), key=int)],
        requests_per_s=sum(rate for _, rate in ended),
        errors_per_s=sum(rate for reason, rate in ended if reason == "error"),
        ttft_p50_ms=p50("time_to_first_token_seconds"),
        inter_token_p50_ms=p50("inter_token_latency_seconds"),
        e2e_p50_ms=p50("e2e_request_latency_seconds"),
    )


def total(rows: list[RankRow]) -> dict[str, Any]:
    """Sums and means over all ranks, of the columns that have one."""
    return {
        "prompt_tokens_per_s": sum(row.prompt_tokens_per_s for row in rows),
        "generation_tokens_per_s": sum(row.generation_tokens_per_s for row in rows),
        "running": sum(row.running for row in rows),
        "waiting": sum(row.waiting for row in rows),
        "kv_cache_usage": sum(row.kv_cache_usage for row in rows) / max(len(rows), 1),
    }


def quantile(buckets: dict[float, float], share: float) -> float | None:
    """The value below which `share` of the observations lie, interpolated in its bucket; None without observations.

    `buckets` are cumulative counts by upper bound, with +Inf. A value in the last bucket is given as its lower bound.
    """
    bounds = sorted(buckets)
    if not bounds or not buckets[bounds[-1]] > 0:
        return None
    target = share * buckets[bounds[-1]]
    if buckets[bounds[0]] >= target:
        return bounds[0] * target / buckets[bounds[0]] if bounds[0] != float("inf") else None
    for low, high in pairwise(bounds):
        if buckets[high] >= target:
            if high == float("inf"):
                return low
            inside = buckets[high] - buckets[low]
            return low + (high - low) * (target - buckets[low]) / inside
    return None


def _ranks(scrape: Scrape) -> list[str]:
    return scrape.values("num_requests_running", "rank")


def _group(now: Scrape, group: str) -> GroupRow:
    states = [labels["state"] for labels, is_it in now.samples("group_state", group=group) if is_it]
    stages = [labels["stage"] for labels, _ in now.samples("group_stage", group=group)]
    return GroupRow(
        state=next(iter(states), "?"),
        stage=next(iter(stages), ""),
        seconds=now.sum("group_state_seconds", group=group),
        epoch=int(now.sum("group_epoch", group=group)),
        rebuilds=int(now.sum("group_rebuilds_total", group=group)),
    )


def _rank(before: Scrape, now: Scrape, seconds: float, rank: str) -> RankRow:
    def grown(name: str, **labels: str) -> float:
        return _grown(before, now, name, rank=rank, **labels)

    steps = grown("steps_total")
    step_s = grown("step_time_seconds_total")
    queries = grown("prefix_cache_queries_total")
    cap = now.sum("max_prefill_tokens_with_decodes", rank=rank)
    return RankRow(
        rank=int(rank),
        prompt_tokens_per_s=grown("prompt_tokens_total") / seconds,
        generation_tokens_per_s=grown("generation_tokens_total") / seconds,
        running=int(now.sum("num_requests_running", rank=rank)),
        waiting=int(now.sum("num_requests_waiting", rank=rank)),
        kv_cache_usage=now.sum("kv_cache_usage_perc", rank=rank),
        prefix_hit_rate=grown("prefix_cache_hits_total") / queries if queries else None,
        steps_per_s=steps / seconds,
        step_ms=1e3 * step_s / steps if steps else None,
        vote_share=grown("step_time_seconds_total", part="vote") / step_s if step_s else None,
        vote_age_s=now.sum("vote_age_seconds", rank=rank),
        queue_p50_ms=_median_ms(before, now, "request_queue_time_seconds", rank=rank),
        preemptions=int(grown("num_preemptions_total")),
        prefill_cap=int(cap) if cap else None,
    )


def _grown(before: Scrape, now: Scrape, name: str, **labels: str) -> float:
    """The growth of a counter; its whole value after a restart of the server."""
    end, start = now.sum(name, **labels), before.sum(name, **labels)
    return end - start if end >= start else end


def _rate(before: Scrape, now: Scrape, seconds: float, name: str, **labels: str) -> float:
    return _grown(before, now, name, **labels) / seconds


def _median_ms(before: Scrape, now: Scrape, name: str, **labels: str) -> float | None:
    end, start = now.buckets(name, **labels), before.buckets(name, **labels)
    grown = {bound: count - start.get(bound, 0.0) for bound, count in end.items()}
    if min(grown.values(), default=0) < 0:
        grown = end
    value = quantile(grown, 0.5)
    return None if value is None else 1e3 * value
