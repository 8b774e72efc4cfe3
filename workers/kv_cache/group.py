"""A cache group: the memory of the layers of one kind, for the sequences of one rank. Knows nothing of schedules.

A new kind of memory is a new subclass, made by KVCacheManager.
"""
# ruff: noqa: B027 - a kind inherits the methods in which it has nothing to do

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Container, Iterable, Set
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from workers.step.sequence import Sequence

Copies = tuple[tuple[int, int], ...]
Owners = defaultdict[int, list[str]]  # names of the owners of each block that has one


@dataclass(frozen=True)
class Prefix:
    """The longest beginning of a sequence that every group has.

    blocks      KV blocks of each group, in the order of the groups
    num_shared  full blocks of the sequence that the pool has, at least num_tokens of tokens
    """

    num_tokens: int
    blocks: tuple[list[int], ...]
    num_shared: int = 0

    @property
    def all_blocks(self) -> list[int]:
        """The blocks of all groups."""
        return [block for blocks in self.blocks for block in blocks]


@dataclass(frozen=True)
class BatchRows:
    """The B sequences and T tokens of a step.

    rows                   int64 [B]: row of each sequence in the InputBatch
    row_of_token           int64 [T]: row of the sequence of each token
    block_index, offsets   int64 [T]: place of each token: number of the block in its sequence, and offset in the block
    max_blocks             blocks of the longest sequence
    """

    rows: np.ndarray
    row_of_token: np.ndarray
    block_index: np.ndarray
    offsets: np.ndarray
    max_blocks: int


class CacheGroup(ABC):
    """The memory of the layers of one kind. A sequence has memory here from `allocate` to `release`.

    The manager calls the groups in their order; layers over all tokens come first. `keys` are the keys of the first
    full blocks of a sequence.

    batch_fields     fields of the ForwardBatch that `fields` returns
    caches_prefixes  whether sequences can start behind a prefix
    """

    batch_fields: ClassVar[tuple[str, ...]]
    caches_prefixes = True

    @abstractmethod
    def fields(self, batch: BatchRows) -> dict[str, np.ndarray]:
        """Return the values of `batch_fields`."""

    @abstractmethod
    def longest(self, keys: list[bytes]) -> int:
        """Return the most of `keys` that a sequence can start behind, as far as this group is concerned."""

    @abstractmethod
    def forget(self, keys: Iterable[bytes]) -> None:
        """Let `longest` no longer find what belongs to `keys`."""

    def find(self, keys: list[bytes]) -> list[int]:
        """Return the blocks that a sequence needs to start behind `keys`, after `longest` has found all of them."""
        return []

    def waits(
        self, keys: list[bytes], count: int, num_shared: int, coming: Container[bytes]
    ) -> bool:
        """Return whether a sequence waits for the next block instead of starting behind `count` blocks.

        num_shared   blocks that the pool has; the next one is among `coming`, which other sequences are computing
        """
        return True

    def allocate(self, seq: Sequence, shared: list[int], num_new: int) -> None:
        """Give a sequence with a row its blocks: `shared`, which it holds already, and blocks for `num_new` tokens."""

    def started(self, seq: Sequence, prefix: Prefix) -> None:
        """Enter the start of `seq` behind `prefix`; not called while the prefix cache is off."""

    def num_behind(self, seq: Sequence) -> int:
        """Return the number of blocks of `seq` that its next tokens do not read."""
        return 0

    def leave_behind(self, seq: Sequence, count: int) -> None:
        """Release the first `count` blocks of `seq`; they can still be found."""

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Allocate blocks up to `num_tokens` tokens of `seq`; return False if the pool is empty."""
        return True

    def release(self, seq: Sequence, num_useful: int | None) -> None:
        """Release the blocks of `seq`; blocks behind the first `num_useful` of the sequence are evicted first."""

    def num_useful(self, keys: list[bytes]) -> int | None:
        """Return the number of blocks that later sequences can start behind; None: all of them."""
        return None

    def register(self, seq: Sequence, first: int, end: int) -> None:
        """Let `longest` find the blocks `first` to `end` of `seq`, which launched steps fill."""

    def stopped(self, seq: Sequence) -> None:
        """Enter the end of `seq`, or its preemption; not called while the prefix cache is off."""

    def chunk(self, seq: Sequence, num_new: int) -> int:
        """Return the number of tokens, at most `num_new`, after which a prompt ends its chunk."""
        return num_new

    def launched(self, seqs: list[Sequence]) -> None:
        """Enter the launch of a step, with the `copies` before it."""

    @property
    def copies(self) -> Copies:
        """(source slot, target slot) of states to copy, in this order, before the next forward."""
        return ()

    def close(self) -> None:
        """Forget what steps that were not launched were to write."""

    def check_integrity(self, running: Set[Sequence], owners: Owners) -> None:
        """Add the owners of blocks to `owners`.

        Raises AssertionError if anything else than `running` sequences has memory here.
        """

    def gauges(self) -> dict[str, int]:
        """Return statistics of this kind by name."""
        return {}
