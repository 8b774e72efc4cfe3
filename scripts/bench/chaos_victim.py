"""The server that scripts/chaos fails: its processes, its state, and requests of an operator."""

import asyncio
import contextlib
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

POLL_S = 0.05
STATE = re.compile(r"^(\w+), epoch (\d+)", re.M)
SLOW = re.compile(r"rank (\d+) is slow: .* process (\d+) on")
SLOW_METRIC = re.compile(r'^phalanx:slow_rank\{.*rank="(\d+)"\} 1', re.M)
SERVING_S = 120.0
"""Time for a group to serve again."""
POISON_SEED = 666_000_666
"""Seed of a request that fails each step of a rank, see fault_hooks."""
OPERATOR_KEY = "operator-of-chaos"


class Victim:
    """The processes of a server, and its state.

    log      the output of the server
    folder   the folder of its fault points
    """

    def __init__(
        self, pid: int, log: Path, client: httpx.AsyncClient, folder: Path, num_ranks: int
    ):
        self._pid, self._log, self._client, self.folder = pid, log, client, folder
        self.num_ranks = num_ranks

    @property
    def root(self) -> Path:
        """The root folder as the server sees it, which may have file systems of its own."""
        return Path(f"/proc/{self._pid}/root")

    def processes(self, title: str) -> list[psutil.Process]:
        """Return the living processes with `title` in their command line."""
        found = []
        for process in psutil.Process(self._pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if title in " ".join(process.cmdline()) and process.status() != "zombie":
                    found.append(process)
        return found

    async def ranks(self) -> list[psutil.Process]:
        """Return the processes of the ranks, once all live."""
        found = self.processes("RankActor")
        while len(found) < self.num_ranks:
            await asyncio.sleep(POLL_S)
            found = self.processes("RankActor")
        return found

    async def appears(self, title: str) -> None:
        """Return when there is a process with `title`."""
        deadline = time.monotonic() + SERVING_S
        while not self.processes(title):
            assert time.monotonic() < deadline, f"no process {title}"
            await asyncio.sleep(POLL_S)

    async def gone(self, process: psutil.Process) -> None:
        """Return when a process has ended."""
        deadline = time.monotonic() + SERVING_S
        with contextlib.suppress(psutil.NoSuchProcess):
            while process.is_running() and process.status() != "zombie":
                assert time.monotonic() < deadline, f"process {process.pid} lives on"
                await asyncio.sleep(POLL_S)

    @contextlib.contextmanager
    def stopped(self, title: str) -> Iterator[None]:
        """Stop the process with `title` while the block runs."""
        (process,) = self.processes(title)
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)

    def group(self) -> tuple[str, int]:
        """Return the last state and epoch that the server has printed."""
        changes = STATE.findall(self._log.read_text(errors="replace"))
        return (changes[-1][0], int(changes[-1][1])) if changes else ("serving", 0)

    async def wait_group(self, wanted: Callable[[str, int], bool]) -> int:
        """Return the epoch of the group once its state and epoch are as wanted."""
        deadline = time.monotonic() + SERVING_S
        while not wanted(*(group := self.group())):
            assert time.monotonic() < deadline, f"the group is {group}"
            await asyncio.sleep(POLL_S)
        return group[1]

    async def stages(self) -> dict[str, float]:
        """Return the seconds of each stage of the last rebuild."""
        try:
            group = (await self._client.get("/ready", timeout=5)).json()["groups"][0]
        except (httpx.HTTPError, ValueError, LookupError):
            return {}
        return dict((group["last_rebuild"] or {}).get("stages", {}))

    def slow_rank(self, pid: int) -> int | None:
        """Return the rank of a process that the log has called slow."""
        found = SLOW.findall(self._log.read_text(errors="replace"))
        return next((int(rank) for rank, other in reversed(found) if int(other) == pid), None)

    async def slow_ranks(self) -> list[int]:
        """Return the slow ranks of the metrics."""
        try:
            text = (await self._client.get("/metrics", timeout=5)).text
        except httpx.HTTPError:
            return []
        return [int(rank) for rank in SLOW_METRIC.findall(text)]

    async def arm(self, process: psutil.Process, point: str) -> None:
        """Let a point of a rank fail, and return when it has."""
        path = self.folder / f"{process.pid}.{point}"
        path.touch()
        deadline = time.monotonic() + SERVING_S
        while path.exists() and process.is_running():
            assert time.monotonic() < deadline, f"point {point} was not reached"
            await asyncio.sleep(POLL_S)

    @contextlib.contextmanager
    def present(self, name: str) -> Any:
        """Let a file be there, see fault_hooks."""
        path = self.folder / name
        path.touch()
        try:
            yield
        finally:
            path.unlink()

    @contextlib.contextmanager
    def poisoned(self, way: str) -> Iterator[str]:
        """Let requests of `send_poison` fail each step of their rank, by SIGKILL (`die`) or an error.

        Yields a prompt for them that no request had before: an earlier one is refused.
        """
        path = self.folder / "poison"
        path.write_text(way)
        try:
            yield f"poison {time.monotonic_ns()}"
        finally:
            path.unlink()

    async def send_poison(self, prompt: str) -> httpx.Response:
        """Send a request that fails each step of its rank; return the answer."""
        deadline = time.monotonic() + SERVING_S
        while True:
            try:
                models = (await self._client.get("/v1/models")).json()["data"]
                body = {"model": models[0]["id"], "prompt": prompt, "seed": POISON_SEED}
                return await self._client.post("/v1/completions", json=body, timeout=SERVING_S)
            except httpx.ConnectError:  # the ingress starts anew
                assert time.monotonic() < deadline, "no ingress"
                await asyncio.sleep(POLL_S)

    async def operate(self, change: str, timeout_s: float) -> httpx.Response:
        """Send a call of an operator; return the answer."""
        headers = {"authorization": f"Bearer {OPERATOR_KEY}"}
        return await self._client.post(
            f"/admin/{change}", json={}, headers=headers, timeout=timeout_s
        )

    def count(self, words: str) -> int:
        """How often the server has printed these words."""
        return self._log.read_text(errors="replace").count(words)
