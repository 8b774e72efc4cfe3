"""Snapshots of the states of linear attention at ends of KV blocks: which slot holds which, and the copies to make.

A state has no positions: a sequence can go on only from where a state was, while KV blocks serve any prefix. Therefore
a rank keeps copies of states where a later request is likely to go on. A snapshot has the key of the block that ends
there (see workers/kv_cache/block_pool.py), so equal keys mean equal tokens from the first one on, and equal states.
Knows nothing of requests and of tensors.
"""

from collections import Counter, OrderedDict
from collections.abc import Container, Iterable

# Tokens of a prompt that a snapshot must save, because a chunk that ends at a snapshot costs a step.
MIN_GAIN = 64
# After PATIENCE snapshots in a row were replaced before their first use, only one prompt in SELDOM gets snapshots. The
# few snapshots then stay longer, and a prompt without a snapshot takes one step less.
PATIENCE, SELDOM = 8, 8


class StateSnapshots:
    """`count` slots from `first_slot` on; the longest unused snapshot that nothing holds is replaced.

    copies     (source slot, target slot) to make, in this order, before the next forward; the caller empties the list
    count      most snapshots; 0: the prefix cache finds nothing
    min_gain   tokens of a prompt that a snapshot must save
    slot_bytes bytes of a snapshot
    """

    def __init__(
        self, first_slot: int, count: int, *, slot_bytes: int = 0, min_gain: int = MIN_GAIN
    ):
        self.count, self.slot_bytes, self.min_gain = count, slot_bytes, min_gain
        self.copies: list[tuple[int, int]] = []
        self.num_restored = 0  # sequences that went on from a snapshot
        self._free = list(range(first_slot + count - 1, first_slot - 1, -1))
        self._slot_of: OrderedDict[bytes, int] = OrderedDict()  # the longest unused first
        self._held: Counter[int] = Counter()  # slots by the number of holders
        self._taken: set[int] = set()  # of these, those with contents from elsewhere
        self._never_used: set[bytes] = set()
        self._num_lost = self._num_prompts = 0

    @property
    def num_kept(self) -> int:
        """Snapshots that can be found."""
        return len(self._slot_of)

    @property
    def slots(self) -> tuple[int, ...]:
        """The slots with snapshots that can be found or are held."""
        return tuple({*self._slot_of.values(), *self._held})

    def __contains__(self, key: object) -> bool:
        """Return whether there is a snapshot of `key`."""
        return key in self._slot_of

    def longest(self, keys: list[bytes]) -> int:
        """Return how many of `keys` come up to the last one with a snapshot; 0: none has one."""
        for count in range(len(keys), 0, -1):
            if keys[count - 1] in self._slot_of:
                return count
        return 0

    def restore(self, key: bytes, slot: int) -> None:
        """Copy the snapshot of `key` to the slot of a sequence."""
        self._slot_of.move_to_end(key)
        self._never_used.discard(key)
        self._num_lost = 0
        self.copies.append((self._slot_of[key], slot))
        self.num_restored += 1

    def save(self, key: bytes, slot: int) -> int | None:
        """Keep a copy of the slot of a sequence, as the launched forwards leave it, under `key`.

        Return the slot of the copy; None if there is one already, or no slot.
        """
        kept = None if key in self._slot_of else self._free_slot()
        if kept is not None:
            self._slot_of[key] = kept
            self._never_used.add(key)
            self.copies.append((slot, kept))
        return kept

    def _free_slot(self, besides: Container[int] = ()) -> int | None:
        """Return a slot for another snapshot, which replaces the longest unused one if none is free.

        besides   slots that are not returned
        """
        slot = next((it for it in reversed(self._free) if it not in besides), None)
        if slot is None:
            kept = ((key, it) for key, it in self._slot_of.items() if it not in self._held)
            oldest, slot = next((it for it in kept if it[1] not in besides), (b"", None))
            if slot is None:
                return None
            self._num_lost += oldest in self._never_used
            self.forget((oldest,))
        self._free.remove(slot)
        return slot

    def hold(self, key: bytes) -> int | None:
        """Hold the slot with the snapshot of `key`; None: there is none.

        A copy outside the device keeps the snapshot for later sequences, so the holder counts as a use.
        """
        slot = self._slot_of.get(key)
        if slot is not None:
            self._held[slot] += 1
            self._never_used.discard(key)
        return slot

    def hold_slot(self, slot: int) -> None:
        """Hold a slot once more."""
        assert self._held[slot], f"slot {slot} is not held"
        self._held[slot] += 1

    def take(self) -> int | None:
        """Hold a slot for a snapshot that comes from elsewhere, at once; None: there is none for now.

        Half of the slots are left for snapshots that running prompts leave: one without a slot is lost for all places.
        The copies before the next forward have not begun, and so neither read nor fill the slot.
        """
        if self._taken and len(self._taken) >= self.count // 2:
            return None
        slot = self._free_slot({slot for copy in self.copies for slot in copy})
        if slot is not None:
            self._held[slot] += 1
            self._taken.add(slot)
        return slot

    def enter(self, key: bytes, slot: int) -> None:
        """Let the snapshot of `key` be found in a slot that was taken. A second one of the same key is not found."""
        self._slot_of.setdefault(key, slot)

    def let_go(self, slots: Iterable[int]) -> None:
        """Hold these slots no more."""
        for slot in slots:
            self._held[slot] -= 1
            if not self._held[slot]:
                del self._held[slot]
                self._taken.discard(slot)
                if slot not in self._slot_of.values():
                    self._free.append(slot)

    def admit_prompt(self) -> bool:
        """Return whether the next prompt gets snapshots: seldom, while they are replaced before their first use."""
        self._num_prompts += 1
        return self._num_lost < PATIENCE or self._num_prompts % SELDOM == 0

    def forget(self, keys: Iterable[bytes]) -> None:
        """Let `longest` no longer find the snapshots of `keys`."""
        for key in keys:
            slot = self._slot_of.pop(key, None)
            if slot is not None:
                self._never_used.discard(key)
                if slot not in self._held:
                    self._free.append(slot)

    def check_integrity(self, held: Iterable[int] = ()) -> None:
        """Raise AssertionError unless every slot is either free, or has one snapshot, or is among `held`."""
        free, kept = self._free, self.slots
        assert len({*free, *kept}) == len(free) + len(kept) == self.count, (
            f"free slots {free} and slots with snapshots {kept}, expected {self.count} in all"
        )
        assert len(set(self._slot_of.values())) == self.num_kept, "two snapshots have one slot"
        assert self._held == Counter(held), f"holders of slots are {self._held}, expected {held}"

    def close(self) -> None:
        """Drop the copies that were not made, and the snapshots that they were to make; all others stay."""
        targets = {target for _, target in self.copies}
        self.forget([key for key, slot in self._slot_of.items() if slot in targets])
        self.copies.clear()


def independent(copies: list[tuple[int, int]]) -> list[tuple[list[int], list[int]]]:
    """Return the copies in order as sources and targets of batches; the copies of a batch can be made in any order."""
    batches: list[tuple[list[int], list[int]]] = []
    for source, target in copies:
        if batches:
            sources, targets = batches[-1]
            if source not in targets and target not in targets and target not in sources:
                sources.append(source)
                targets.append(target)
                continue
        batches.append(([source], [target]))
    return batches
