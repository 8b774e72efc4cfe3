"""Memory, file descriptors, threads and shared segments of a server, by the role of its processes."""

import contextlib
from pathlib import Path
from typing import Any

import psutil

ROLES = {"rank": "RankActor", "supervisor": "ray::Supervisor", "ingress": "ray::ServeReplica"}
SHM = Path("/dev/shm")
SLACK = {"files": 4, "threads": 4, "rss_mb": 96.0, "processes": 0, "segments": 0}
"""What a figure may grow by: threads end a little later than their work, and buffers grow with the longest prompt."""


def measure(pid: int) -> dict[str, dict[str, float]]:
    """Return the figures of each role: of the process with most, and the number of processes."""
    found: dict[str, dict[str, float]] = {}
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            title = " ".join(process.cmdline())
            role = next((role for role, words in ROLES.items() if words in title), None)
            if role is None:
                continue
            own = {
                "files": process.num_fds(),
                "threads": process.num_threads(),
                "rss_mb": round(process.memory_info().rss / 1e6, 1),
            }
            most = found.setdefault(role, dict.fromkeys(own, 0.0) | {"processes": 0.0})
            most["processes"] += 1
            for name, value in own.items():
                most[name] = max(most[name], value)
    found["host"] = {"segments": float(len(list(SHM.glob("phalanx-*"))))}
    return found


def growth(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[str]:
    """Return what has grown by more than SLACK."""
    return [
        f"{role}: {name} {before.get(role, {}).get(name, 0):g} -> {value:g}"
        for role, figures in after.items()
        for name, value in figures.items()
        if value > before.get(role, {}).get(name, 0) + SLACK[name]
    ]
