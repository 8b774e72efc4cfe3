"""Fetches the KV of prompts from other nodes into the host tier, by a process of its own that NIXL runs in.

A thread starts the process, sends it what the step loop wants, and reads what has come. A process that ends, or does
not answer in time, is started again; what waits for it ends with nothing, so the rank computes the prompt.
"""

import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait

from kernels.host.owned import start_thread
from workers.kv_transfer.connector import KVFetcher, Transfer
from workers.kv_transfer.contents import CacheContents
from workers.kv_transfer.host_tier import unit_bytes_of
from workers.kv_transfer.keeper import KeeperConfig, bound_waits
from workers.kv_transfer.keeper_client import ROOT
from workers.kv_transfer.kv_pull import Fetched, FetchJob, FetchLimits
from workers.kv_transfer.kv_source import Form
from workers.kv_transfer.nixl_memory import nixl_unavailable
from workers.kv_transfer.nixl_process import NixlConfig

logger = logging.getLogger(__name__)

RETRY_S, MAX_RETRY_S = 2.0, 60.0
"""Time between two starts of the process; it doubles while the process ends before it has a source."""
_PROGRAM = "import sys; sys.path.insert(0, {root!r}); from workers.kv_transfer.nixl_process import main; main({fd})"
_ENVIRONMENT = {"NIXL_LOG_LEVEL": "WARN", "OPENBLAS_NUM_THREADS": "1"}
_NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""UCX would take memory of the GPU; all that moves is in host memory."""


class _Process:
    """The process, as the thread sees it."""

    def __init__(self, config: NixlConfig, environment: Mapping[str, str]):
        ours, theirs = socket.socketpair()
        with theirs:
            program = _PROGRAM.format(root=ROOT, fd=theirs.fileno())
            self._popen = subprocess.Popen(
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what NIXL prints goes where this process's messages go
                pass_fds=[theirs.fileno()],
                env={**_ENVIRONMENT, **environment, **os.environ, **_NO_GPU},
            )
        bound_waits(ours, config.limits.part_s + 1)
        self.connection = Connection(ours.detach())
        self.connection.send(config)

    def end(self, *, in_order: bool) -> None:
        """End the process, and wait until it has ended: then it writes no more."""
        self.connection.close()
        if in_order:
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(5)
        self._popen.kill()
        self._popen.wait()


class NixlFetcher(KVFetcher):
    """The fetcher of a rank. The thread of the step loop calls it, see KVFetcher.

    address      of this host, which other nodes reach
    environment  for the process, below what this process has
    wait_ready   waits until there is a source

    Raises ValueError where NIXL is not installed, or another version of it.
    """

    place = "nixl"

    def __init__(
        self,
        keeper: KeeperConfig,
        address: str,
        environment: Mapping[str, str],
        limits: FetchLimits | None = None,
    ):
        super().__init__()
        if (unfit := nixl_unavailable()) is not None:
            raise ValueError(
                f"cache.transfer is nixl, but {unfit} on every node, or set cache.transfer: off"
            )
        self._limits = limits or FetchLimits()
        self._config = NixlConfig(keeper, address, self._limits)
        self._environment = environment
        self._changed = threading.Condition()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        # Guarded by _changed.
        self._new: deque[FetchJob] = deque()
        self._open: dict[int, tuple[Transfer, float]] = {}  # with the time of its beginning
        self._ended: deque[Transfer] = deque()
        self._form: Form | None = None
        self._number = 0
        self._closing = False
        self._counts: Counter[str] = Counter()
        # Of the thread.
        self._process: _Process | None = None
        self._next_start, self._retry_s = 0.0, RETRY_S
        self._thread = start_thread(self._run, self._failed, "kv-fetcher")

    def bind(self, contents: CacheContents) -> None:
        with self._changed:
            self._form = Form(contents.compatibility, unit_bytes_of(contents))

    def unbind(self) -> None:
        with self._changed:
            self._form = None
            self._end_all()

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until there is a source; return whether there is."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self.source), timeout_s)

    def fetch(self, transfer: Transfer) -> None:
        assert transfer.request is not None, "a fetch belongs to a request"
        now = time.monotonic()
        with self._changed:
            if self._form is not None and self.source:
                job = FetchJob(
                    self._number,
                    transfer.request.kv_source,
                    self._form,
                    transfer.items,
                    transfer.private,
                    now + self._limits.fetch_s,
                )
                self._open[self._number] = transfer, now
                self._number += 1
                self._new.append(job)
                os.eventfd_write(self._wake, 1)
                return
            self._counts["source_lost"] += len(transfer.items)
            self._ended.append(transfer)
        self.on_ended()

    def ended(self) -> list[Transfer]:
        found = []
        with suppress(IndexError):
            while True:
                found.append(self._ended.popleft())
        return found

    def counts(self) -> dict[str, float]:
        return dict(self._counts)

    def close(self) -> None:
        with self._changed:
            self._closing = True
            os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        while not self._closing:
            try:
                self._turn()
            except (OSError, EOFError) as error:
                self._lost(error)
        if self._process is not None:
            self._process.end(in_order=True)

    def _turn(self) -> None:
        """Start the process if that is due; wait for something to do, and do it."""
        now = time.monotonic()
        if self._process is None and now >= self._next_start:
            self._next_start = now + self._retry_s
            self._retry_s = min(2 * self._retry_s, MAX_RETRY_S)
            self._process = _Process(self._config, self._environment)
        sources: list[Connection | int] = [self._wake]
        if self._process is not None:
            sources.append(self._process.connection)
        ready = wait(sources, RETRY_S / 4)
        if self._wake in ready:
            os.eventfd_read(self._wake)
        if self._process is not None:
            self._send_new(self._process)
            # All answers first: a pause of this process is not one of the other.
            while self._process.connection.poll():
                self._take(self._process.connection.recv())
            self._check_time()

    def _send_new(self, process: _Process) -> None:
        with self._changed:
            jobs, self._new = list(self._new), deque()
        for job in jobs:
            process.connection.send(job)

    def _take(self, message: str | Fetched) -> None:
        """Enter the source of the process, or what it has fetched."""
        with self._changed:
            if isinstance(message, str):
                self.source, self._retry_s = message, RETRY_S
                self._changed.notify_all()
                return
            self._counts.update(message.counts)
            transfer, begun = self._open.pop(message.number, (None, 0.0))
            if transfer is None:
                return  # its epoch has ended
            transfer.done = message.done
            self._end(transfer, begun)
        self.on_ended()

    def _check_time(self) -> None:
        """Raise TimeoutError if the process does not answer."""
        oldest = min((begun for _, begun in self._open.copy().values()), default=None)
        if oldest is not None and time.monotonic() > oldest + self._limits.wait_s:
            raise TimeoutError(f"no answer within {self._limits.wait_s:g} s")

    def _lost(self, error: BaseException) -> None:
        """Go on without the process, until the next one has started; what waits ends with nothing."""
        process, self._process = self._process, None
        logger.warning("no KV of other nodes for now: %r", error)
        with self._changed:
            self.source = ""
            self._counts["lost"] += 1
            self._end_all()
        if process is not None:
            process.end(in_order=False)
        self.on_ended()

    def _end_all(self) -> None:
        """End what waits, with nothing; the caller holds `_changed`."""
        self._new.clear()
        for transfer, begun in self._open.values():
            self._end(transfer, begun)
        self._open.clear()

    def _end(self, transfer: Transfer, begun: float) -> None:
        transfer.seconds = time.monotonic() - begun
        self._counts["fetches"] += 1
        self._counts["seconds"] += transfer.seconds  # type: ignore[assignment]
        self._ended.append(transfer)

    def _failed(self, error: BaseException) -> None:
        """End the fetcher, and nothing else, after an error of its thread."""
        logger.error("the fetcher of KV has ended: %r", error)
        with self._changed:
            self.source = ""
            self._end_all()
        if self._process is not None:
            self._process.end(in_order=False)
        self.on_ended()
