"""Blocks and snapshots of states on their way between the device and connectors, and the sequences that wait for them.

A sequence with its next blocks in another place waits outside the scheduler until they have come, and starts behind
them as behind any other prefix. Blocks are offered to connectors once the steps that filled them have ended without an
error: what an interrupted step wrote never leaves the device.
"""

import time
from collections import Counter, deque
from collections.abc import Container, Iterable
from collections.abc import Sequence as Places
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from workers.kv_cache.arrived_prefixes import ArrivedPrefixes, Held
from workers.kv_cache.group import CacheGroup, Filled
from workers.kv_transfer.connector import NOWHERE, Item, KVConnector, KVFetcher, Transfer
from workers.step.sequence import Sequence

if TYPE_CHECKING:  # which imports torch
    from workers.kv_transfer.contents import CacheContents

MIN_GAIN = 64
"""Tokens that a load must bring, because waiting for it takes about as long as to compute them."""
BATCH_BYTES, BATCH_S = 2**20, 0.25
"""Blocks wait to be saved until they are so large together, or have waited so long."""
SAVE_BYTES = 2**26
"""Bytes of blocks that one save moves at most, because a load that comes meanwhile waits for its end."""
HELD_SHARE = 4
"""One block in so many may be held by saves, most of which their sequences hold too."""


class Load(NamedTuple):
    """A load, with the sequence that waits for it and the places that it holds by their groups.

    A fetch from another node holds no places; the sequence looks again when it has ended.

    keys   of the blocks that come
    lacks  blocks that the sequence needs beside those that it holds, to start
    """

    seq: Sequence
    held: Held
    coming: list[tuple[CacheGroup, Item]]
    keys: list[bytes]
    lacks: int = 0


@dataclass
class TransferCounts:
    """Counts since the start of the epoch.

    restored     tokens that loads have brought, by the places where they were found
    num_partial  loads that have brought less than was to be found
    seconds      of all loads, from the moment when their sequences began to wait
    """

    restored: Counter[str] = field(default_factory=Counter)
    num_loads: int = 0
    num_partial: int = 0
    seconds: float = 0.0


class BlockTransfers:
    """The transfers of a rank in one epoch. All methods belong to the thread of the step loop.

    groups      of the KVCacheManager
    connectors  bound here, until `close`
    fetcher     brings contents from other nodes to where a connector finds them; bound here; None: nothing does
    num_ended   transfers that have ended
    """

    def __init__(
        self,
        groups: Places[CacheGroup],
        block_size: int,
        num_blocks: int,
        connectors: Places[KVConnector],
        contents: "CacheContents",
        *,
        fetcher: KVFetcher | None = None,
        min_gain: int = MIN_GAIN,
    ):
        self._groups, self._block_size = groups, block_size
        self._min_gain, self._fetcher = max(1, -(-min_gain // block_size)), fetcher  # in blocks
        self._connectors, self._row_bytes = connectors, max(1, contents.blocks.row_bytes)
        self._num_launched = self._num_committed = 0
        self._filled: deque[tuple[int, Filled]] = deque()  # by the launch that fills them
        self._unsaved: dict[bytes, Filled] = {}
        self._oldest = 0.0
        self._saves: dict[Transfer, Held] = {}
        self._loads: dict[Transfer, Load] = {}
        self._most_held = max(1, num_blocks // HELD_SHARE)
        self._most_unsaved = 2 * num_blocks
        self._most_saved = max(1, SAVE_BYTES // self._row_bytes)
        self._coming: set[bytes] = set()  # keys of blocks that are loaded now
        self.num_ended = 0
        self._parked: list[Sequence] = []  # they wait for loads of other sequences
        self._arrived = ArrivedPrefixes(self._let_go)
        self.counts = TransferCounts()
        for connector in connectors:
            connector.bind(contents)
        if fetcher is not None:
            fetcher.bind(contents)

    @property
    def source(self) -> str:
        """Where other nodes find what was saved; "": nowhere."""
        return "" if self._fetcher is None else self._fetcher.source

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for a load."""
        waiting = (*(load.seq for load in self._loads.values()), *self._parked)
        return sum(not seq.finished for seq in waiting)

    @property
    def num_open(self) -> int:
        """Transfers that have not ended."""
        return len(self._loads) + len(self._saves)

    @property
    def num_begun(self) -> int:
        """Transfers that have begun."""
        return self.num_ended + self.num_open

    def comes(self, key: bytes) -> bool:
        """Return whether the block of `key` is loaded now."""
        return key in self._coming

    def park(self, seq: Sequence) -> None:
        """Let `seq` wait for the end of a load."""
        self._parked.append(seq)

    def begin_load(
        self, seq: Sequence, keys: list[bytes], num_found: int, num_blocks: int
    ) -> bool | None:
        """Load what follows the first `num_found` blocks of `seq`; return False if there is nothing, or no room.

        keys        of all blocks behind which `seq` may start. While it has no row, a sequence tries once.
        num_blocks  that `seq` needs to start

        Return None if others hold the places for now.
        """
        if self._begin_fetch(seq, keys, num_found):
            return True
        if seq.load_tried > seq.num_preemptions:
            return False
        best, chosen, load = num_found + self._min_gain - 1, None, None
        for connector in self._connectors:
            count = self._count(keys, connector.found(seq.request, keys))
            if count > best:
                best, chosen = count, connector
        if chosen is not None and (load := self._take_places(seq, keys[:best])) is None:
            return None
        seq.load_tried = seq.num_preemptions + 1
        if chosen is None or load is None:
            return False
        num_held = sum(not group.is_state for group, _ in load.held)
        load = load._replace(lacks=max(0, num_blocks - num_held))
        items = [item for _, item in load.coming]
        transfer = Transfer(items, seq.request, private=bool(seq.request.adapter))
        self._loads[transfer] = load
        self._coming.update(load.keys)
        chosen.load(transfer)
        return True

    def _begin_fetch(self, seq: Sequence, keys: list[bytes], num_found: int) -> bool:
        """Bring what this node lacks of `keys` from the node that computed them; return False if nothing can come.

        A sequence tries once.
        """
        if self._fetcher is None or not seq.request.kv_source or seq.fetch_tried:
            return False
        here = [self._count(keys, it.found(seq.request, keys)) for it in self._connectors]
        if len(keys) < max((num_found, *here)) + self._min_gain:
            return False
        seq.fetch_tried = True
        items = [
            Item(keys[n], group.suffix, group.is_state, NOWHERE, keys[n - 1] if n else b"", n)
            for group in self._groups
            # The other node may hold an earlier state than the one at the end.
            for n in (range(len(keys)) if group.is_state else group.needed(len(keys)))
            if n >= num_found
        ]
        transfer = Transfer(items, seq.request, private=bool(seq.request.adapter))
        self._loads[transfer] = Load(seq, [], [], keys[num_found:])
        self._coming.update(keys[num_found:])
        self._fetcher.fetch(transfer)
        return True

    def _count(self, keys: list[bytes], found: Container[bytes]) -> int:
        """Return the most of `keys` that a sequence can start behind with what the device has and a connector finds."""
        count, before = len(keys), -1
        while count != before:
            before = count
            for group in self._groups:
                count = group.longest(keys[:count], found)
        return count

    def _take_places(self, seq: Sequence, keys: list[bytes]) -> Load | None:
        """Hold what the device has of a prefix, and take places for the rest; None: there is no room."""
        load = self._try_places(seq, keys)
        if load is None and self.give_way(seq):
            load = self._try_places(seq, keys)
        return load

    def num_promised(self, seq: Sequence, num_blocks: int) -> int:
        """Return how many blocks the sequences before `seq` in order lack that begin behind a load.

        num_blocks   that `seq` would start behind
        """
        self._arrived.starts_behind(seq, num_blocks)
        loading = (it for it in self._loads.values() if not it.seq.finished)
        lacking = sum(load.lacks for load in loading if load.seq.order < seq.order)
        return lacking + self._arrived.num_promised(seq)

    def started(self, seq: Sequence) -> None:
        """Enter the start of `seq`, which holds its prefix itself now."""
        self._arrived.started(seq)

    def give_way(self, seq: Sequence | None = None) -> bool:
        """Let go of what has come for waiting sequences behind `seq` in order, or for all; return whether any had."""
        return self._arrived.give_way(seq)

    def _try_places(self, seq: Sequence, keys: list[bytes]) -> Load | None:
        load = Load(seq, [], [], [])
        for group in reversed(self._groups):  # states first, which have the fewest places
            for number in group.needed(len(keys)):
                key = keys[number]
                if (place := group.hold(key)) is not None:
                    load.held.append((group, place))
                    continue
                if (place := group.take()) is None:
                    self._let_go(load.held)
                    return None
                load.held.append((group, place))
                parent = keys[number - 1] if number else b""
                item = Item(key, group.suffix, group.is_state, place, parent, number)
                load.coming.append((group, item))
                load.keys.append(key)
        return load

    def settle(self) -> list[Sequence]:
        """Enter the transfers that have ended; return the sequences that wait no more, in no order."""
        ready: list[Sequence] = []
        for place in self._places():
            for transfer in place.ended():
                ready += self._end(transfer)
        self._arrived.drop_finished()
        return [seq for seq in ready if not seq.finished]

    def _end(self, transfer: Transfer) -> list[Sequence]:
        self.num_ended += 1
        if (held := self._saves.pop(transfer, None)) is not None:
            self._let_go(held)
            return []
        load = self._loads.pop(transfer)
        for group, item in load.coming:
            if item.name in transfer.done:
                group.enter(item.key, item.place)
        self._arrived.hold(load.seq, load.held, load.lacks)
        self._coming.difference_update(load.keys)
        if load.coming:
            self._note(transfer, load)
        parked, self._parked = self._parked, []
        return [load.seq, *parked]

    def _note(self, transfer: Transfer, load: Load) -> None:
        counts, size = self.counts, self._block_size
        counts.num_loads += 1
        counts.num_partial += len(transfer.done) < len(transfer.items)
        counts.seconds += transfer.seconds
        whole = [item for group, item in load.coming if group is self._groups[0]]
        came = size * sum(item.name in transfer.done for item in whole)
        for place, share in transfer.origin.items():
            counts.restored[place] += round(came * share / max(1, sum(transfer.origin.values())))

    def _let_go(self, held: Held) -> None:
        for group in self._groups:
            group.let_go([place for other, place in held if other is group])

    def offer(self, seq: Sequence, first: int, end: int) -> None:
        """Save the blocks `first` to `end` of `seq` once the steps that are launched by now have ended."""
        for group in self._groups:
            for filled in group.filled(seq, first, end):
                self._filled.append((self._num_launched, filled))

    def launched(self, kept: Iterable[Filled]) -> None:
        """Enter the launch of a step. `kept`: contents that the copies before the next step keep."""
        self._num_launched += 1
        self._filled += ((self._num_launched + 1, filled) for filled in kept)

    def committed(self) -> None:
        """Enter the end of the oldest launched step, without an error."""
        self._num_committed += 1
        while self._filled and self._filled[0][0] <= self._num_committed:
            _, filled = self._filled.popleft()
            if not self._unsaved:
                self._oldest = time.monotonic()
            self._unsaved[filled.name] = filled
        while len(self._unsaved) > self._most_unsaved:
            del self._unsaved[next(iter(self._unsaved))]
        self.save()

    def save(self, *, all_of_them: bool = False) -> None:
        """Begin to save what has been filled, in batches."""
        while self._unsaved:
            old = time.monotonic() > self._oldest + BATCH_S
            size = len(self._unsaved) * self._row_bytes
            if not all_of_them and not old and size < BATCH_BYTES:
                return
            room = self._most_held - sum(map(len, self._saves.values()))
            if room <= 0 or not self._save_some(min(room, self._most_saved)):
                return

    @property
    def names_on_way(self) -> set[bytes]:
        """Names of contents that launched steps fill, that wait to be saved, or that are saved now."""
        filled = {it.name for number, it in self._filled if number <= self._num_launched}
        saved = {item.name for transfer in self._saves for item in transfer.items}
        return filled | saved | self._unsaved.keys()

    def _save_some(self, room: int) -> bool:
        """Begin to save up to `room` contents that are all private, or all not; return whether there were any."""
        items, held, private = list[Item](), Held(), None
        for name, filled in list(self._unsaved.items()):
            if len(items) >= room or private not in (None, filled.private):
                break
            del self._unsaved[name]
            group = filled.group
            place = group.hold(filled.key)
            if place is None:
                continue
            # Otherwise another sequence has filled it since, or is about to.
            if place != filled.place or not group.is_filled(place):
                group.let_go([place])
                continue
            private = filled.private
            held.append((group, place))
            items.append(filled.item)
        if not items:
            return False
        for connector in self._connectors:
            if connector.saves:
                transfer = Transfer(items, private=bool(private))
                self._saves[transfer] = [*held]
                for group, place in held:
                    group.hold_place(place)
                connector.save(transfer)
        self._let_go(held)
        return True

    def _places(self) -> list[KVConnector | KVFetcher]:
        return [*self._connectors, *([] if self._fetcher is None else [self._fetcher])]

    def forget(self, keys: Iterable[bytes]) -> None:
        """Let no place provide the contents of `keys` from now on, nor a load that is under way."""
        keys = list(keys)
        names = [key + group.suffix for key in keys for group in self._groups]
        for name in names:
            self._unsaved.pop(name, None)
        gone = set(names)
        for load in self._loads.values():
            load.coming[:] = [it for it in load.coming if it[1].name not in gone]
        self._coming.difference_update(keys)
        self._filled = deque(it for it in self._filled if it[1].name not in gone)
        for connector in self._connectors:
            connector.forget(names)

    def owners(self, group: CacheGroup) -> Iterable[int]:
        """Return the places of a group that transfers hold, each as often as they do."""
        loading = (load.held for load in self._loads.values())
        held = [*self._saves.values(), *loading, *self._arrived.places]
        return [place for places in held for other, place in places if other is group]

    def gauges(self) -> dict[str, float]:
        """Return statistics by name."""
        counts = self.counts
        found: dict[str, float] = {
            "kv_waiting": self.num_waiting,
            "kv_loads": counts.num_loads,
            "kv_partial_loads": counts.num_partial,
            "kv_load_seconds": counts.seconds,
        }
        found |= {f"kv_restored_{place}": count for place, count in counts.restored.items()}
        for place in self._places():
            found |= {f"kv_{place.place}_{k}": v for k, v in place.counts().items()}
        return found

    def close(self) -> None:
        """End all transfers. Sequences that wait for one are left."""
        for place in self._places():
            place.unbind()
        self.settle()
        self.give_way()
        assert not self._loads and not self._saves, "a connector has not ended its transfers"
