"""Cache group of layers of linear attention: one state a sequence, and snapshots of states for later sequences.

A sequence can start only at the end of a block where a state was kept; all else is computed again. States are kept at
the end of a prompt's last full block, where the next turn of a conversation goes on, and at the end of what a prompt
shares with another one. There a running prompt ends its chunk.
"""

from collections import Counter
from collections.abc import Container, Iterable, Set
from collections.abc import Sequence as Places

import numpy as np

from workers.kv_cache.group import CacheGroup, Copies, Filled, Prefix
from workers.kv_cache.state_snapshots import StateSnapshots
from workers.step.sequence import Sequence


class StateGroup(CacheGroup):
    """Row r of the InputBatch has slot r + 1 of each pool of states, because slot 0 is for padding.

    Drafts change no state before they are accepted, see workers/runner/accepted_drafts.py; and no prompt has drafts, so
    every snapshot is behind tokens that count.

    snapshots   in the slots behind the slots of rows
    """

    batch_fields = ("state_slots",)
    suffix = b"s"
    is_state = True

    def __init__(self, snapshots: StateSnapshots, block_size: int):
        self.snapshots = snapshots
        self._block_size = block_size
        self._wanted: set[bytes] = set()  # keys of prompt blocks with an end where a state is kept
        self._kept: list[Filled] = []  # by the copies before the next step
        self.caches_prefixes = snapshots.count > 0

    def fields(
        self, rows: np.ndarray, row_of_token: np.ndarray, positions: np.ndarray, max_blocks: int
    ) -> dict[str, np.ndarray]:
        return {"state_slots": rows + 1}

    def find(self, keys: list[bytes]) -> tuple[int, list[int]]:
        return self.snapshots.longest(keys), []

    def longest(self, keys: list[bytes], also: Container[bytes]) -> int:
        for count in range(len(keys), 0, -1):
            if keys[count - 1] in self.snapshots or keys[count - 1] + self.suffix in also:
                return count
        return 0

    def needed(self, count: int) -> range:
        return range(max(0, count - 1), count)

    def hold(self, key: bytes) -> int | None:
        return self.snapshots.hold(key)

    def hold_place(self, place: int) -> None:
        self.snapshots.hold_slot(place)

    def is_filled(self, place: int) -> bool:
        return all(place != target for _, target in self.snapshots.copies)

    def take(self) -> int | None:
        return self.snapshots.take()

    def enter(self, key: bytes, place: int) -> None:
        self.snapshots.enter(key, place)

    def let_go(self, places: Places[int]) -> None:
        self.snapshots.let_go(places)

    def take_kept(self) -> list[Filled]:
        kept, self._kept = self._kept, []
        return kept

    def num_useful(self, keys: list[bytes]) -> int | None:
        return self.snapshots.longest(keys)

    def waits(self, keys: list[bytes], start: int, end: int, coming: Container[bytes]) -> bool:
        """The sequence that computes the next blocks keeps a state where the two sequences part, if it is worth it."""
        while end < len(keys) and keys[end] in coming:
            end += 1
        if (end - start) * self._block_size < self.snapshots.min_gain:
            return False
        self._wanted.add(keys[end - 1])
        return True

    def allocate(self, seq: Sequence, prefix: Prefix, shared: list[int], num_new: int) -> None:
        """Start from the state of the prefix; want states where shared blocks and the last full block end."""
        count, keys = prefix.num_tokens // self._block_size, seq.block_keys
        if count:
            self.snapshots.restore(keys[count - 1], seq.row + 1)
        last, least = (seq.num_tokens - 1) // self._block_size, self.snapshots.min_gain
        worth = last <= len(keys) and (last - count) * self._block_size >= least
        if not worth or not self.snapshots.admit_prompt():
            return
        for end in (prefix.num_shared, last):
            if (end - count) * self._block_size >= least:
                self._wanted.add(keys[end - 1])
                count = end

    def release(self, seq: Sequence, num_useful: int | None) -> None:
        if self._wanted:
            self._wanted.difference_update(seq.block_keys)

    def chunk(self, seq: Sequence, num_new: int) -> int:
        """End the chunk at the first place where a state is wanted."""
        if not self._wanted or num_new == 1:
            return num_new
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + num_new
        last = min(end // self._block_size, len(seq.block_keys))
        for index in range(start // self._block_size, last):
            if seq.block_keys[index] in self._wanted:
                return (index + 1) * self._block_size - start
        return num_new

    def launched(self, seqs: list[Sequence]) -> None:
        """Keep the states that the launched steps leave at wanted places."""
        self.snapshots.copies.clear()
        for seq in seqs if self._wanted else ():
            num_full, rest = divmod(seq.num_computed_tokens, self._block_size)
            if rest or not 0 < num_full <= len(seq.block_keys):
                continue
            key = seq.block_keys[num_full - 1]
            if key in self._wanted:
                of_prompt = seq.num_computed_tokens <= seq.num_prefill_tokens
                assert of_prompt, f"{seq.request.request_id} may have drafts in its state"
                self._wanted.discard(key)
                slot = self.snapshots.save(key, seq.row + 1)
                if slot is not None:
                    self._kept.append(Filled.of(self, seq, num_full - 1, slot))

    @property
    def copies(self) -> Copies:
        return tuple(self.snapshots.copies)

    def forget(self, keys: Iterable[bytes]) -> None:
        self.snapshots.forget(keys)

    def close(self) -> None:
        self.snapshots.close()
        self._kept.clear()

    def check_integrity(
        self, running: Set[Sequence], owners: Counter[int], held: Iterable[int] = ()
    ) -> None:
        self.snapshots.check_integrity(held)
        wanted = len(self._wanted)
        assert running or not wanted, f"{wanted} states are wanted that no sequence computes"

    def gauges(self) -> dict[str, int]:
        kept = self.snapshots.num_kept
        return {
            "state_snapshots": kept,
            "state_snapshot_bytes": kept * self.snapshots.slot_bytes,
            "states_restored": self.snapshots.num_restored,
        }
