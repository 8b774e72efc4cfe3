"""The metrics of one run by name, from answers and figures of the engine. Pure arithmetic."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import isfinite
from typing import Any

from cluster.bench.metrics import summarise
from cluster.bench.stream import Answer
from cluster.experiments.sections import Kind
from cluster.experiments.target import Measured
from cluster.experiments.workload_section import RequestWorkload, StepWorkload

DEFAULTS: dict[Kind, tuple[str, ...]] = {
    "engine": ("output_tokens_per_s", "total_tokens_per_s", "ttft_ms.p50", "tpot_ms.p50"),
    "http": ("output_tokens_per_s", "total_tokens_per_s", "ttft_ms.p50", "tpot_ms.p50"),
    "step": ("step_ms", "exchange_us", "empty_step_us"),
}
LIMITS = ("ttft", "tpot", "e2e")  # of goodput
OF_THE_ENGINE: dict[Kind, tuple[str, ...]] = {
    "engine": (
        *("steps", "idle_step_share", "ubatched_step_share", "tokens_per_step", "preemptions"),
        *("step_ms", "vote_share", "forward_share", "expert_balancedness", "gpu_mhz", "gpu_watts"),
    ),
    "http": ("vote_share", "forward_share"),
    "step": ("step_ms", "exchange_us", "empty_step_us"),
}
OF_DECODES = ("decode_tokens_per_s", "decode_ms_per_token")


def metrics_of(measured: Measured, workload: RequestWorkload | StepWorkload) -> dict[str, float]:
    """Return all metrics; those that a run does not have are left out."""
    found = dict(measured.figures)
    if isinstance(workload, RequestWorkload):
        result = summarise(measured.answers, measured.client_cpu_s, workload.goodput)
        values = asdict(result)
        values["errors"] = sum(result.errors.values())
        if not measured.client_cpu_s:
            values |= {"client_cpu_s": None, "client_us_per_chunk": None}
        found |= _flat(values)
        if workload.phase == "decode":
            found |= decode_window(measured.answers)
    return {name: value for name, value in found.items() if value is not None and isfinite(value)}


def known_metrics(kind: Kind) -> list[str]:
    """Return the names of all metrics that a run of this kind may have."""
    if kind == "step":
        return list(OF_THE_ENGINE[kind])
    every = asdict(summarise([], 0.0, dict.fromkeys(LIMITS, 1.0)))
    return [*OF_THE_ENGINE[kind], *_flat(every), "errors", *OF_DECODES]


def error_of(answers: Sequence[Answer]) -> str | None:
    """Return why a load has no figures: every request of it failed."""
    if not answers or any(answer.error is None for answer in answers):
        return None
    return f"all {len(answers)} requests failed: {answers[0].error}"


def decode_window(answers: Sequence[Answer]) -> dict[str, float]:
    """Return the figures of the time in which all requests decode: after the last first token, to the first end."""
    good = [a for a in answers if a.error is None and a.chunk_times and a.completion_tokens]
    if not good:
        return {}
    begin = max(answer.chunk_times[0] for answer in good)
    end = min(answer.ended for answer in good)
    tokens = 0.0
    for answer in good:
        share = (answer.completion_tokens or 0) / len(answer.chunk_times)
        tokens += share * sum(begin < time <= end for time in answer.chunk_times)
    if end <= begin or not tokens:
        return {}
    seconds = end - begin
    return {
        "decode_tokens_per_s": tokens / seconds,
        "decode_ms_per_token": 1e3 * seconds * len(good) / tokens,
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found
