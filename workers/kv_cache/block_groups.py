"""Cache groups of layers with KV blocks: layers over all tokens, and layers with a window.

Both kinds take the blocks of one pool, because their layers share caches (see kernels/interface/kv_layout.py).
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable, Set
from collections.abc import Sequence as Places
from dataclasses import dataclass
from typing import Any

import numpy as np

from workers.kv_cache.block_pool import BlockPool
from workers.kv_cache.group import CacheGroup, Filled, Prefix
from workers.kv_cache.shared_prefixes import PrefixGroups
from workers.step.sequence import Sequence


@dataclass(slots=True)
class HeldBlocks:
    """The blocks of a sequence from its block number `first` to `end`."""

    ids: list[int]
    first: int = 0

    @property
    def end(self) -> int:
        return self.first + len(self.ids)


class FullGroup(CacheGroup):
    """Layers over all tokens. A sequence starts with the blocks of all its tokens, so that its prompt can finish.

    held    the blocks of each running sequence
    table   int64 [rows, max_blocks]: the same by row; entries that a sequence does not hold may be any
    """

    batch_fields = ("block_table", "slot_mapping")

    def __init__(self, pool: BlockPool, block_size: int, num_rows: int, max_blocks: int):
        self._pool = pool
        self._block_size = block_size
        self.held: dict[Sequence, HeldBlocks] = {}
        self.table = np.zeros((num_rows, max_blocks), dtype=np.int64)
        self._prefixes = PrefixGroups(self.table)

    def shared_prefixes(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return `prefix_groups_cpu` and `prefix_blocks_cpu` of the ForwardBatch; rows as for `fields`."""
        if self._prefixes.changed:
            running = np.fromiter((seq.row for seq in self.held), np.int64, len(self.held))
            ends = np.fromiter((held.end for held in self.held.values()), np.int64, len(running))
            self._prefixes.update(running, ends)
        return self._prefixes.of(rows)

    def fields(
        self, rows: np.ndarray, row_of_token: np.ndarray, positions: np.ndarray, max_blocks: int
    ) -> dict[str, np.ndarray]:
        blocks, offsets = np.divmod(positions, self._block_size)
        slots = self.table[row_of_token, blocks] * self._block_size + offsets
        return dict(zip(self.batch_fields, (self.table[rows, :max_blocks], slots), strict=True))

    def find(self, keys: list[bytes]) -> tuple[int, list[int]]:
        found = self._pool.find(keys)
        return len(found), found

    def longest(self, keys: list[bytes], also: Container[bytes]) -> int:
        for count, key in enumerate(keys):
            if not self._is_there(key, also):
                return count
        return len(keys)

    def _is_there(self, key: bytes, also: Container[bytes]) -> bool:
        name = key + self.suffix
        return name in self._pool or name in also

    def needed(self, count: int) -> range:
        return range(count)

    def hold(self, key: bytes) -> int | None:
        found = self._pool.find((key + self.suffix,))
        self._pool.share(found)
        return found[0] if found else None

    def hold_place(self, place: int) -> None:
        self._pool.share([place])

    def take(self) -> int | None:
        return self._pool.allocate(1)[0] if self._pool.num_free else None

    def enter(self, key: bytes, place: int) -> None:
        self._pool.register(place, key + self.suffix)

    def let_go(self, places: Places[int]) -> None:
        self._pool.release(list(places))

    def filled(self, seq: Sequence, first: int, end: int) -> Iterable[Filled]:
        held = self.held[seq]
        for number in range(max(first, held.first), end):
            yield Filled.of(self, seq, number, held.ids[number - held.first])

    def allocate(self, seq: Sequence, prefix: Prefix, shared: list[int], num_new: int) -> None:
        self._hold(seq, shared, seq.num_tokens)
        self._prefixes.started(len(shared))

    def _hold(self, seq: Sequence, shared: list[int], num_tokens: int) -> None:
        start, end = seq.num_computed_tokens // self._block_size, -(-num_tokens // self._block_size)
        held = HeldBlocks(shared + self._pool.allocate(end - start), start - len(shared))
        self.held[seq] = held
        self.table[seq.row, held.first : held.end] = held.ids

    def grow(self, seq: Sequence, num_tokens: int) -> int:
        held, size = self.held[seq], self._block_size
        end = held.end
        missing = -(-num_tokens // size) - end
        if missing > 0:
            if missing > self._pool.num_free:
                return 0
            blocks = self._pool.allocate(missing)
            self.table[seq.row, end : end + missing] = blocks
            held.ids += blocks
            end += missing
        return end * size

    def release(self, seq: Sequence, num_useful: int | None) -> None:
        held = self.held.pop(seq)
        self._prefixes.ended(seq.row)
        self._pool.release(held.ids, num_useful and max(0, num_useful - held.first))

    def register(self, seq: Sequence, first: int, end: int) -> None:
        held = self.held[seq]
        for index in range(max(first, held.first), end):
            self._pool.register(held.ids[index - held.first], seq.block_keys[index] + self.suffix)

    def forget(self, keys: Iterable[bytes]) -> None:
        self._pool.forget(key + self.suffix for key in keys)

    def check_integrity(
        self, running: Set[Sequence], owners: Counter[int], held: Iterable[int] = ()
    ) -> None:
        owners.update(held)
        ids = sorted(seq.request.request_id for seq in self.held.keys() ^ running)
        counts = f"{len(self.held)} sequences, {len(running)} are running"
        assert not ids, f"{type(self).__name__} has {counts}; not in both: {', '.join(ids)}"
        for of_seq in self.held.values():
            owners.update(of_seq.ids)


class WindowGroup(FullGroup):
    """Layers with a window, the largest of which is `window`. Blocks that no next window touches are released."""

    batch_fields = ("window_block_table", "window_slot_mapping")
    suffix = b"w"

    def __init__(self, *sizes: Any, window: int):
        super().__init__(*sizes)
        self._window = window

    def find(self, keys: list[bytes]) -> tuple[int, list[int]]:
        """Return the most of `keys` for which all blocks of the next token's window are there, and these blocks."""
        count = index = len(keys)
        found: list[int] = []  # blocks `index` to `count` of the window, the last one first
        while index > self._first_block(count * self._block_size):
            index -= 1
            there = self._pool.find((keys[index] + self.suffix,))
            found += there
            if not there:
                count, found = index, []
        return count, found[::-1]

    def longest(self, keys: list[bytes], also: Container[bytes]) -> int:
        count = index = len(keys)
        while index > self._first_block(count * self._block_size):
            index -= 1
            if not self._is_there(keys[index], also):
                count = index
        return count

    def needed(self, count: int) -> range:
        return range(self._first_block(count * self._block_size), count)

    def filled(self, seq: Sequence, first: int, end: int) -> Iterable[Filled]:
        """Leave out what only windows within the prompt touch: the next turn of a session starts behind the prompt."""
        whole = (seq.num_prefill_tokens - 1) // self._block_size
        return super().filled(seq, max(first, self._first_block(whole * self._block_size)), end)

    def _first_block(self, num_tokens: int) -> int:
        """Return the first block that the window of the token after `num_tokens` touches."""
        return max(0, num_tokens + 1 - self._window) // self._block_size

    def allocate(self, seq: Sequence, prefix: Prefix, shared: list[int], num_new: int) -> None:
        self._hold(seq, shared, prefix.num_tokens + num_new)

    def grow(self, seq: Sequence, num_tokens: int) -> int:
        last = (self.held[seq].first + 1) * self._block_size + self._window - 1
        return min(super().grow(seq, num_tokens), last)

    def leave_behind(self, seq: Sequence, commit: Callable[[Sequence], None]) -> None:
        held, first = self.held[seq], self._first_block(seq.num_computed_tokens)
        if (count := first - held.first) > 0:
            commit(seq)
            self._pool.release(held.ids[:count])
            held.ids, held.first = held.ids[count:], first
