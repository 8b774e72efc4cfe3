"""What a launcher does to processes, without Ray."""

import asyncio
import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from cluster.supervisor import placement
from cluster.supervisor.launcher import RankLauncher, rank_launchers
from cluster.supervisor.placement import PlacementError, RankLocation
from kernels.host.processes import start_ticks
from tests.unit.ray_fakes import rank_config


@pytest.mark.parametrize(
    ("node", "later_s", "ends"),
    [("here", 0, True), ("elsewhere", 0, False), ("here", 1, False)],
    ids=["here", "on another node", "another process has its number"],
)
def test_a_process_that_does_not_react_ends_at_once_on_this_node(
    monkeypatch: pytest.MonkeyPatch, node: str, later_s: int, ends: bool
) -> None:
    """Ray gives it 5 s, in which its place is taken."""
    killed: list[str] = []
    monkeypatch.setattr(ray, "kill", killed.append)
    context = SimpleNamespace(get_node_id=lambda: "here")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    launcher = RankLauncher(rank_config(), name="app:1", joined=False)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        process.send_signal(signal.SIGSTOP)
        started = start_ticks(process.pid) - later_s * os.sysconf("SC_CLK_TCK")
        location = RankLocation(0, node, "192.0.2.1", process.pid, (), started)
        launcher.end("handle", location)
        assert killed == ["handle"]
        if ends:
            assert process.wait(30) == -signal.SIGKILL
        else:
            assert process.poll() is None
        process.kill()
        process.wait(30)
    launcher.end("handle", location)  # it has ended


def test_groups_with_more_ranks_on_a_node_get_their_places_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group without room lets the next one have its turn, and so does one that ends before its turn."""
    log: list[str] = []

    def create(config: Any, name: str) -> str:
        log.append(f"create {name}")
        return name

    def wait_ready(config: Any, group: str, timeout_s: float) -> None:
        log.append(f"wait {group}")
        if group == "four":
            raise PlacementError("no room")

    async def start(self: RankLauncher, rank: int, *place: Any) -> int:
        return rank

    monkeypatch.setattr(placement, "create", create)
    monkeypatch.setattr(placement, "wait_ready", wait_ready)
    monkeypatch.setattr(RankLauncher, "start", start)
    groups = {"one": 1, "four": 4, "three": 3, "two": 2}
    configs = {name: rank_config(num_ranks) for name, num_ranks in groups.items()}

    async def launched() -> list[Any]:
        one, four, three, two = rank_launchers(configs, joined=True)
        three.kill()
        return await asyncio.gather(
            *(it.launch(60) for it in (one, two, four)), return_exceptions=True
        )

    of_one, of_two, of_four = asyncio.run(launched())
    assert (of_one, of_two) == ([0], [0, 1]) and isinstance(of_four, PlacementError)
    assert log == [
        f"{what} {name}" for name in ("four", "two", "one") for what in ("create", "wait")
    ]
