"""Compares each server with the first server. Pure arithmetic."""

from collections.abc import Sequence
from statistics import median
from typing import Any

# Key of a round's figures, part of it, and what a person reads. Above 1 is better for rates only.
COMPARED: tuple[tuple[str, str | None, str], ...] = (
    ("requests_per_s", None, "requests/s"),
    ("output_tokens_per_s", None, "output tok/s"),
    ("total_tokens_per_s", None, "total tok/s"),
    ("goodput", "requests_per_s", "goodput requests/s"),
    ("ttft_ms", "p50", "time to first token, p50"),
    ("ttft_ms", "p99", "time to first token, p99"),
    ("tpot_ms", "p50", "time per output token, p50"),
    ("itl_ms", "p50", "between chunks, p50"),
    ("itl_ms", "p99", "between chunks, p99"),
    ("worst_gap_ms", "p50", "worst gap of a stream, p50"),
    ("worst_gap_ms", "p99", "worst gap of a stream, p99"),
    ("e2e_ms", "p50", "whole answer, p50"),
)


def compare(
    rounds: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]
) -> dict[str, dict[str, float]]:
    """Return for each figure the ratio of round k to the base's round k: median, lowest and highest.

    Rounds are paired because paired rounds ran one after the other, under the same load of the machine. Figures that
    one server lacks, or where the base has 0, are left out.
    """
    found = {}
    for key, part, _ in COMPARED:
        # An interrupted run may have left one of them a round short.
        pairs = [
            (_pick(ours, key, part), _pick(theirs, key, part))
            for ours, theirs in zip(rounds, base, strict=False)
        ]
        ratios = [value / against for value, against in pairs if value is not None and against]
        if ratios:
            found[ratio_name(key, part)] = {
                "median": round(median(ratios), 4),
                "low": round(min(ratios), 4),
                "high": round(max(ratios), 4),
            }
    return found


def ratio_name(key: str, part: str | None) -> str:
    """Return the name of a ratio in the JSON."""
    return key if part is None else f"{key}.{part}"


def _pick(figures: dict[str, Any], key: str, part: str | None) -> float | None:
    value = figures.get(key)  # results of an older version lack some
    found: float | None = value if part is None or value is None else value[part]
    return found
