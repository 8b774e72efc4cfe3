"""One fetch of a prompt's KV from another node into the memory of this node. Runs on a thread of its own, and waits.

Contents arrive in parts of PART_BYTES, in the order of the prompt, each published once its check value is right: a
fetch that ends in the middle has brought a beginning. Imports no torch.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from workers.kv_transfer.connector import Item
from workers.kv_transfer.host_index import Place
from workers.kv_transfer.keeper_client import KeeperClient
from workers.kv_transfer.kv_source import Form, Held, RefusedError, SourceLink, SourceLostError
from workers.kv_transfer.nixl_memory import NixlMemory, ReadFailedError, Registered, Run
from workers.kv_transfer.row_checks import check_value

PART_BYTES = 2**25
"""Bytes of a part: its time is bounded, and over it a beginning may be lost."""
POLL_S = 0.0005


@dataclass(frozen=True, kw_only=True)
class FetchLimits:
    """Limits of time, in seconds, so that a sequence waits at most `wait_s` for what may not come.

    answer_s  for the source to answer
    fetch_s   from the request to the beginning of the last part
    part_s    for a part to arrive
    lease_s   from the last beat of a reader to the end of its lease
    """

    answer_s: float = 3.0
    fetch_s: float = 5.0
    part_s: float = 2.5
    lease_s: float = 10.0

    @property
    def wait_s(self) -> float:
        """Return the time after which the process that fetches is given up."""
        return self.fetch_s + self.part_s + 1.0


@dataclass(frozen=True)
class FetchJob:
    """What is to be fetched.

    number   by which the rank finds its transfer
    until    no part begins later, by time.monotonic() of this machine
    private  of an adapter, see Transfer
    """

    number: int
    source: str
    form: Form
    items: list[Item]
    private: bool
    until: float


@dataclass
class Fetched:
    """What has come. `counts`: of bytes, and of contents that have not come, by kind of failure."""

    number: int
    done: set[bytes] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)


class Pull:
    """A fetch. `result` may be read after an error too.

    memory  of this node, registered
    view    the same bytes
    client  a connection to the keeper of this node, for this fetch alone

    `run` raises ReadFailedError where bytes may still arrive in units of this node: then nothing but the end of the
    process makes the units free.
    """

    def __init__(
        self,
        job: FetchJob,
        memory: NixlMemory,
        view: memoryview,
        client: KeeperClient,
        limits: FetchLimits,
    ):
        self._job, self._memory, self._view = job, memory, view
        self._client, self._limits = client, limits
        self.result = Fetched(job.number)

    def run(self, connect: Callable[[str], SourceLink]) -> None:
        """Fetch until all has come or has failed. `connect(source)` opens a link."""
        job, counts = self._job, self.result.counts
        if not self._client.join(*job.form):
            return  # the caches have another form by now, and the rank waits no more
        items = sorted(job.items, key=lambda item: item.number)
        wait_s = min(self._limits.answer_s, job.until - time.monotonic())
        try:
            with closing(connect(job.source)) as link:
                source, held = link.find(job.form, [item.name for item in items], wait_s)
                self._take(link, source, list(zip(items, held, strict=True)))
        except RefusedError as error:
            counts["refused"] += len(items)
            raise ConnectionError(f"{job.source.partition(' ')[0]}: {error}") from None
        except SourceLostError:
            counts["source_lost"] += len(items)
            raise

    def _take(
        self, link: SourceLink, source: Registered, found: list[tuple[Item, Held | None]]
    ) -> None:
        """Fetch what the source holds, of states the last one."""
        counts = self.result.counts
        last = max((item.number for item, it in found if item.is_state and it), default=-1)
        rows = [(i, it) for i, it in found if it and (not i.is_state or i.number == last)]
        counts["missed"] += sum(it is None and not item.is_state for item, it in found)
        left = len(rows)
        for part in _parts(rows, self._job.form.unit_bytes):
            if time.monotonic() > self._job.until:
                counts["late"] += left
                return
            self._take_part(link, source, part)
            left -= len(part)

    def _take_part(
        self, link: SourceLink, source: Registered, part: list[tuple[Item, Held]]
    ) -> None:
        job, counts, size = self._job, self.result.counts, self._job.form.unit_bytes
        places = [
            Place(item.key, item.suffix, item.parent, item.number, len(it.units), job.private)
            for item, it in part
        ]
        reserved = self._client.reserve(places)
        rows = [
            (item, it, units)
            for (item, it), units in zip(part, reserved, strict=True)
            if units is not None
        ]
        pairs = [pair for _, it, units in rows for pair in zip(units, it.units, strict=True)]
        self._read(link, source, list(_runs(pairs, size)))
        checks: dict[bytes, int | None] = {}
        for item, it, units in rows:
            right = check_value([self._view[u * size : (u + 1) * size] for u in units]) == it.check
            checks[item.name] = it.check if right else None
            counts["damaged"] += not right
        self._client.publish(checks)
        come = {name for name, check in checks.items() if check is not None}
        self.result.done |= come
        counts["bytes"] += size * sum(len(u) for item, _, u in rows if item.name in come)

    def _read(self, link: SourceLink, source: Registered, runs: Sequence[Run]) -> None:
        if not runs:
            return
        until = time.monotonic() + self._limits.part_s
        handle = self._memory.begin_read(source, runs)
        while not self._memory.has_ended(handle):
            if time.monotonic() > until:
                raise ReadFailedError(f"no bytes within {self._limits.part_s:g} s")
            link.beat()
            time.sleep(POLL_S)
        link.beat()


def _parts(rows: Sequence[tuple[Item, Held]], unit_bytes: int) -> Iterator[list[tuple[Item, Held]]]:
    part, size = list[tuple[Item, Held]](), 0
    for row in rows:
        length = len(row[1].units) * unit_bytes
        if part and size + length > PART_BYTES:
            yield part
            part, size = [], 0
        part.append(row)
        size += length
    if part:
        yield part


def _runs(pairs: Sequence[tuple[int, int]], size: int) -> Iterator[Run]:
    """Yield units, as pairs (here, there), that lie side by side on both nodes as one run."""
    first = 0
    for index in range(1, len(pairs) + 1):
        steps = index - first
        begin = pairs[first]
        if index < len(pairs) and pairs[index] == (begin[0] + steps, begin[1] + steps):
            continue
        yield Run(begin[0] * size, begin[1] * size, steps * size)
        first = index
