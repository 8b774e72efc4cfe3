"""Figures of one round of answers: rates, latencies, errors. Pure arithmetic."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from cluster.bench.stream import Answer

MILLISECONDS = 1000.0


@dataclass(frozen=True)
class Latency:
    """Milliseconds; None where nothing was measured."""

    mean: float | None
    p50: float | None
    p99: float | None

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Latency":
        """Over all samples; the percentiles are interpolated."""
        if not len(seconds):
            return cls(None, None, None)
        values = np.asarray(seconds) * MILLISECONDS
        p50, p99 = np.percentile(values, [50, 99])
        return cls(*(round(float(value), 3) for value in (values.mean(), p50, p99)))


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """One round against one server.

    ttft: time to the first output. tpot: time per output token after the first,
    (e2e - ttft) / (tokens - 1). itl: time between two chunks with output. e2e: to the last byte.
    """

    duration_s: float
    completed: int
    errors: dict[str, int]
    prompt_tokens: int
    output_tokens: int
    chunks: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Latency
    tpot_ms: Latency
    itl_ms: Latency
    e2e_ms: Latency
    client_cpu_s: float
    client_us_per_chunk: float | None


def summarise(answers: Sequence[Answer], client_cpu_s: float) -> RoundResult:
    """Figures of all answers of a round; failed ones count as errors and nowhere else."""
    good = [answer for answer in answers if answer.error is None]
    duration = max((a.ended for a in answers), default=0.0) - min(
        (a.started for a in answers), default=0.0
    )
    prompt_tokens = sum(answer.prompt_tokens or 0 for answer in good)
    output_tokens = sum(answer.num_tokens for answer in good)
    chunks = sum(len(answer.chunk_times) for answer in good)
    per_second = 1 / duration if duration > 0 else 0.0
    gaps = [np.diff(answer.chunk_times) for answer in good if len(answer.chunk_times) > 1]
    return RoundResult(
        duration_s=round(duration, 4),
        completed=len(good),
        errors=dict(Counter(answer.error for answer in answers if answer.error is not None)),
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        chunks=chunks,
        requests_per_s=round(len(good) * per_second, 3),
        output_tokens_per_s=round(output_tokens * per_second, 1),
        total_tokens_per_s=round((prompt_tokens + output_tokens) * per_second, 1),
        ttft_ms=Latency.of([answer.first - answer.started for answer in good]),
        tpot_ms=Latency.of(
            [(a.ended - a.first) / (a.num_tokens - 1) for a in good if a.num_tokens > 1]
        ),
        itl_ms=Latency.of(np.concatenate(gaps) if gaps else []),
        e2e_ms=Latency.of([answer.ended - answer.started for answer in good]),
        client_cpu_s=round(client_cpu_s, 4),
        client_us_per_chunk=round(client_cpu_s / chunks * 1e6, 1) if chunks else None,
    )


def middle(rounds: Sequence[RoundResult]) -> dict[str, Any]:
    """The median over rounds of every figure, errors summed: the shape of one round."""
    return _middle([asdict(result) for result in rounds])


def _middle(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for key, first in items[0].items():
        values = [item[key] for item in items]
        if key == "errors":
            merged[key] = dict(sum((Counter(value) for value in values), Counter()))
        elif isinstance(first, dict):
            merged[key] = _middle(values)
        else:
            known = [value for value in values if value is not None]
            merged[key] = median(known) if known else None
    return merged
