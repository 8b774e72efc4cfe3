"""The KV cache of a rank: all cache groups behind one interface, and the prefixes that sequences share.

Sequences with equal beginnings share memory. A block can be found once the step that fills it was launched and its
tokens are known, from a prompt or generated. If another sequence is computing the next block of a sequence, the
sequence waits instead of computing it too. So equal prompts that arrive together, such as several answers to one
prompt, are computed once. A sequence starts behind the longest prefix that every group has.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from workers.config import SchedulerConfig
from workers.kv_cache.block_groups import FullGroup, WindowGroup
from workers.kv_cache.block_pool import BlockPool, chain_keys, root_key
from workers.kv_cache.demand import KVDemand
from workers.kv_cache.group import CacheGroup, Copies, Prefix
from workers.kv_cache.state_group import StateGroup
from workers.kv_cache.state_snapshots import StateSnapshots
from workers.kv_cache.transfers import BlockTransfers
from workers.step.sequence import Sequence


class KVCacheManager:
    """The memory of the sequences of a rank. Its contents stay over epochs.

    window      largest window of a layer; None: all layers read all tokens
    snapshots   of the states of linear attention; None: no layer has it
    groups      one for each kind of layers; the first one has the layers over all tokens
    transfers   between the device and other places, of an epoch; None: there is no other place
    """

    def __init__(
        self,
        limits: SchedulerConfig,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        prefix_caching: bool = True,
        window: int | None = None,
        snapshots: StateSnapshots | None = None,
    ):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.max_blocks = -(-max_model_len // block_size)  # of a sequence
        self.demand = KVDemand(block_size, window, limits.max_num_batched_tokens)
        self.pool = BlockPool(num_blocks)
        sizes = self.pool, block_size, limits.max_num_seqs, self.max_blocks
        self._full = FullGroup(*sizes)
        self.groups: list[CacheGroup] = [self._full]
        if window is not None:
            self.groups.append(WindowGroup(*sizes, window=window))
        if snapshots is not None:
            self.groups.append(StateGroup(snapshots, block_size))
        self.transfers: BlockTransfers | None = None
        self._enabled = prefix_caching and all(group.caches_prefixes for group in self.groups)
        self._coming: set[bytes] = set()  # keys of prompt blocks that running sequences compute
        self._filled: list[Sequence] = []  # of which blocks are full and have no key
        self.num_queries = 0  # tokens looked up when their request first ran
        self.num_hits = 0  # of these, tokens found

    @property
    def batch_fields(self) -> set[str]:
        """The fields of the ForwardBatch that `fields` returns."""
        return {name for group in self.groups for name in group.batch_fields}

    def fields(
        self, rows: np.ndarray, row_of_token: np.ndarray, positions: np.ndarray, max_len: int
    ) -> dict[str, np.ndarray]:
        """Return the fields of all groups by name, see CacheGroup.fields; the longest sequence has `max_len` tokens."""
        place = rows, row_of_token, positions, -(-max_len // self.block_size)
        return {name: it for group in self.groups for name, it in group.fields(*place).items()}

    def shared_prefixes(self, rows: np.ndarray) -> dict[str, Any]:
        """Return the ForwardBatch's fields of prefixes that sequences share; rows as for `fields`."""
        groups, blocks = self._full.shared_prefixes(rows)
        return {"prefix_groups_cpu": groups, "prefix_blocks_cpu": blocks}

    def lookup(self, seq: Sequence) -> Prefix | None:
        """Return the prefix that `seq` can start behind; None if another sequence is about to compute the next block.

        The last token is always computed because its logits are needed. A request that needs every row has no prefix
        until its first output was sent.
        """
        self._register_filled()
        nothing = Prefix(0, tuple([] for _ in self.groups))
        if not self._enabled:
            return nothing
        num_blocks = (seq.num_tokens - 1) // self.block_size
        self._extend_keys(seq, num_blocks)
        if seq.request.needs_every_row and not seq.num_output_tokens:
            return nothing
        keys = seq.block_keys[:num_blocks]
        num_shared, shared = self.groups[0].find(keys)
        if num_shared < num_blocks and self._is_loaded(keys[num_shared]):
            return None
        count, blocks = self._agree(keys[:num_shared])
        if num_shared < num_blocks and keys[num_shared] in self._coming:
            place = keys, count, num_shared, self._coming
            if all(group.waits(*place) for group in self.groups):
                return None
        return Prefix(count * self.block_size, (shared[:count], *blocks), num_shared)

    def _agree(self, keys: list[bytes]) -> tuple[int, list[list[int]]]:
        """Return the most of `keys` that all groups but the first can start behind, and their blocks."""
        while True:
            found = [group.find(keys) for group in self.groups[1:]]
            count = min((count for count, _ in found), default=len(keys))
            if count == len(keys):
                return count, [blocks for _, blocks in found]
            keys = keys[:count]

    def begin_load(self, seq: Sequence, prefix: Prefix) -> bool | None:
        """Load more of `seq` than `prefix`; return whether it waits now, outside the scheduler, until `settle`.

        None: others hold the places that it needs, until transfers end or the next step begins.
        """
        new = seq.request.needs_every_row and not seq.num_output_tokens
        if self.transfers is None or not self._enabled or new:
            return False
        keys = seq.block_keys[: (seq.num_tokens - 1) // self.block_size]
        blocks = prefix.all_blocks
        self.pool.share(blocks)  # without room for the load, the sequence starts behind them
        try:
            num_found = prefix.num_tokens // self.block_size
            num_blocks = self.demand.blocks(seq.num_tokens)
            return self.transfers.begin_load(seq, keys, num_found, num_blocks)
        finally:
            self.pool.release(blocks)

    def _is_loaded(self, key: bytes) -> bool:
        return self.transfers is not None and self.transfers.comes(key)

    def park(self, seq: Sequence) -> bool:
        """Let `seq` wait outside the scheduler if its next block comes with the load of another sequence."""
        keys = seq.block_keys[: (seq.num_tokens - 1) // self.block_size]
        waits = any(self._is_loaded(key) for key in keys) and not seq.num_pending
        if waits and self.transfers is not None:
            self.transfers.park(seq)
        return waits

    def settle(self, *, idle: bool = False) -> list[Sequence]:
        """Enter what has come or gone meanwhile; return the sequences that wait for no load any more.

        idle   no step follows soon, so that whatever waits to be saved is saved now
        """
        if self.transfers is None:
            return []
        ready = self.transfers.settle()
        if idle:
            self.transfers.save(all_of_them=True)
        return ready

    @property
    def transfers_ended(self) -> int | None:
        """Transfers that have ended in this epoch; None if none is open, which would hold memory."""
        if self.transfers is None or not self.transfers.num_open:
            return None
        return self.transfers.num_ended

    @property
    def names_on_way(self) -> set[bytes]:
        """Names of contents that are on their way to another place than the device."""
        return set() if self.transfers is None else self.transfers.names_on_way

    @property
    def kv_source(self) -> str:
        """Where other nodes find what was saved; "": nowhere."""
        return "" if self.transfers is None else self.transfers.source

    def save_all(self) -> None:
        """Begin to save whatever waits to be saved."""
        if self.transfers is not None:
            self._register_filled()
            self.transfers.save(all_of_them=True)

    def fits(self, seq: Sequence, prefix: Prefix, *, goes_on: bool = True) -> bool:
        """Return whether there are blocks for all known tokens of `seq`, so that a prompt that starts can finish.

        Blocks that sequences before it lack, which begin behind loads, are not for `seq`.

        goes_on   something runs or moves that gives memory back later
        """
        blocks = prefix.all_blocks
        need = self.demand.blocks(seq.num_tokens) - len(blocks)
        if self.transfers is None:
            return need <= self.pool.num_free_besides(blocks)
        lacking = self.transfers.num_promised(seq, len(blocks))
        if need + lacking > self.pool.num_free_besides(blocks):
            self.transfers.give_way(seq if goes_on else None)
            lacking = self.transfers.num_promised(seq, len(blocks))
        return need + lacking <= self.pool.num_free_besides(blocks)

    def allocate(self, seq: Sequence, prefix: Prefix, num_new: int) -> None:
        """Give `seq`, which has a row and starts behind `prefix` with `num_new` tokens, its memory in every group.

        No other call may come between `lookup` and this call, because found blocks may be evicted.
        """
        self.pool.share(prefix.all_blocks)
        for group, blocks in zip(self.groups, prefix.blocks, strict=True):
            group.allocate(seq, prefix, blocks, num_new)
        if self.transfers is not None:
            self.transfers.started(seq)
        if not self._enabled:
            return
        num_found = prefix.num_tokens // self.block_size
        seq.next_full = (num_found + 1) * self.block_size
        self._coming.update(seq.block_keys[num_found:])
        if not seq.num_preemptions and not seq.request.needs_every_row:
            if not seq.request.emitted_token_ids:
                seq.num_cached_tokens = prefix.num_tokens
            if seq.request.is_probe:
                return
            self.num_queries += seq.num_tokens
            self.num_hits += prefix.num_tokens

    def chunk(self, seq: Sequence, num_new: int) -> int:
        """Return how many of its next `num_new` tokens a prompt computes in a step."""
        return min(group.chunk(seq, num_new) for group in self.groups)

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Release what the next tokens of `seq` do not read, and allocate up to `num_tokens` tokens.

        Return False if the pool is empty.
        """
        if num_tokens <= seq.capacity:
            return True
        for group in self.groups:
            group.leave_behind(seq, self._register)
        seq.capacity = min([group.grow(seq, num_tokens) for group in self.groups])
        if not seq.capacity and self.transfers is not None and self.transfers.give_way():
            seq.capacity = min([group.grow(seq, num_tokens) for group in self.groups])
        return seq.capacity > 0

    @property
    def copies(self) -> Copies:
        """(source slot, target slot) of states to copy, in this order, before the next forward."""
        return tuple(copy for group in self.groups for copy in group.copies)

    def launched(self, seqs: list[Sequence]) -> None:
        """Enter the launch of a step of `seqs`, with the `copies` before it."""
        kept = []
        self._register_filled()
        for group in self.groups:
            group.launched(seqs)
            kept += group.take_kept()
        if self.transfers is not None:
            self.transfers.launched(kept)

    def committed(self) -> None:
        """Enter the end of the oldest launched step, after the commits of its sequences."""
        if self.transfers is not None:
            self._register_filled()
            self.transfers.committed()

    def commit(self, seq: Sequence) -> None:
        """Let later sequences find the blocks of `seq` that launched steps fill.

        A block with a pending last token is found after the next commit. Keys take long to compute and no launch needs
        them, so blocks get them behind the next launch, or before anything reads keys.
        """
        if seq.num_computed_tokens >= seq.next_full:
            self._filled.append(seq)

    def _register_filled(self) -> None:
        filled, self._filled = self._filled, []
        for seq in filled:
            self._register(seq)

    def _register(self, seq: Sequence) -> None:
        if seq.num_computed_tokens < seq.next_full:
            return
        first = seq.next_full // self.block_size - 1
        end = min(seq.num_computed_tokens, seq.num_tokens) // self.block_size
        self._extend_keys(seq, end)
        for group in self.groups:
            group.register(seq, first, end)
        if self.transfers is not None:
            self.transfers.offer(seq, first, end)
        self._coming.difference_update(seq.block_keys[first:end])
        seq.next_full = (end + 1) * self.block_size

    def release(self, seq: Sequence) -> None:
        """Release the memory of `seq`, which ends or is preempted, possibly before all is computed."""
        self._register_filled()
        seq.capacity = 0
        num_full = seq.next_full // self.block_size - 1
        self._coming.difference_update(seq.block_keys[num_full:])
        counts = [group.num_useful(seq.block_keys) for group in self.groups]
        num_useful = min((count for count in counts if count is not None), default=None)
        for group in self.groups:
            group.release(seq, num_useful)

    def forget(self, seq: Sequence, first_token: int = 0) -> None:
        """Let no sequence find the tokens of `seq` from `first_token` on, also where `seq` has released them."""
        self._register_filled()
        keys = seq.block_keys[first_token // self.block_size :]
        for group in self.groups:
            group.forget(keys)
        if self.transfers is not None:
            self.transfers.forget(keys)

    def check_integrity(self, running: Iterable[Sequence]) -> None:
        """Raise AssertionError, with what leaks, unless the pool has the owners that the groups count."""
        self._register_filled()
        seqs, owners = set(running), Counter[int]()
        for group in self.groups:
            held = () if self.transfers is None else self.transfers.owners(group)
            group.check_integrity(seqs, owners, held)
        self.pool.check_integrity(owners)
        num_coming = len(self._coming)
        assert seqs or not num_coming, f"{num_coming} blocks are awaited that no sequence computes"

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let sequences that start and end inside find nothing and leave nothing; other blocks keep their contents."""
        enabled, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = enabled

    def close(self) -> None:
        """End an epoch: forget what steps that were not launched were to write, and begin to count anew."""
        self._register_filled()
        self.num_queries = self.num_hits = 0
        if self.transfers is not None:
            self.transfers.close()
            self.transfers = None
        for group in self.groups:
            group.close()

    def gauges(self) -> dict[str, float]:
        """Return the statistics of the cache and of each group by name."""
        found: dict[str, float] = {
            "kv_cache_usage": self.pool.usage,
            "prefix_cache_queries": self.num_queries,
            "prefix_cache_hits": self.num_hits,
        }
        for group in self.groups:
            found |= group.gauges()
        return found | ({} if self.transfers is None else self.transfers.gauges())

    def _extend_keys(self, seq: Sequence, num_blocks: int) -> None:
        done = len(seq.block_keys)
        if done < num_blocks:
            size = self.block_size
            request = seq.request
            parent = seq.block_keys[-1] if done else root_key(request.cache_salt, request.adapter)
            token_ids = seq.token_ids[done * size : num_blocks * size]
            images = None
            if seq.images is not None:
                images = seq.images.contents(done, num_blocks, size)
            seq.block_keys += chain_keys(parent, token_ids, size, images)
