"""The host tier: contents that leave the device of a rank stay in the memory of its node, for all ranks of the node.

A thread of its own talks to the node's keeper and copies rows. It connects at once, so that the keeper finds its ranks,
and again after the keeper was lost. Loads come before saves, because sequences wait for them. A transfer begins once
the device has done the work before it, and no transfer that can begin waits for another one that cannot.
"""

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from kernels.host.host_copy import blocking_event
from kernels.host.owned import start_thread
from workers.kv_transfer.connector import Item, KVConnector, Transfer
from workers.kv_transfer.contents import ROW_ALIGN, CacheContents
from workers.kv_transfer.host_index import Place
from workers.kv_transfer.keeper import KeeperConfig
from workers.kv_transfer.keeper_client import KeeperClient
from workers.kv_transfer.row_copies import CpuCopies, GpuCopies, RowCopies, RowPlace, make_lanes
from workers.wire.request import EngineRequest

logger = logging.getLogger(__name__)

RETRY_S = 5.0
"""Time between two attempts to connect to a keeper."""
COUNTS_S = 2.0
"""Time between two looks at the counters of the store."""
CLOSE_S = 5.0
"""Time for the thread to leave the keeper. A keeper that is stopped finds later that this process has ended."""
LEAST_UNIT = 512
"""Bytes of a unit where blocks are smaller."""
STATE_UNIT = 2**20
"""Bytes of a unit where no layer has KV blocks."""


def unit_bytes_of(contents: CacheContents) -> int:
    """Return the bytes of a unit of the memory, before and after `HostTier.bind`."""
    return max(LEAST_UNIT, contents.blocks.row_bytes or STATE_UNIT)


@dataclass(eq=False)
class _Job:
    """A transfer in the queue of the thread. after: the device has done the work before it; None: it is done.

    damaged   names of rows that were loaded and have other bytes; None: nothing was looked for
    """

    transfer: Transfer
    contents: CacheContents
    is_load: bool
    after: torch.cuda.Event | None = None
    forgotten: set[bytes] = field(default_factory=set)
    begun: float = field(default_factory=time.perf_counter)
    damaged: list[bytes] | None = None

    @property
    def can_begin(self) -> bool:
        """Whether the device has done the work before the transfer."""
        return self.after is None or bool(self.after.query())  # type: ignore[no-untyped-call]


class HostTier(KVConnector):
    """Contents in the memory of the node. The thread of the step loop calls it, see KVConnector.

    row_bytes      of the largest row, for which a GPU has buffers from the start
    window_blocks  blocks that a window at the end of a sequence touches; 0: no layer has one
    """

    place = "host"

    def __init__(
        self,
        config: KeeperConfig,
        device: torch.device,
        *,
        row_bytes: int = 0,
        window_blocks: int = 0,
    ):
        super().__init__()
        self._config, self._window_blocks, self._device = config, window_blocks, device
        self._lanes = make_lanes(device, row_bytes + ROW_ALIGN) if device.type == "cuda" else []
        self._changed = threading.Condition()
        # Guarded by _changed.
        self._loads: deque[_Job] = deque()
        self._saves: deque[_Job] = deque()
        self._forgotten: list[bytes] = []
        self._ended: deque[Transfer] = deque()
        self._contents: CacheContents | None = None
        self._moving: _Job | None = None
        self._copying = self._closing = False
        # Of the thread.
        self._client: KeeperClient | None = None
        self._copies: RowCopies | None = None
        self._next_attempt = self._counted_at = 0.0
        # Read by the step loop; changed under _changed.
        self._ready: KeeperClient | None = None
        self._counts: Counter[str] = Counter()
        self._store: dict[str, float] = {}
        self._unit_bytes = LEAST_UNIT
        self._thread = start_thread(self._run, self._failed, "kv-host-tier")

    def bind(self, contents: CacheContents) -> None:
        self._unit_bytes = unit_bytes_of(contents)
        for rows in (contents.blocks, contents.states):
            rows.pad_to(self._unit_bytes)
        with self._changed:
            self._contents = contents
            self._changed.notify_all()

    def unbind(self) -> None:
        with self._changed:
            self._contents = self._ready = None
            self._end_all()
            self._changed.notify_all()
            # The thread may wait for a keeper that is stopped: no one waits with it but for copies.
            self._changed.wait_for(lambda: not self._copying or not self._thread.is_alive())
            if self._moving is not None:
                self._end_moving(self._moving, set())

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until contents can be found; return whether they can."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ready is not None, timeout_s)

    def found(self, request: EngineRequest, keys: list[bytes]) -> Container[bytes]:
        client = self._ready
        return () if client is None else client.hints

    def load(self, transfer: Transfer) -> None:
        self._put(transfer, is_load=True)

    def save(self, transfer: Transfer) -> None:
        self._put(transfer, is_load=False)

    def ended(self) -> list[Transfer]:
        found = []
        with suppress(IndexError):
            while True:
                found.append(self._ended.popleft())
        return found

    def forget(self, names: Iterable[bytes]) -> None:
        with self._changed:
            gone = set(names)
            for job in self._saves:
                job.forgotten |= gone
            self._forgotten += gone
            self._changed.notify_all()

    def counts(self) -> dict[str, float]:
        return {**self._store, **self._counts}

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            logger.warning("the keeper of this node's KV does not answer; this rank does not wait")

    def _put(self, transfer: Transfer, *, is_load: bool) -> None:
        """Queue a transfer behind the launched work of the current stream."""
        after = self._launched_work()
        with self._changed:
            if self._ready is not None and self._contents is not None:
                job = _Job(transfer, self._contents, is_load, after)
                (self._loads if is_load else self._saves).append(job)
                self._changed.notify_all()
                return
            self._ended.append(transfer)
        self.on_ended()

    def _launched_work(self) -> torch.cuda.Event | None:
        """Return the end of the work that the current stream has by now; None on CPU, where it is done."""
        if self._device.type != "cuda":
            return None
        return blocking_event(torch.cuda.current_stream(self._device))

    def _end_all(self) -> None:
        """End what waits, with nothing; the caller holds `_changed`."""
        self._ended += (job.transfer for job in (*self._loads, *self._saves))
        self._loads.clear()
        self._saves.clear()

    def _failed(self, error: BaseException) -> None:
        """End the tier, and nothing else, after an error of its thread."""
        logger.error("the host tier of KV has ended: %r", error)
        with self._changed:
            self._copying, self._ready = False, None
            self._end_all()
            if self._moving is not None:
                self._end_moving(self._moving, set())
            self._changed.notify_all()
        self.on_ended()

    def _run(self) -> None:
        while not self._closing:
            self._connect()
            job = self._take()
            if job is not None:
                self._move(job)
        self._disconnect(leave=True)

    def _connect(self) -> None:
        """Connect to the keeper, if that is due, and let the store have the form of the bound caches."""
        now = time.monotonic()
        try:
            if self._client is None and now >= self._next_attempt:
                self._next_attempt = now + RETRY_S
                self._client = KeeperClient(self._config)
                self._copies = self._copies_of(self._client)
            if self._client is not None and self._ready is None:
                self._take_form(self._client)
            if self._client is not None and now >= self._counted_at + COUNTS_S:
                self._counted_at, before = now, self._store
                self._store = self._client.counts()
                if self._store != before:
                    self.on_ended()  # a rank that sleeps records them: files are written late
        except Exception as error:
            self._lost(error)

    def _copies_of(self, client: KeeperClient) -> RowCopies:
        memory = torch.frombuffer(client.memory, dtype=torch.uint8)
        if self._device.type == "cuda":
            return GpuCopies(memory, self._device, self._lanes)
        return CpuCopies(memory)

    def _take_form(self, client: KeeperClient) -> None:
        contents, copies = self._contents, self._copies
        if contents is None or copies is None:
            return
        size = max(contents.blocks.row_bytes, contents.states.row_bytes)
        if self._lanes and size > len(self._lanes[0].buffer):
            self._lanes[:] = make_lanes(self._device, size)
        copies.unit_bytes = self._unit_bytes
        client.layout(contents.compatibility, self._unit_bytes, self._window_blocks)
        with self._changed:
            if self._contents is contents:
                self._ready = client
                self._changed.notify_all()

    def _take(self) -> _Job | None:
        """Return a transfer that can begin, or wait for one or for a reason to look again, and return None."""
        with self._changed:
            if not (self._loads or self._saves or self._closing or self._has_news):
                self._changed.wait(RETRY_S if self._contents is None else COUNTS_S)
            forgotten = list[bytes]()
            # Without a keeper the names stay: the next one, which may find files, has to forget them.
            if self._client is not None:
                forgotten, self._forgotten = self._forgotten, forgotten
            queues = [queue for queue in (self._loads, self._saves) if queue]
            first = min((queue[0] for queue in queues), key=lambda it: it.begun, default=None)
            ready = next((queue for queue in queues if queue[0].can_begin), None)
            job = self._moving = None if ready is None else ready.popleft()
        if forgotten and self._client is not None:
            try:
                self._client.forget(forgotten)
            except Exception as error:
                with self._changed:
                    self._forgotten += forgotten
                self._lost(error)
        if job is None and first is not None and first.after is not None:
            first.after.synchronize()
        return job

    @property
    def _has_news(self) -> bool:
        """Whether the keeper has to forget names, or to learn the form of caches that were bound meanwhile."""
        is_form_due = self._contents is not None and self._ready is None
        return self._client is not None and (is_form_due or bool(self._forgotten))

    def _move(self, job: _Job) -> None:
        done = set[bytes]()
        try:
            done = (self._load if job.is_load else self._save)(job)
        except Exception as error:
            self._lost(error)
        with self._changed:
            self._end_moving(job, done)
        self.on_ended()
        self._release(job)

    def _release(self, job: _Job) -> None:
        """End the use of what a load has found, behind its end, because a sequence waits for that."""
        if job.damaged is None or self._client is None:
            return
        try:
            self._client.release(job.damaged)
        except Exception as error:
            self._lost(error)

    def _end_moving(self, job: _Job, done: set[bytes]) -> None:
        """End the transfer that the thread has taken, unless `unbind` has; the caller holds `_changed`."""
        if self._moving is job:
            self._moving = None
            job.transfer.done = done
            job.transfer.seconds = time.perf_counter() - job.begun
            self._ended.append(job.transfer)

    def _copy(self, job: _Job, what: str, rows: list[RowPlace]) -> Sequence[int] | Sequence[None]:
        """Copy rows to the memory ("saved") or from it ("loaded"); return check values; None: caches are unbound."""
        copies = self._copies
        assert copies is not None
        with self._changed:
            if self._contents is not job.contents:
                return [None] * len(rows)
            self._copying = True
        try:
            started = time.perf_counter()
            copy = copies.load if job.is_load else copies.save
            checks = copy(job.contents, rows)
            self._count(what, rows, time.perf_counter() - started)
            return checks
        finally:
            with self._changed:
                self._copying = False
                self._changed.notify_all()

    def _save(self, job: _Job) -> set[bytes]:
        """Save; return the names that can be found now."""
        client, transfer = self._client, job.transfer
        assert client is not None
        items = [item for item in transfer.items if item.name not in job.forgotten]
        units = client.reserve([self._place_of(job, item) for item in items])
        rows = [
            RowPlace(item, found)
            for item, found in zip(items, units, strict=True)
            if found is not None
        ]
        checks = self._copy(job, "saved", rows)
        names = [row.item.name for row in rows]
        client.publish(dict(zip(names, checks, strict=True)))
        return {name for name, check in zip(names, checks, strict=True) if check is not None}

    def _load(self, job: _Job) -> set[bytes]:
        """Load; return the names of which the right bytes are in their places."""
        client, transfer = self._client, job.transfer
        assert client is not None
        found = client.find([item.name for item in transfer.items])
        rows, expected, origin = [], [], Counter[str]()
        sizes = [self._num_units(job, is_state) for is_state in (False, True)]
        for item, it in zip(transfer.items, found, strict=True):
            if it is not None and len(it[0]) == sizes[item.is_state]:
                rows.append(RowPlace(item, it[0]))
                expected.append(it[1])
                origin[it[2]] += 1
        checks = self._copy(job, "loaded", rows)
        done = set[bytes]()
        damaged = job.damaged = []
        for row, check, right in zip(rows, checks, expected, strict=True):
            if check == right:
                done.add(row.item.name)
            elif check is not None:
                damaged.append(row.item.name)
        if damaged:
            logger.warning(
                "%d of %d rows of KV in host memory are damaged", len(damaged), len(rows)
            )
        self._counts["missed"] += len(transfer.items) - len(rows)
        transfer.origin = dict(origin)
        return done

    def _num_units(self, job: _Job, is_state: bool) -> int:
        return job.contents.of(is_state).row_bytes // self._unit_bytes

    def _place_of(self, job: _Job, item: Item) -> Place:
        num_units, private = self._num_units(job, item.is_state), job.transfer.private
        return Place(item.key, item.suffix, item.parent, item.number, num_units, private)

    def _count(self, what: str, rows: list[RowPlace], seconds: float) -> None:
        self._counts[f"{what}_bytes"] += self._unit_bytes * sum(len(row.units) for row in rows)
        self._counts[f"{what}_copy_seconds"] += seconds  # type: ignore[assignment]

    def _lost(self, error: Exception) -> None:
        """Go on without the keeper, until the next attempt; what waits ends with nothing."""
        logger.warning("no host tier of KV for now: %s", error)
        self._counts["lost"] += 1
        with self._changed:
            self._ready = None
            self._end_all()
        self._disconnect(leave=False)
        self.on_ended()

    def _disconnect(self, *, leave: bool) -> None:
        client, copies, self._client, self._copies = self._client, self._copies, None, None
        if copies is not None:
            with suppress(Exception):
                copies.close()
        if client is not None:
            if leave:
                client.leave()
            client.close()
