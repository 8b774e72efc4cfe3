"""The pauses of the failures of scripts/chaos, by kind."""

from statistics import median, quantiles
from typing import Any

from scripts.bench.chaos_faults import Failure
from scripts.bench.chaos_streams import Found


def pauses(failures: list[Failure], found: Found) -> dict[str, Any]:
    """Return the times of the failures, by kind."""
    of_kind: dict[str, list[Failure]] = {}
    for failure in failures:
        of_kind.setdefault(failure.kind, []).append(failure)
    return {
        kind: {
            "count": len(members),
            "pause_s": spread([found.pause(failure.at) for failure in members]),
            "detected_s": spread([f.detected_s for f in members if f.detected_s is not None]),
            "serving_s": spread([f.serving_s for f in members if f.serving_s is not None]),
            "stages_s": {
                name: round(median([f.stages[name] for f in members if name in f.stages]), 3)
                for name in dict.fromkeys(name for f in members for name in f.stages)
            },
        }
        for kind, members in of_kind.items()
    }


def spread(seconds: list[float]) -> dict[str, float]:
    """Return median, 99th percentile and maximum."""
    if not seconds:
        return {}
    p99 = quantiles(seconds, n=100, method="inclusive")[98] if len(seconds) > 1 else seconds[0]
    return {
        "median": round(median(seconds), 2),
        "p99": round(p99, 2),
        "most": round(max(seconds), 2),
    }
