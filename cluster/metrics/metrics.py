"""The counts of one ingress, and /metrics: the counts of all ingresses and of the ranks as text.

Names are vLLM's with another prefix, so that dashboards carry over; vLLM's label `engine` is `rank` here. The client
library does not count, because a scrape reaches one ingress of several, so counts must travel and add up; and an
observation takes 0.2 us instead of 1 us, which matters once per token.
"""

import platform
import uuid
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from cluster.metrics.groups import GroupStates, group_families
from cluster.metrics.ranks import rank_families
from cluster.metrics.snapshot import PREFIX, Family, Snapshot, to_families
from workers.stats.histogram import Histogram
from workers.stats.process_info import process_info
from workers.stats.versions import phalanx_version

CONTENT_TYPE = CONTENT_TYPE_LATEST

_FIRST_TOKEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0),
)
_REQUEST = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0),
)
_PER_TOKEN = (
    *(0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.04, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
)
_TOKENS = tuple(float(2**i) for i in range(18))

# Families of requests; each also has the label model_name.
_REQUEST_FAMILIES = {
    "request_success": Family("Choices ended, by reason.", ("finished_reason",)),
    "time_to_first_token_seconds": Family("From arrival to the first token.", (), _FIRST_TOKEN),
    "inter_token_latency_seconds": Family(
        "Between two pieces of a choice, most often tokens.", (), _PER_TOKEN
    ),
    "request_time_per_output_token_seconds": Family(
        "Mean time per token after the first, by request.", (), _PER_TOKEN
    ),
    "e2e_request_latency_seconds": Family("From arrival to the last token.", (), _REQUEST),
    "prompts_by_place": Family(
        "Prompts in a pool with the role prefill, by the group that computed them.", ("place",)
    ),
    "request_prompt_tokens": Family("Prompt tokens of a choice.", (), _TOKENS),
    "request_generation_tokens": Family("Output tokens of a choice.", (), _TOKENS),
}
# Families of the HTTP server.
_SERVER_FAMILIES = {
    "http_requests": Family("Answers, by route and status.", ("handler", "status")),
    "http_request_duration_seconds": Family(
        "From a request's head to the end of its answer.", ("handler",), _REQUEST
    ),
    "ingress_cpu_seconds": Family("Processor time of an ingress's process.", ("ingress",)),
    "ingress_resident_memory_bytes": Family(
        "Memory of an ingress's process.", ("ingress",), is_gauge=True
    ),
}
FAMILIES = _REQUEST_FAMILIES | _SERVER_FAMILIES
GAUGES = frozenset(name for name, family in FAMILIES.items() if family.is_gauge)


class IngressMetrics:
    """The counts of one ingress process, used in its event loop only."""

    def __init__(self) -> None:
        self._model_name = ""
        self._name = f"ingress-{uuid.uuid4().hex[:8]}"
        self._ended: dict[str, int] = {}
        self._prompts: dict[str, int] = {}
        self._http: dict[tuple[str, str], int] = {}
        self._http_seconds: dict[str, Histogram] = {}
        self._histograms = {
            name: Histogram(family.bounds)
            for name, family in _REQUEST_FAMILIES.items()
            if family.bounds
        }
        self.observe_first_token = self._histograms["time_to_first_token_seconds"].observe
        """observe_first_token(seconds): count the first token of a choice."""
        self.observe_inter_token = self._histograms["inter_token_latency_seconds"].observe
        """observe_inter_token(seconds): count the time between two pieces of a choice."""

    def set_model_name(self, model_name: str) -> None:
        """Set the label of all counts of requests."""
        self._model_name = model_name

    def observe_end(self, reason: str) -> None:
        """Count the end of a choice: stop, length, abort (the client left) or error."""
        self._ended[reason] = self._ended.get(reason, 0) + 1

    def observe_prompt(self, place: str) -> None:
        """Count a prompt in a pool with the role prefill, see `cluster.client.request_run.PromptPlace`."""
        self._prompts[place] = self._prompts.get(place, 0) + 1

    def observe_finished(
        self,
        *,
        num_prompt_tokens: int,
        num_output_tokens: int,
        first_token_s: float,
        total_s: float,
    ) -> None:
        """Count the sizes and times of a choice that was answered completely."""
        histograms = self._histograms
        histograms["e2e_request_latency_seconds"].observe(total_s)
        histograms["request_prompt_tokens"].observe(num_prompt_tokens)
        histograms["request_generation_tokens"].observe(num_output_tokens)
        if num_output_tokens > 1:
            mean = (total_s - first_token_s) / (num_output_tokens - 1)
            histograms["request_time_per_output_token_seconds"].observe(mean)

    def observe_http(self, handler: str, status: int) -> None:
        """Count an answer after its headers were sent."""
        key = (handler, str(status))
        self._http[key] = self._http.get(key, 0) + 1

    def observe_http_end(self, handler: str, seconds: float) -> None:
        """Count the time of an answer that is complete, or that has lost its client."""
        if handler not in self._http_seconds:
            bounds = FAMILIES["http_request_duration_seconds"].bounds
            self._http_seconds[handler] = Histogram(bounds)
        self._http_seconds[handler].observe(seconds)

    def snapshot(self) -> Snapshot:
        """All counts since the start."""
        process = process_info()
        return {
            "request_success": {(reason,): [count] for reason, count in self._ended.items()},
            "prompts_by_place": {(place,): [count] for place, count in self._prompts.items()},
            "http_requests": {key: [count] for key, count in self._http.items()},
            "http_request_duration_seconds": {
                (handler,): histogram.values() for handler, histogram in self._http_seconds.items()
            },
            **{name: {(): histogram.values()} for name, histogram in self._histograms.items()},
            "ingress_cpu_seconds": {(self._name,): [process["cpu_seconds"]]},
            "ingress_resident_memory_bytes": {(self._name,): [process["resident_bytes"]]},
        }

    def render(
        self,
        rank_stats: list[dict[str, Any]],
        total: Snapshot | None = None,
        groups: GroupStates = (),
    ) -> bytes:
        """Prometheus text of ranks, groups, and `total`, the sum over all ingresses (None = this one)."""
        total = self.snapshot() if total is None else total
        model = {"model_name": self._model_name}
        registry = CollectorRegistry(auto_describe=False)
        registry.register(
            _Families(
                [
                    *rank_families(rank_stats, self._model_name),
                    *group_families(groups, self._model_name),
                    *to_families(total, _REQUEST_FAMILIES, model),
                    *to_families(total, _SERVER_FAMILIES, {}),
                    _build_info(),
                ]
            )
        )
        return generate_latest(registry)


class _Families(Collector):
    """Finished families; families without samples are left out."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = [family for family in families if family.samples]

    def collect(self) -> Iterable[Metric]:
        return self._families


def _build_info() -> Metric:
    family = GaugeMetricFamily(
        f"{PREFIX}build_info", "Always 1; versions as labels.", labels=["version", "python"]
    )
    family.add_metric([phalanx_version(), platform.python_version()], 1)
    return family
