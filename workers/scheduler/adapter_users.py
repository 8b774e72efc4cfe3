"""The slots of adapters that the running sequences of one rank use, and the adapter that waits for a slot."""

from collections import Counter

from workers.step.adapter_slots import AdapterSlots
from workers.step.sequence import Sequence


class AdapterUsers:
    """What a rank votes of its sequences' adapters; the votes of all ranks change AdapterSlots."""

    def __init__(self) -> None:
        self._num_users: Counter[int] = Counter()  # running sequences by slot
        self._wanted = 0
        self._held_back = 0  # an adapter with a closed slot, for which a sequence waits

    def begin_step(self) -> None:
        """Forget which adapter was wanted in the step before."""
        self._wanted = self._held_back = 0

    def take(self, seq: Sequence, slots: AdapterSlots | None) -> bool:
        """Give `seq` the slot of its adapter; return False if it has to wait for one."""
        if slots is None:
            return True
        slot = slots.slot_of(seq.request.adapter)
        if slot is None:
            if not slots.wants(seq.request.adapter):
                self._held_back = seq.request.adapter
            elif not self._wanted:
                self._wanted = seq.request.adapter
            return False
        seq.adapter_slot = slot
        if slot:
            self._num_users[slot] += 1
        return True

    def leave(self, seq: Sequence) -> None:
        """Take back the slot of `seq`, if it has one."""
        if seq.adapter_slot:
            self._num_users[seq.adapter_slot] -= 1
            seq.adapter_slot = 0

    def vote(self, *, has_rows: bool) -> dict[str, int]:
        """Return the fields of the rank's Vote; has_rows: sequences of the step have adapters."""
        return {
            "adapter_rows": has_rows,
            "adapter_slots": sum(1 << (slot - 1) for slot, n in self._num_users.items() if n),
            # A resident adapter brings nothing into a slot, but the ranks take another step, in which the slot opens.
            "adapter_wanted": self._wanted or self._held_back,
        }
