"""Prefix cache: sequences with equal beginnings share KV blocks.

A block can be found once the step that fills it was launched and its tokens are known, from a prompt or generated. If
another sequence is computing the next block of a sequence, the sequence waits instead of computing it too. So equal
prompts that arrive together, such as several answers to one prompt, are computed once.

Layers with a window have blocks and keys of their own. A sequence can start behind n blocks if all of them are there
for the other layers, and for the layers with a window those that the next token's window touches.

Of a model with linear attention a sequence can start only at the end of a block where a state was kept; all else is
computed again. States are kept at the end of a prompt's last full block, where the next turn of a conversation goes on,
and at the end of what a prompt shares with another one. There a running prompt ends its chunk.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from workers.kv_cache.block_pool import BlockPool, chain_keys, root_key
from workers.kv_cache.state_snapshots import StateSnapshots
from workers.step.sequence import Sequence


@dataclass(frozen=True)
class Prefix:
    """The blocks that a sequence starts with, from its first token on; `window_blocks`: the last ones of a window.

    num_shared   blocks of the sequence that the pool has, also where no state was kept at their end
    """

    blocks: list[int] = field(default_factory=list)
    window_blocks: list[int] = field(default_factory=list)
    num_shared: int = 0

    @property
    def both(self) -> list[int]:
        """All blocks of the prefix."""
        return self.blocks + self.window_blocks


class PrefixCache:
    """Keys of the blocks of a pool. A disabled cache finds nothing.

    window      largest window of a layer; None: all layers read all tokens
    snapshots   of the states of linear attention; None: no layer has it
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        enabled: bool,
        window: int | None = None,
        snapshots: StateSnapshots | None = None,
    ):
        self.num_queries = 0  # tokens looked up when their request first ran
        self.num_hits = 0  # of these, tokens found
        self._pool = pool
        self._block_size = block_size
        self._enabled = enabled
        self._window = window
        self._snapshots = snapshots
        self._wanted: set[bytes] = (
            set()
        )  # of prompt blocks with an end where a state is worth keeping
        self._coming: set[bytes] = (
            set()
        )  # of prompt blocks that running sequences have not computed yet

    def find(self, seq: Sequence) -> Prefix | None:
        """Return the blocks that `seq` can start with; None if another sequence is about to compute the next block.

        The last token is always computed because its logits are needed. A prompt with prompt_logprobs needs the
        logits of all its tokens, until its first output was sent.
        """
        if not self._enabled:
            return Prefix()
        num_blocks = (seq.num_tokens - 1) // self._block_size
        self._extend_keys(seq, num_blocks)
        if seq.request.params.prompt_logprobs is not None and not seq.num_output_tokens:
            return Prefix()
        keys = seq.block_keys[:num_blocks]
        blocks = self._pool.find(keys)
        if self._snapshots is not None:
            return self._with_state(self._snapshots, blocks, keys)
        if len(blocks) < num_blocks and keys[len(blocks)] in self._coming:
            return None
        return Prefix(blocks) if self._window is None else self._with_window(blocks, keys)

    def first_in_window(self, num_tokens: int) -> int:
        """Return the first block that the window of the token after `num_tokens` touches."""
        assert self._window is not None
        return max(0, num_tokens + 1 - self._window) // self._block_size

    def _with_window(self, blocks: list[int], keys: list[bytes]) -> Prefix:
        """Return the longest part of `blocks` that has all blocks of the next token's window."""
        count = index = len(blocks)
        found: list[int] = []  # blocks `index` to `count` of the window, the last one first
        while index > self.first_in_window(count * self._block_size):
            index -= 1
            there = self._pool.find((_window_key(keys[index]),))
            found += there
            if not there:
                count, found = index, []
        return Prefix(blocks[:count], found[::-1])

    def _with_state(
        self, snapshots: StateSnapshots, blocks: list[int], keys: list[bytes]
    ) -> Prefix | None:
        """Return the longest part of `blocks` that ends where a state was kept.

        None if another sequence is about to compute the next block; that sequence then keeps a state where the two
        part.
        """
        count, shared = snapshots.longest(keys[: len(blocks)]), len(blocks)
        while shared < len(keys) and keys[shared] in self._coming:
            shared += 1
        if shared > len(blocks) and (shared - count) * self._block_size >= snapshots.min_gain:
            self._wanted.add(keys[shared - 1])
            return None
        return Prefix(blocks[:count], num_shared=len(blocks))

    def started(self, seq: Sequence, found: Prefix) -> None:
        """`seq` starts to run from the end of the blocks found for it."""
        if not self._enabled:
            return
        if self._snapshots is not None:
            self._plan_states(self._snapshots, seq, found)
        num_found = seq.num_computed_tokens // self._block_size
        seq.next_full = (num_found + 1) * self._block_size
        self._coming.update(seq.block_keys[num_found:])
        if not seq.num_preemptions and seq.request.params.prompt_logprobs is None:
            if not seq.request.emitted_token_ids:
                seq.num_cached_tokens = seq.num_computed_tokens
            if seq.request.is_probe:
                return
            self.num_queries += seq.num_tokens
            self.num_hits += seq.num_computed_tokens

    def _plan_states(self, snapshots: StateSnapshots, seq: Sequence, found: Prefix) -> None:
        """Start from the state of the found blocks; want states where shared blocks and the last full block end."""
        count, keys = len(found.blocks), seq.block_keys
        if count:
            snapshots.restore(keys[count - 1], seq.row + 1)
        last, least = (seq.num_tokens - 1) // self._block_size, snapshots.min_gain
        if (last - count) * self._block_size < least or not snapshots.admit_prompt():
            return
        for end in (found.num_shared, last):
            if (end - count) * self._block_size >= least:
                self._wanted.add(keys[end - 1])
                count = end

    def chunk(self, seq: Sequence, num_new: int) -> int:
        """Return how many of the next `num_new` tokens `seq` computes: up to the first place that is worth a state."""
        if not self._wanted or num_new == 1:
            return num_new
        first, end = (
            n // self._block_size
            for n in (seq.num_computed_tokens, seq.num_computed_tokens + num_new)
        )
        for index in range(first, min(end, len(seq.block_keys))):
            if seq.block_keys[index] in self._wanted:
                return (index + 1) * self._block_size - seq.num_computed_tokens
        return num_new

    def keep_state(self, seq: Sequence) -> None:
        """Keep the state of `seq` behind the launched steps, if it stands at a place that is worth it."""
        num_full, rest = divmod(seq.num_computed_tokens, self._block_size)
        if not self._wanted or rest or not 0 < num_full <= len(seq.block_keys):
            return
        key = seq.block_keys[num_full - 1]
        if key in self._wanted and self._snapshots is not None:
            self._wanted.discard(key)
            self._snapshots.save(key, seq.row + 1)

    def register(self, seq: Sequence) -> None:
        """Register the blocks of `seq` that launched steps fill, once `seq.next_full` is reached.

        A block with a pending last token is registered by the next commit.
        """
        first = seq.next_full // self._block_size - 1
        num_full = min(seq.num_computed_tokens, seq.num_tokens) // self._block_size
        self._extend_keys(seq, num_full)
        for index in range(first, num_full):
            self._pool.register(seq.block_ids[index], seq.block_keys[index])
            if index >= seq.window_first and self._window is not None:
                block = seq.window_ids[index - seq.window_first]
                self._pool.register(block, _window_key(seq.block_keys[index]))
        self._coming.difference_update(seq.block_keys[first:num_full])
        seq.next_full = (num_full + 1) * self._block_size

    def stopped(self, seq: Sequence) -> None:
        """`seq` gives its blocks back, possibly before all are computed."""
        if self._enabled:
            num_full = seq.next_full // self._block_size - 1
            self._coming.difference_update(seq.block_keys[num_full:])
            if self._wanted:
                self._wanted.difference_update(seq.block_keys)

    def num_useful(self, seq: Sequence) -> int | None:
        """Return how many blocks of `seq` come before its last kept state; None: blocks need no state."""
        return None if self._snapshots is None else self._snapshots.longest(seq.block_keys)

    def forget(self, seq: Sequence, first_token: int = 0) -> None:
        """Remove the blocks of `seq` with its tokens from `first_token` on, also blocks that it has released."""
        keys = seq.block_keys[first_token // self._block_size :]
        self._pool.forget(keys)
        self._pool.forget(map(_window_key, keys))
        if self._snapshots is not None:
            self._snapshots.forget(keys)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Let sequences that start and end inside find nothing and leave nothing; other blocks keep their contents."""
        enabled, self._enabled = self._enabled, False
        try:
            yield
        finally:
            self._enabled = enabled

    def _extend_keys(self, seq: Sequence, num_blocks: int) -> None:
        done = len(seq.block_keys)
        if done < num_blocks:
            size = self._block_size
            parent = seq.block_keys[-1] if done else root_key(seq.request.cache_salt)
            token_ids = seq.token_ids[done * size : num_blocks * size]
            seq.block_keys += chain_keys(parent, token_ids, size)


def _window_key(key: bytes) -> bytes:
    """Return the key of the block with the same tokens for layers with a window; one byte longer than any other."""
    return key + b"w"
