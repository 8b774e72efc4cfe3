"""The table of `phalanx top`. Knows nothing of /metrics."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.commands.top_metrics import GroupRow, Overview, RankRow, total

# 80 columns in all. hits: of the prefix cache; vote: share of a step spent waiting for votes; queue: median.
_COLUMNS = (
    *("rank", "in tok/s", "out tok/s", "run", "wait", "KV cache", "hits"),
    *("steps/s", "ms/step", "vote", "queue"),
)
_BAR = 6


def table(seen: Overview, url: str) -> RenderableType:
    """A row for each rank and one for all; the requests' latencies above."""
    head = Text.assemble(
        (seen.model or "?", "bold"),
        f"  {url}  {seen.requests_per_s:.1f} requests/s",
        (f", {seen.errors_per_s:.1f} errors/s", "red") if seen.errors_per_s else "",
    )
    latencies = Text(
        f"p50: first token {_ms(seen.ttft_p50_ms)}, between tokens {_ms(seen.inter_token_p50_ms)}, "
        f"whole request {_ms(seen.e2e_p50_ms)}"
    )
    latencies.append(_caps(seen.ranks))
    states = [Text(_state(group), style=state_style(group.state)) for group in seen.groups]
    if not seen.ranks:
        return Group(head, *states, latencies, Text("no rank answers", style="red"))
    rows = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for name in _COLUMNS:
        rows.add_column(name, justify="left" if name == "rank" else "right", no_wrap=True)
    for row in seen.ranks:
        rows.add_row(*_cells(row))
    if len(seen.ranks) > 1:
        sums = total(seen.ranks)
        rows.add_row(
            "all",
            f"{sums['prompt_tokens_per_s']:,.0f}",
            f"{sums['generation_tokens_per_s']:,.0f}",
            str(sums["running"]),
            str(sums["waiting"]),
            _bar(sums["kv_cache_usage"]),
            style="bold",
        )
    return Group(head, *states, latencies, Text(), rows)


def state_style(state: str) -> str:
    """The colour of a group's state."""
    return {"serving": "green", "failed": "red", "stopped": "red"}.get(state, "yellow")


def duration(seconds: float) -> str:
    """Seconds in the unit that fits."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"


def _state(group: GroupRow) -> str:
    stage = f", stage {group.stage}" if group.stage else ""
    return (
        f"{group.state} for {duration(group.seconds)}{stage}, epoch {group.epoch}, "
        f"{group.rebuilds} rebuild{'' if group.rebuilds == 1 else 's'}"
    )


def _caps(rows: list[RankRow]) -> str:
    """A line with the limit of prompts beside decodes, of the lowest to the highest group; empty without a limit."""
    caps = [row.prefill_cap for row in rows if row.prefill_cap is not None]
    if not caps:
        return ""
    values = " to ".join(f"{cap:,}" for cap in sorted({min(caps), max(caps)}))
    return f"\nprompts beside decodes: at most {values} tokens of a rank in a step"


def _cells(row: RankRow) -> list[str]:
    return [
        str(row.rank),
        f"{row.prompt_tokens_per_s:,.0f}",
        f"{row.generation_tokens_per_s:,.0f}",
        str(row.running),
        str(row.waiting),
        _bar(row.kv_cache_usage),
        _share(row.prefix_hit_rate),
        f"{row.steps_per_s:,.0f}",
        "-" if row.step_ms is None else f"{row.step_ms:.2f}",
        _share(row.vote_share),
        "-" if row.queue_p50_ms is None else f"{row.queue_p50_ms:,.0f} ms",
    ]


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _bar(share: float) -> str:
    filled = round(_BAR * min(max(share, 0.0), 1.0))
    return f"{'#' * filled}{'.' * (_BAR - filled)} {share:4.0%}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:,.1f} ms"
