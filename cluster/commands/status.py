"""`phalanx status`: the states of a running server's groups, from its /ready."""

import json
import time
from datetime import datetime
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from cluster.commands.server_url import UnreachableError, base_url, no_answer

TIMEOUT_S = 15.0
"""Longer than a probe of the ranks by the server."""
_STYLES = {"serving": "green", "failed": "red", "stopped": "red"}


def show(url: str, *, as_json: bool, watch_s: float | None = None) -> bool:
    """Print the states; return whether the server serves. Raises UnreachableError without a server at the URL.

    watch_s   seconds between two prints, until Ctrl-C or until the server does not answer; None prints once
    """
    url = base_url(url)
    while True:
        ready, body = fetch(url)
        if as_json:
            print(json.dumps(body), flush=True)
        else:
            Console(highlight=False).print(table(url, ready, body), soft_wrap=True)
        if watch_s is None:
            return ready
        try:
            time.sleep(watch_s)
        except KeyboardInterrupt:
            return ready


def fetch(url: str) -> tuple[bool, dict[str, Any]]:
    """Whether the server at `url` serves, and the body of its /ready."""
    try:
        with urlopen(f"{url}/ready", timeout=TIMEOUT_S) as answer:
            return True, _body(url, answer.read())
    except HTTPError as error:
        return False, _body(url, error.read())
    except (OSError, HTTPException) as error:
        raise no_answer(f"{url}/ready", error) from error


def table(url: str, ready: bool, body: dict[str, Any]) -> RenderableType:
    """Each group with its state, its role if it has one, the stages of its last rebuild, and its ranks' vote ages."""
    head = Text.assemble(
        (body["status"], "green" if ready else "red"),
        f"  {url}",
        "" if ready else f"  {body['error']['message']}",
    )
    return Group(head, *map(_group, body["groups"]))


def _group(group: dict[str, Any]) -> RenderableType:
    rows = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    rows.add_column(style="dim")
    rows.add_column()
    since = datetime.fromtimestamp(group["since"]).strftime("%Y-%m-%d %H:%M:%S")
    state = Text(group["state"], style=_STYLES.get(group["state"], "yellow"))
    rows.add_row(f"group {group['name']}", state + f" since {since} ({duration(group['seconds'])})")
    if group["role"] != "generate":
        rows.add_row("role", group["role"])
    if group["error"]:
        rows.add_row("reason", group["error"])
    if group["stage"]:
        done, total = group["progress"]
        share = f", {done / total:.0%}" if total else ""
        rows.add_row("stage", f"{group['stage']}{share}")
    rows.add_row("epoch", f"{group['epoch']}, {group['rebuilds']} rebuilds")
    last = group["last_rebuild"]
    if last:
        stages = ", ".join(f"{name} {spent:.1f} s" for name, spent in last["stages"].items())
        rows.add_row("last rebuild", f"{last['seconds']:.1f} s: {last['reason']} ({stages})")
    ages = group["vote_age_seconds"]
    if ages:
        rows.add_row("vote ages", ", ".join(f"{age:.1f} s" for age in ages))
    for rank in group["slow_ranks"]:
        slowdown = group["rank_slowdowns"][rank]
        rows.add_row("slow", f"rank {rank}: {slowdown:.1f} times as long as the others")
    return rows


def duration(seconds: float) -> str:
    """Seconds in the unit that fits."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s"


def _body(url: str, text: bytes) -> dict[str, Any]:
    try:
        body = json.loads(text)
        if isinstance(body["groups"], list) and isinstance(body["status"], str):
            return dict(body)
    except (ValueError, KeyError, TypeError):
        pass
    raise UnreachableError(f"{url} is not a Phalanx server: its /ready has no states of groups")
