"""Servers of the demo model that differ in settings and take turns, so that a slow spell of the machine meets all."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from scripts.bench import ROOT
from scripts.bench.servers import ServerProcess, free_port, phalanx_command

Figures = dict[str, float]


def in_turns(
    modes: dict[str, list[str]],
    settings: Sequence[str],
    one_round: Callable[[str, int], Figures],
    rounds: range,
    *,
    digits: int,
) -> dict[str, Any]:
    """Start a server for each mode, with its settings and `settings` of all; return the figures by mode.

    one_round(url, number)   the figures of one server in one round
    rounds   numbers of the rounds; those below 0 warm up and do not count
    digits   of the medians, which stand beside the rounds
    """
    servers: dict[str, ServerProcess] = {}
    found: dict[str, list[Figures]] = {mode: [] for mode in modes}
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder:
        try:
            for mode, own in modes.items():
                port = free_port()
                changed = [f"serve.app_name=bench-{port}", *own, *settings]
                command = phalanx_command(ROOT / "configs" / "local.yaml", port, changed)
                servers[mode] = ServerProcess(command, port, "demo", Path(folder) / f"{port}.log")
            for number in rounds:
                for mode in list(modes) if number % 2 else list(modes)[::-1]:
                    figures = one_round(servers[mode].url, number)
                    print(number, mode, figures, flush=True)
                    if number >= 0:
                        found[mode].append(figures)
        finally:
            for server in servers.values():
                server.stop()
    return {
        mode: {name: round(median(one[name] for one in each), digits) for name in each[0]}
        | {"rounds": each}
        for mode, each in found.items()
    }
