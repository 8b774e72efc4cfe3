"""Figures of one round of answers: rates, latencies, errors. Pure arithmetic."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from cluster.bench.goodput import MILLISECONDS, Goodput, measure_goodput
from cluster.bench.stream import Answer

Figures = Sequence[float | None]


@dataclass(frozen=True)
class Latency:
    """Milliseconds; None where nothing was measured."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    max: float | None

    @classmethod
    def of(cls, seconds: Figures) -> "Latency":
        """Compute the statistics of all samples; percentiles are interpolated."""
        known = [value for value in seconds if value is not None]
        if not known:
            return cls(None, None, None, None, None)
        values = np.asarray(known) * MILLISECONDS
        figures = (values.mean(), *np.percentile(values, [50, 90, 99, 100]))
        return cls(*(round(float(value), 3) for value in figures))


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """One round against one server; all latencies count from the moment a request was due.

    ttft: time to the first output. tpot: time per output token after the first,
    (e2e - ttft) / (tokens - 1). itl: time between two chunks with output. worst_gap: the longest such time of each
    answer. e2e: to the last byte.
    send_lag: from when a request was due to when it was sent. Tokens are None where the server
    sent no usage, drafts where its usage has none. unfinished: requests cut off by the end of an interrupted round; no
    other figure has them.
    """

    duration_s: float
    completed: int
    unfinished: int
    errors: dict[str, int]
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    draft_tokens: int | None
    accepted_draft_share: float | None
    chunks: int
    max_in_flight: int
    requests_per_s: float
    output_tokens_per_s: float | None
    total_tokens_per_s: float | None
    ttft_ms: Latency
    tpot_ms: Latency
    itl_ms: Latency
    worst_gap_ms: Latency
    e2e_ms: Latency
    send_lag_ms: Latency
    goodput: Goodput | None
    client_cpu_s: float
    client_us_per_chunk: float | None


def summarise(
    answers: Sequence[Answer], client_cpu_s: float, limits: Mapping[str, float] | None = None
) -> RoundResult:
    """Compute the figures of a round. Failed answers count as errors, and against goodput.

    The round lasts from the first scheduled request to the end of the last answer.
    """
    ended = [answer for answer in answers if answer.ended]
    good = [answer for answer in ended if answer.error is None]
    first = min((answer.started for answer in ended), default=0.0)
    duration = max((answer.ended for answer in ended), default=0.0) - first
    prompt_tokens = _total([answer.prompt_tokens for answer in good])
    output_tokens = _total([answer.completion_tokens for answer in good])
    both = None if prompt_tokens is None or output_tokens is None else prompt_tokens + output_tokens
    cached = [a.cached_tokens for a in good if a.cached_tokens is not None]
    accepted = _known(answer.accepted_drafts for answer in good)
    drafts = accepted + _known(answer.rejected_drafts for answer in good)
    chunks = sum(len(answer.chunk_times) for answer in good)
    gaps = [np.diff(answer.chunk_times) for answer in good if len(answer.chunk_times) > 1]
    return RoundResult(
        duration_s=round(duration, 4),
        completed=len(good),
        unfinished=len(answers) - len(ended),
        errors=dict(Counter(answer.error for answer in ended if answer.error is not None)),
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(cached) if cached else None,
        output_tokens=output_tokens,
        draft_tokens=drafts or None,
        accepted_draft_share=round(accepted / drafts, 4) if drafts else None,
        chunks=chunks,
        max_in_flight=_max_in_flight(ended),
        requests_per_s=_rate(len(good), duration, 3) or 0.0,
        output_tokens_per_s=_rate(output_tokens, duration, 1),
        total_tokens_per_s=_rate(both, duration, 1),
        ttft_ms=Latency.of([answer.ttft for answer in good]),
        tpot_ms=Latency.of([answer.tpot for answer in good]),
        itl_ms=Latency.of(np.concatenate(gaps).tolist() if gaps else []),
        worst_gap_ms=Latency.of([float(each.max()) for each in gaps]),
        e2e_ms=Latency.of([answer.e2e for answer in good]),
        send_lag_ms=Latency.of([answer.sent - answer.started for answer in ended]),
        goodput=measure_goodput(ended, limits or {}, duration),
        client_cpu_s=round(client_cpu_s, 4),
        client_us_per_chunk=round(client_cpu_s / chunks * 1e6, 1) if chunks else None,
    )


def middle(rounds: Sequence[RoundResult]) -> dict[str, Any]:
    """Return the median over rounds of every figure, with errors summed."""
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


def _total(counts: Sequence[int | None]) -> int | None:
    """Return the sum; None if a value is unknown, because a sum of some values would be misread."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _known(counts: Iterable[int | None]) -> int:
    """Return the sum of the values that are known."""
    return sum(count for count in counts if count is not None)


def _rate(count: int | None, duration_s: float, digits: int) -> float | None:
    if count is None:
        return None
    return round(count / duration_s, digits) if duration_s > 0 else 0.0


def _max_in_flight(answers: Sequence[Answer]) -> int:
    """Return the largest number of requests that were due or running at one time."""
    if not answers:
        return 0
    edges = [(a.started, 1) for a in answers] + [(a.ended, -1) for a in answers]
    steps = [step for _, step in sorted(edges)]  # at one moment, ends come first
    return int(np.cumsum(steps).max())
