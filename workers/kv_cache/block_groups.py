"""Cache groups of layers with KV blocks: layers over all tokens, and layers with a window.

Both kinds take the blocks of one pool, because their layers share caches (see kernels/interface/kv_layout.py).
"""

from abc import abstractmethod
from collections.abc import Iterable, Set
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from workers.kv_cache.block_pool import BlockPool
from workers.kv_cache.group import BatchRows, CacheGroup, Owners
from workers.step.sequence import Sequence


@dataclass(slots=True)
class HeldBlocks:
    """The blocks of a sequence from its block number `first` on."""

    ids: list[int]
    first: int = 0

    @property
    def end(self) -> int:
        """Number of the block behind the last one."""
        return self.first + len(self.ids)


class BlockGroup(CacheGroup):
    """Layers with KV blocks.

    held    the blocks of each running sequence
    table   int64 [rows, max_blocks]: the same by row; entries that a sequence does not hold may be any
    suffix  of the keys of this kind, so that each kind has keys of its own
    """

    suffix: ClassVar[bytes]

    def __init__(self, pool: BlockPool, block_size: int, num_rows: int, max_model_len: int):
        self._pool = pool
        self._block_size = block_size
        self.held: dict[Sequence, HeldBlocks] = {}
        self.table = np.zeros((num_rows, -(-max_model_len // block_size)), dtype=np.int64)

    def fields(self, batch: BatchRows) -> dict[str, np.ndarray]:
        slots = self.table[batch.row_of_token, batch.block_index] * self._block_size + batch.offsets
        block_table = self.table[batch.rows, : batch.max_blocks]
        return dict(zip(self.batch_fields, (block_table, slots), strict=True))

    def allocate(self, seq: Sequence, shared: list[int], num_new: int) -> None:
        end = seq.num_computed_tokens // self._block_size
        count = -(-self._num_tokens(seq, num_new) // self._block_size)
        held = HeldBlocks(shared + self._pool.allocate(count - end), end - len(shared))
        self.held[seq] = held
        self.table[seq.row, held.first : held.end] = held.ids

    @abstractmethod
    def _num_tokens(self, seq: Sequence, num_new: int) -> int:
        """Return the tokens that a sequence has blocks for when it starts with `num_new` tokens."""

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        held = self.held[seq]
        while (held.first + len(held.ids)) * self._block_size < num_tokens:
            if not self._pool.num_free:
                return False
            (block,) = self._pool.allocate(1)
            self.table[seq.row, held.end] = block
            held.ids.append(block)
        return True

    def release(self, seq: Sequence, num_useful: int | None) -> None:
        held = self.held.pop(seq)
        useful = None if num_useful is None else max(0, num_useful - held.first)
        self._pool.release(held.ids, useful)

    def register(self, seq: Sequence, first: int, end: int) -> None:
        held = self.held[seq]
        for index in range(max(first, held.first), end):
            key = seq.block_keys[index] + self.suffix
            self._pool.register(held.ids[index - held.first], key)

    def forget(self, keys: Iterable[bytes]) -> None:
        self._pool.forget(key + self.suffix for key in keys)

    def check_integrity(self, running: Set[Sequence], owners: Owners) -> None:
        ids = sorted(seq.request.request_id for seq in self.held.keys() ^ running)
        assert not ids, (
            f"{type(self).__name__} has {len(self.held)} sequences, {len(running)} are running; either but not both: "
            f"{', '.join(ids)}"
        )
        for seq, held in self.held.items():
            for block in held.ids:
                owners[block].append(f"{type(self).__name__} for {seq.request.request_id}")


class FullGroup(BlockGroup):
    """Layers over all tokens. A sequence starts with the blocks of all its tokens, so that its prompt can finish."""

    batch_fields = ("block_table", "slot_mapping")
    suffix = b""

    def longest(self, keys: list[bytes]) -> int:
        return len(self.find(keys))

    def find(self, keys: list[bytes]) -> list[int]:
        """Return the blocks of the longest run of `keys`."""
        return self._pool.find(keys)

    def _num_tokens(self, seq: Sequence, num_new: int) -> int:
        return seq.num_tokens


class WindowGroup(BlockGroup):
    """Layers with a window. Blocks that the window of the next token does not touch are released.

    window   largest window of a layer
    """

    batch_fields = ("window_block_table", "window_slot_mapping")
    suffix = b"w"

    def __init__(
        self, pool: BlockPool, block_size: int, num_rows: int, max_model_len: int, window: int
    ):
        super().__init__(pool, block_size, num_rows, max_model_len)
        self._window = window

    def longest(self, keys: list[bytes]) -> int:
        return self._search(keys)[0]

    def find(self, keys: list[bytes]) -> list[int]:
        return self._search(keys)[1]

    def _search(self, keys: list[bytes]) -> tuple[int, list[int]]:
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

    def _first_block(self, num_tokens: int) -> int:
        """Return the first block that the window of the token after `num_tokens` touches."""
        return max(0, num_tokens + 1 - self._window) // self._block_size

    def _num_tokens(self, seq: Sequence, num_new: int) -> int:
        return seq.num_computed_tokens + num_new

    def num_behind(self, seq: Sequence) -> int:
        return max(0, self._first_block(seq.num_computed_tokens) - self.held[seq].first)

    def leave_behind(self, seq: Sequence, count: int) -> None:
        held = self.held[seq]
        self._pool.release(held.ids[:count])
        held.ids, held.first = held.ids[count:], held.first + count
