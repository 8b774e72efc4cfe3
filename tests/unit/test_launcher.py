"""What a launcher does to processes, without Ray."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import ray

from cluster.supervisor.launcher import RankLauncher
from cluster.supervisor.placement import RankLocation
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
