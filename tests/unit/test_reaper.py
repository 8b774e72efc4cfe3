"""The reaper ends the processes of a killed launcher's Ray, stopped ones too, and no process else."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.commands import reaper

ROOT = Path(__file__).parents[2]
LAUNCHER = """
import os, signal, subprocess, sys, time
from cluster.commands import reaper

reaper.start()
reaper.start()
logs = f"{sys.argv[1]}/session_2026-01-01_00-00-00_1_{os.getpid()}/logs"
other = f"{sys.argv[1]}/session_2026-01-01_00-00-00_1_{os.getpid()}0/logs"
for folder in (logs, other):
    os.makedirs(folder)
    open(folder + "/rank.out", "w").close()
sleep = [sys.executable, "-I", "-S", "-c", "import time; time.sleep(100)"]
children = [
    subprocess.Popen(sleep, start_new_session=True, stdout=open(f"{folder}/rank.out", mode))
    for folder, mode in ((logs, "a"), (logs, "a"), (logs, "r"), (other, "a"))
]
children[1].send_signal(signal.SIGSTOP)
print(*[child.pid for child in children], *[r.pid for r in reaper._reapers.values()], flush=True)
time.sleep(100)
"""


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_dead(pids: list[int], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, [pid for pid in pids if alive(pid)]
        time.sleep(0.05)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_what_a_dead_launcher_left(tmp_path, how):
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    running, stopped, reader, foreign, *reapers = map(int, launcher.stdout.readline().split())
    try:
        assert len(reapers) == 1, "a second start has no effect"
        assert all(map(alive, (running, stopped, reader, foreign, *reapers)))
        assert sorted(reaper.session_processes(launcher.pid)) == sorted([running, stopped])
        launcher.send_signal(how)
        launcher.communicate(timeout=30)
        wait_dead([running, stopped, *reapers])
        assert alive(reader) and alive(foreign)
    finally:
        for pid in (running, stopped, reader, foreign):
            reaper._kill(pid)


def test_the_folder_of_a_session_ends_with_the_launchers_process_id():
    """The rule of Ray by which the reaper finds its processes."""
    import inspect

    from ray._private.node import Node

    assert re.search(r'f"session_\{[a-z_]+\}_\{os\.getpid\(\)\}"', inspect.getsource(Node.__init__))
