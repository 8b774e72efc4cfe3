"""Goodput: the requests that met all latency limits. Pure arithmetic."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.bench.settings import BenchError
from cluster.bench.stream import Answer

ALIASES = {"e2el": "e2e"}
MILLISECONDS = 1000.0


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Shares of all requests. A failed request meets no limit.

    `met` has the share of each limit by itself. requests_per_s counts the requests that met all limits.
    """

    share: float | None
    requests_per_s: float
    met: dict[str, float | None]


def parse_limits(texts: Sequence[str]) -> dict[str, float]:
    """Parse limits such as `ttft:200` into name -> milliseconds; commas or spaces separate several limits."""
    limits: dict[str, float] = {}
    for part in " ".join(texts).replace(",", " ").split():
        name, _, number = part.partition(":")
        name = ALIASES.get(name, name)
        try:
            value = float(number)
        except ValueError:
            value = -1.0
        if name not in ("ttft", "tpot", "e2e") or not (value > 0 and math.isfinite(value)):
            raise BenchError(f"--goodput {part!r} is not a limit; write ttft:MS, tpot:MS or e2e:MS")
        if name in limits:
            raise BenchError(f"--goodput: two limits for {name}")
        limits[name] = value
    return limits


def measure_goodput(
    answers: Sequence[Answer], limits: Mapping[str, float], duration_s: float
) -> Goodput | None:
    """Return the goodput of all finished requests, failed requests included; None without limits."""
    if not limits:
        return None
    met = {
        name: [answer.error is None and _meets(answer, name, limit) for answer in answers]
        for name, limit in limits.items()
    }
    num_good = sum(map(all, zip(*met.values(), strict=True)))

    def share(count: int) -> float | None:
        return round(count / len(answers), 4) if answers else None

    return Goodput(
        share=share(num_good),
        requests_per_s=round(num_good / duration_s, 3) if duration_s > 0 else 0.0,
        met={name: share(sum(values)) for name, values in met.items()},
    )


def _meets(answer: Answer, name: str, limit_ms: float) -> bool:
    """Whether an answer meets a limit. An answer without the figure, such as tpot of one token, meets it."""
    seconds = {"ttft": answer.ttft, "tpot": answer.tpot, "e2e": answer.e2e}[name]
    return seconds is None or seconds * MILLISECONDS <= limit_ms
