"""A cache group: the memory of the layers of one kind, for the sequences of one rank. Knows nothing of schedules.

A new kind of memory is a new subclass, made by KVCacheManager.
"""
# ruff: noqa: B027 - a kind inherits the methods in which it has nothing to do

import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Container, Iterable, Set
from collections.abc import Sequence as Places
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from workers.kv_transfer.connector import Item
from workers.step.sequence import Sequence

Copies = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Prefix:
    """The longest beginning of a sequence that every group has.

    blocks      KV blocks of each group, in the order of the groups
    num_shared  full blocks of the sequence that the pool has, also behind the prefix
    """

    num_tokens: int
    blocks: tuple[list[int], ...]
    num_shared: int = 0

    @property
    def all_blocks(self) -> list[int]:
        """The blocks of all groups."""
        return [block for blocks in self.blocks for block in blocks]


class Filled(NamedTuple):
    """Contents of a group that launched steps fill, for places outside the device: see Item.

    private   of an adapter, see Transfer
    """

    group: "CacheGroup"
    key: bytes
    place: int
    parent: bytes
    number: int
    private: bool

    @classmethod
    def of(cls, group: "CacheGroup", seq: Sequence, number: int, place: int) -> "Filled":
        """Return the contents of block `number` of `seq`."""
        keys = seq.block_keys
        parent = keys[number - 1] if number else b""
        return cls(group, keys[number], place, parent, number, bool(seq.request.adapter))

    @property
    def name(self) -> bytes:
        """The name of the contents."""
        return self.key + self.group.suffix

    @property
    def item(self) -> Item:
        """The contents for a transfer."""
        group = self.group
        return Item(self.key, group.suffix, group.is_state, self.place, self.parent, self.number)


class CacheGroup(ABC):
    """The memory of the layers of one kind. A sequence has memory here from `allocate` to `release`.

    `keys` are the keys of the first full blocks of a sequence.

    A place is a block or a slot of states. Whoever holds a place keeps its contents until it lets go.

    batch_fields     fields of the ForwardBatch that `fields` returns
    caches_prefixes  whether sequences can start behind a prefix
    suffix           of the names of contents of this kind, so that each kind has names of its own
    is_state         contents are states
    """

    batch_fields: ClassVar[tuple[str, ...]]
    caches_prefixes = True
    suffix: ClassVar[bytes] = b""
    is_state: ClassVar[bool] = False

    @abstractmethod
    def fields(
        self, rows: np.ndarray, row_of_token: np.ndarray, positions: np.ndarray, max_blocks: int
    ) -> dict[str, np.ndarray]:
        """Return the values of `batch_fields` for a step.

        rows, row_of_token   int64 [B], [T]: row in the InputBatch of each sequence, and of the sequence of each token
        positions            int64 [T]; max_blocks: blocks of the longest sequence
        """

    @abstractmethod
    def find(self, keys: list[bytes]) -> tuple[int, list[int]]:
        """Return the most of `keys` that a sequence can start behind, and the blocks that it then needs."""

    def longest(self, keys: list[bytes], also: Container[bytes]) -> int:
        """Return the most of `keys` that a sequence could start behind if the names in `also` were here too.

        A kind with contents that do not leave the device has none of the methods up to `filled`: nothing is loaded.
        """
        return 0

    def needed(self, count: int) -> range:
        """Return the numbers of the blocks that a sequence needs to start behind its first `count` blocks."""
        return range(0)

    def hold(self, key: bytes) -> int | None:
        """Hold the place with the contents of `key`; None: they are not here."""
        return None

    def hold_place(self, place: int) -> None:
        """Hold a place that is held already."""

    def is_filled(self, place: int) -> bool:
        """Return whether launched work fills a place with what `hold` finds there, not a copy before the next step."""
        return True

    def take(self) -> int | None:
        """Hold a place without contents; None: there is none."""
        return None

    def enter(self, key: bytes, place: int) -> None:
        """Let `find` find the contents of `key` in a place that was taken and is filled now."""

    def let_go(self, places: Places[int]) -> None:
        """Hold these places no more, which are in the order of their sequence."""

    def filled(self, seq: Sequence, first: int, end: int) -> Iterable[Filled]:
        """Return the contents of blocks `first` to `end` of `seq` that later sequences may start behind."""
        return ()

    def take_kept(self) -> list[Filled]:
        """Return the contents that the copies before the next step keep, and forget them."""
        return []

    @abstractmethod
    def forget(self, keys: Iterable[bytes]) -> None:
        """Let `find` no longer find what belongs to `keys`."""

    def waits(self, keys: list[bytes], start: int, end: int, coming: Container[bytes]) -> bool:
        """Return whether a sequence waits for block `end`, which is among `coming`, or starts behind block `start`."""
        return True

    def allocate(self, seq: Sequence, prefix: Prefix, shared: list[int], num_new: int) -> None:
        """Start `seq`, which has a row, behind `prefix`, with its blocks `shared` and blocks for `num_new` tokens.

        A sequence without keys starts while the prefix cache is off.
        """

    def leave_behind(self, seq: Sequence, commit: Callable[[Sequence], None]) -> None:
        """Release, after `commit`, the blocks of `seq` that its next tokens do not read."""

    def grow(self, seq: Sequence, num_tokens: int) -> int:
        """Allocate blocks up to `num_tokens` tokens of `seq`; return 0 if the pool is empty.

        Otherwise return the number of tokens up to which the sequence has nothing to allocate or to leave behind.
        """
        return sys.maxsize

    def release(self, seq: Sequence, num_useful: int | None) -> None:
        """Release the blocks of `seq`; blocks behind the first `num_useful` of the sequence are evicted first."""

    def num_useful(self, keys: list[bytes]) -> int | None:
        """Return the number of blocks that later sequences can start behind; None: all of them."""
        return None

    def register(self, seq: Sequence, first: int, end: int) -> None:
        """Let `find` find the blocks `first` to `end` of `seq`, which launched steps fill."""

    def chunk(self, seq: Sequence, num_new: int) -> int:
        """Return the number of tokens, at most `num_new`, after which a prompt ends its chunk."""
        return num_new

    @property
    def copies(self) -> Copies:
        """(source slot, target slot) of states to copy, in this order, before the next forward."""
        return ()

    def launched(self, seqs: list[Sequence]) -> None:
        """Enter the launch of a step, with the `copies` before it."""

    def close(self) -> None:
        """Forget what steps that were not launched were to write."""

    def gauges(self) -> dict[str, int]:
        """Return statistics of this kind by name."""
        return {}

    def check_integrity(
        self, running: Set[Sequence], owners: Counter[int], held: Iterable[int] = ()
    ) -> None:
        """Add owners of blocks; raise AssertionError if anything else has memory here.

        held   places that transfers hold, each as often as they do
        """
