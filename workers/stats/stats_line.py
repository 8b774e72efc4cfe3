"""Log line of a busy rank, written every INTERVAL_S seconds: arithmetic on two snapshots of its counters."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


def stats_fields(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any] | None:
    """Return the figures of a rank between two `EngineStats.snapshot`s; None if it worked on no request.

    Rates are per second, times in milliseconds of a step, shares between 0 and 1.
    """

    def grown(key: str) -> float:
        difference: float = now[key] - before[key]  # of counters an int, which is printed so
        return difference

    seconds, steps = grown("time"), grown("steps")
    tokens = grown("prompt_tokens") + grown("generation_tokens")
    if seconds <= 0 or steps <= 0 or not (tokens or now["running"]):
        return None
    parts = {part: end - before["step_seconds"][part] for part, end in now["step_seconds"].items()}
    step_s = sum(parts.values())
    queries = grown("prefix_cache_queries")
    return {
        "prompt_tokens_per_s": round(grown("prompt_tokens") / seconds, 1),
        "generation_tokens_per_s": round(grown("generation_tokens") / seconds, 1),
        "running": now["running"],
        "waiting": now["waiting"],
        "kv_cache_usage": round(now["kv_cache_usage"], 4),
        "prefix_hit_rate": round(grown("prefix_cache_hits") / queries, 4) if queries else None,
        "preemptions": grown("preemptions"),
        "prefill_cap": now["prefill_cap"],
        "steps": steps,
        "step_ms": {part: round(1e3 * value / steps, 3) for part, value in parts.items()},
        "vote_share": round(parts["vote"] / step_s, 4) if step_s else 0.0,
    }


def stats_line(fields: dict[str, Any]) -> str:
    """Return the fields as a line of text."""
    split = ", ".join(f"{part} {value:.2f}" for part, value in fields["step_ms"].items())
    hits = fields["prefix_hit_rate"]
    line = (
        f"{fields['prompt_tokens_per_s']:,.0f} prompt + {fields['generation_tokens_per_s']:,.0f} output tok/s, "
        f"{fields['running']} running, {fields['waiting']} waiting, KV {fields['kv_cache_usage']:.1%}, "
        f"{fields['steps']} steps of {sum(fields['step_ms'].values()):.2f} ms ({split}), "
        f"waited for others {fields['vote_share']:.0%}"
    )
    if hits is not None:
        line += f", prefix hits {hits:.0%}"
    if fields["prefill_cap"] is not None:
        line += f", at most {fields['prefill_cap']:,} prompt tokens beside decodes"
    if fields["preemptions"]:
        line += f", {fields['preemptions']} preemptions"
    return line


async def log_stats(snapshot: Callable[[], dict[str, Any] | None]) -> None:
    """Log the work of each interval of INTERVAL_S seconds with any work, until `snapshot` returns None."""
    before = snapshot()
    while before is not None:
        await asyncio.sleep(INTERVAL_S)
        now = snapshot()
        fields = None if now is None else stats_fields(before, now)
        if fields is not None:
            logger.info("%s", stats_line(fields), extra=fields)
        before = now
