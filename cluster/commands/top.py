"""`phalanx top`: a live table of a running server's ranks, from its /metrics."""

import contextlib
import json
import time
from dataclasses import asdict
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

from cluster.commands.server_url import TIMEOUT_S, UnreachableError, base_url, no_answer
from cluster.commands.top_metrics import NotPhalanxError, Scrape, overview
from cluster.commands.top_table import table


def watch(url: str, *, once: bool = False, as_json: bool = False, interval: float = 1.0) -> None:
    """Show the ranks of the server at `url` every `interval` seconds until Ctrl-C, or once.

    Raises UnreachableError without a server there, ValueError for text that is no URL.
    """
    with contextlib.suppress(KeyboardInterrupt):
        _run(base_url(url), once=once, as_json=as_json, interval=interval)


def _run(url: str, *, once: bool, as_json: bool, interval: float) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if console.is_terminal and not once and not as_json:
        _live(url, interval)
        return
    before = scrape(url)
    while True:
        time.sleep(interval)
        now = scrape(url)
        seen = overview(before, now)
        if as_json:
            print(json.dumps(_rounded(asdict(seen))), flush=True)
        else:
            console.print(table(seen, url))
        if once:
            return
        before = now


def _live(url: str, interval: float) -> None:
    from rich.live import Live

    before = scrape(url)
    with Live(table(overview(before, before), url), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(interval)
            try:
                now = scrape(url)
            except UnreachableError as error:  # the server may come back
                live.update(f"{error}\n(Ctrl-C ends)", refresh=True)
                continue
            live.update(table(overview(before, now), url), refresh=True)
            before = now


def scrape(url: str) -> Scrape:
    """The server's metrics now. Raises UnreachableError."""
    try:
        with urlopen(f"{url}/metrics", timeout=TIMEOUT_S) as answer:
            text = answer.read().decode("utf-8", "replace")
        return Scrape(text, time.monotonic())
    except NotPhalanxError as error:
        raise UnreachableError(f"{url} is not a Phalanx server: {error}") from error
    except HTTPError as error:
        raise UnreachableError(
            f"{url} is not a Phalanx server: its /metrics answers {error.code}"
        ) from error
    except (OSError, HTTPException) as error:
        raise no_answer(f"{url}/metrics", error) from error


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list) else value
