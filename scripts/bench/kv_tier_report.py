"""The page of `scripts.bench.kv_tier`: one table of sessions and random prompts, one of pauses behind a failure."""

from pathlib import Path
from typing import Any

from scripts.bench.results import markdown_table, origin_line

PROMPTS = {"sessions": "turns behind the first one", "random": "prompts that share nothing"}
PAUSES = {
    "killed_rank": "of the killed rank",
    "killed_rank_behind_rebuild": "the same, behind the rebuild",
    "other_ranks": "of other ranks",
}


def page(report: dict[str, Any], _name: str) -> str:
    """All of the .md but its notes."""
    options, servers = report["options"], report["servers"]
    parts = set(next(iter(servers.values()))) - {"settings"}
    return (
        "# Sessions with and without a host tier of KV\n\n"
        f"{origin_line(report)} {options['ranks']} rank(s), model {_model(servers)}; through HTTP.\n\n"
        + (_prompts(report) + "\n" if parts & set(PROMPTS) else "")
        + (_pauses(report) + "\n" if "kill" in parts else "")
        + f"Answers of both servers that are equal: {_equal(report)}.\n"
    )


def _model(servers: dict[str, Any]) -> str:
    settings = next(iter(servers.values()))["settings"]
    paths = [it.partition("=")[2] for it in settings if it.startswith("model.path=")]
    return Path(paths[-1]).name if paths else "of the configuration"


def _prompts(report: dict[str, Any]) -> str:
    options, ratios = report["options"], report["ratios"]
    head = (
        *("prompts", "server", "output tok/s", "tokens/s in all"),
        *("first token p50 / p99 (s)", "share of cached tokens"),
    )
    rows = [
        [
            *(PROMPTS[part], server, f"{it['output_tok_s']:,.0f}", f"{it['total_tok_s']:,.0f}"),
            f"{it['first_token_p50_s']:.2f} / {it['first_token_p99_s']:.2f}",
            f"{it['cached_share']:.3f}",
        ]
        for part in PROMPTS
        for server, found in report["servers"].items()
        if (it := found.get(part)) is not None
    ]
    lines = []
    if "output_tok_s" in ratios:
        lines.append(
            f"- Tier over none: output {ratios['output_tok_s']:.2f} times, first token "
            f"{ratios['first_token_p50']:.2f} times as early."
        )
    if (rate := ratios.get("restore_bytes_s")) is not None:
        lines.append(
            f"- Restores: {rate / 1e9:.1f} GB/s, {100 * ratios['restore_share_of_link']:.0f} % of one plain copy."
        )
    if "random_total_tok_s" in ratios:
        lines.append(f"- Prompts that share nothing: {ratios['random_total_tok_s']:.3f} times.")
    return (
        f"{options['sessions']} sessions of {int(options['tokens']):,} tokens, {options['concurrency']} at once, "
        f"answers of {options['output_len']} tokens; the device holds a quarter of their KV.\n\n"
        + markdown_table(head, rows)
        + "\n"
        + "".join(f"{line}\n" for line in lines)
    )


def _pauses(report: dict[str, Any]) -> str:
    options = report["options"]
    rows = [
        [named, server, *(f"{it[f'pause_{place}_s']:.2f}" for place in ("p50", "p99", "max"))]
        for kind, named in PAUSES.items()
        for server, found in report["servers"].items()
        if "pause_p50_s" in (it := found["kill"].get(kind, {}))
    ]
    return (
        f"SIGKILL for a rank under {options['kill_sessions']} streams behind {int(options['kill_tokens']):,} tokens, "
        f"{options['kills']} times; pause of a stream in seconds.\n\n"
        + markdown_table(("streams", "server", "p50", "p99", "longest"), rows)
    )


def _equal(report: dict[str, Any]) -> str:
    equal: dict[str, str] = report["ratios"]["equal_answers"]
    return ", ".join(f"{count} ({part})" for part, count in equal.items())
