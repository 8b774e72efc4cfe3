"""What /metrics shows: this ingress's requests and the ranks' own counters, as Prometheus text.

Names are those of vLLM with our prefix, so that dashboards carry over; the label `rank` stands
where vLLM has `engine`. Knows nothing of where rank statistics come from.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

CONTENT_TYPE = CONTENT_TYPE_LATEST

_FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
_REQUEST_BUCKETS = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0),
)
_PER_TOKEN_BUCKETS = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.04, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
_TOKEN_BUCKETS = tuple(float(2**i) for i in range(18))

# Key of a rank's statistics -> metric name without prefix, help.
_RANK_GAUGES = {
    "running": ("num_requests_running", "Requests in the running batch."),
    "waiting": ("num_requests_waiting", "Requests waiting to be scheduled."),
    "kv_cache_usage": ("kv_cache_usage_perc", "Share of KV blocks in use, 1 = all."),
}
_RANK_COUNTERS = {
    "preemptions": ("num_preemptions", "Requests preempted for lack of KV blocks."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests."),
    "generation_tokens": ("generation_tokens", "Tokens sampled."),
    "padding_tokens": ("padding_tokens", "Padding rows that ran to give all ranks equal shapes."),
    "steps": ("steps", "Lockstep forwards."),
    "idle_steps": ("idle_steps", "Steps in which this rank had no tokens."),
}


class IngressMetrics:
    """The metrics of one ingress process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._ranks = _RankCollector()
        self.registry.register(self._ranks)
        self._model_name = ""
        self._success = self._counter(
            "request_success", "Choices ended, by reason.", ["model_name", "finished_reason"]
        )
        self._http = self._counter(
            "http_requests", "Answers, by route and status.", ["handler", "status"]
        )
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN_BUCKETS
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST_BUCKETS
        )
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per token after the first, by request.",
            _PER_TOKEN_BUCKETS,
        )
        self._prompt_tokens = self._histogram(
            "request_prompt_tokens", "Prompt tokens of a choice.", _TOKEN_BUCKETS
        )
        self._output_tokens = self._histogram(
            "request_generation_tokens", "Output tokens of a choice.", _TOKEN_BUCKETS
        )

    def set_model_name(self, model_name: str) -> None:
        """The label of everything recorded from now on."""
        self._model_name = model_name

    def observe_first_token(self, seconds: float) -> None:
        """A choice's first token left."""
        self._first_token.labels(self._model_name).observe(seconds)

    def observe_end(self, reason: str) -> None:
        """A choice ended: stop, length, abort (the client went away) or error."""
        self._success.labels(self._model_name, reason).inc()

    def observe_finished(
        self,
        *,
        num_prompt_tokens: int,
        num_output_tokens: int,
        first_token_s: float,
        total_s: float,
    ) -> None:
        """The sizes and times of a choice that was answered to its end."""
        name = self._model_name
        self._e2e.labels(name).observe(total_s)
        self._prompt_tokens.labels(name).observe(num_prompt_tokens)
        self._output_tokens.labels(name).observe(num_output_tokens)
        if num_output_tokens > 1:
            mean = (total_s - first_token_s) / (num_output_tokens - 1)
            self._per_token.labels(name).observe(mean)

    def observe_http(self, handler: str, status: int) -> None:
        """An answer's headers left."""
        self._http.labels(handler, str(status)).inc()

    def render(self, rank_stats: list[dict[str, Any]]) -> bytes:
        """Everything as Prometheus text."""
        self._ranks.update(self._model_name, rank_stats)
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str, labels: list[str]) -> Counter:
        return Counter(f"phalanx:{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(
            f"phalanx:{name}", text, ["model_name"], buckets=buckets, registry=self.registry
        )


class _RankCollector(Collector):
    """Turns the ranks' last statistics into metric families at each scrape."""

    def __init__(self) -> None:
        self._model_name = ""
        self._stats: list[dict[str, Any]] = []

    def update(self, model_name: str, stats: list[dict[str, Any]]) -> None:
        self._model_name, self._stats = model_name, stats

    def describe(self) -> Iterable[Metric]:
        return []  # the families depend on what the ranks report

    def collect(self) -> Iterator[Metric]:
        labels = ["model_name", "rank"]
        for key, (name, text) in _RANK_GAUGES.items():
            gauge = GaugeMetricFamily(f"phalanx:{name}", text, labels=labels)
            yield self._fill(gauge, key)
        for key, (name, text) in _RANK_COUNTERS.items():
            counter = CounterMetricFamily(f"phalanx:{name}", text, labels=labels)
            yield self._fill(counter, key)
        parts = CounterMetricFamily(
            "phalanx:step_time_seconds",
            "Time in the parts of a step; exchange is waiting for other ranks.",
            labels=[*labels, "part"],
        )
        for rank, stats in self._by_rank():
            for part, seconds in stats.get("step_seconds", {}).items():
                parts.add_metric([self._model_name, rank, part], seconds)
        yield parts

    def _fill(
        self, family: GaugeMetricFamily | CounterMetricFamily, key: str
    ) -> GaugeMetricFamily | CounterMetricFamily:
        for rank, stats in self._by_rank():
            if key in stats:
                family.add_metric([self._model_name, rank], stats[key])
        return family

    def _by_rank(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for position, stats in enumerate(self._stats):
            yield str(stats.get("rank", position)), stats
