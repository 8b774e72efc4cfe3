"""Memory, file descriptors, threads and shared segments of a server, by the role of its processes."""

import contextlib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

ROLES = {"rank": "RankActor", "supervisor": "ray::Supervisor", "ingress": "ray::ServeReplica"}
SHM = Path("/dev/shm")
SLACK = {"files": 4, "threads": 4, "rss_mb": 96.0, "processes": 0, "segments": 0}
"""What a figure may grow by: threads end a little later than their work, and buffers grow with the longest prompt."""
Figures = dict[str, dict[str, Any]]


def measure(pid: int, app_name: str, roles: Mapping[str, str] = ROLES) -> Figures:
    """Return the figures of each role in the family of `pid`: of the process with most, and the number of processes.

    app_name   of the server; the names of its segments begin so, and names last only while a group starts
    roles      for each one what the command lines of its processes contain
    """
    found: Figures = {}
    root = psutil.Process(pid)
    for process in [root, *root.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            title = " ".join(process.cmdline())
            role = next((role for role, words in roles.items() if words in title), None)
            if role is None:
                continue
            names = thread_names(process.pid)
            own = {
                "files": process.num_fds(),
                "threads": sum(names.values()),
                "rss_mb": round(process.memory_info().rss / 1e6, 1),
            }
            most = found.setdefault(role, dict.fromkeys(own, 0.0) | {"processes": 0.0})
            most["processes"] += 1
            if own["threads"] > most["threads"]:
                most["thread_names"] = names
            for name, value in own.items():
                most[name] = max(most[name], value)
    found["host"] = {"segments": float(len(list(SHM.glob(f"phalanx-{app_name}-*"))))}
    return found


def thread_names(pid: int) -> dict[str, int]:
    """Return the number of threads of each name; a thread without one has that of the thread that started it."""
    names: Counter[str] = Counter()
    for path in Path(f"/proc/{pid}/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            names[path.read_text().strip()] += 1
    return dict(sorted(names.items()))


def growth(before: Figures, after: Figures) -> list[str]:
    """Return what has grown by more than SLACK, threads with their names."""
    found = []
    for role, figures in after.items():
        earlier = before.get(role, {})
        for name, slack in SLACK.items():
            was, now = earlier.get(name, 0), figures.get(name, 0)
            if now > was + slack:
                found.append(f"{role}: {name} {was:g} -> {now:g}")
                if name == "threads":
                    found[-1] += f" ({_more(earlier, figures)})"
    return found


def _more(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    more = Counter(after["thread_names"]) - Counter(before.get("thread_names", {}))
    return ", ".join(f"{count} {name}" for name, count in sorted(more.items()))
