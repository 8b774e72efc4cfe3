"""Which adapter is in which slot, as all ranks agree on it step by step; slots count from 1. Pure policy.

Every rank changes its AdapterSlots by the plans of the steps alone, so all ranks have the same adapters in the same
slots. A rank votes for the slots of its running sequences, and for one adapter that it wants beside them.
"""

from collections.abc import Callable

from workers.step.step_sync import StepPlan

PATIENCE_STEPS = 256
"""Steps for which an adapter waits for a slot before no further sequence of the longest resident adapter begins."""


class AdapterSlots:
    """The slots of one epoch, all empty at its begin.

    is_loaded   whether the rank has an adapter of this id in host memory
    write       write(slot, id): copy an adapter from host memory into a slot, behind the steps that were launched
    """

    def __init__(
        self,
        num_slots: int,
        is_loaded: Callable[[int], bool],
        write: Callable[[int, int], None],
    ):
        self.is_loaded = is_loaded
        self._write = write
        self._ids = [0] * num_slots
        self._used = [0] * num_slots  # number of the last step with a sequence in the slot
        self._loaded = [0] * num_slots  # number of the step that brought the adapter
        self._step = 0
        self._waited = 0  # steps for which a wanted adapter has had no slot
        self._closed = 0  # a slot in which no further sequence begins
        self.num_loads = 0

    @property
    def num_resident(self) -> int:
        """Adapters in slots."""
        return sum(map(bool, self._ids))

    def slot_of(self, adapter: int) -> int | None:
        """Return the slot in which a sequence of this adapter may begin; None: it has to wait for one."""
        if not adapter:
            return 0
        if adapter not in self._ids:
            return None
        slot = self._ids.index(adapter) + 1
        return None if slot == self._closed else slot

    def wants(self, adapter: int) -> bool:
        """Return whether the adapter has to come into a slot."""
        return bool(adapter) and adapter not in self._ids

    def follow(self, plan: StepPlan) -> None:
        """Enter a plan, and bring adapters into slots before its step."""
        self._step += 1
        for index in range(len(self._ids)):
            if plan.adapter_slots >> index & 1:
                self._used[index] = self._step
        wanted = [it for it in dict.fromkeys(plan.adapters_wanted) if it not in self._ids]
        while wanted and (free := self._free(plan.adapter_slots)) is not None:
            adapter = wanted.pop(0)
            self._ids[free] = adapter
            self._used[free] = self._loaded[free] = self._step
            self.num_loads += 1
            self._write(free + 1, adapter)
            if free + 1 == self._closed:
                self._closed = 0
        self._wait(bool(wanted))

    def _free(self, in_use: int) -> int | None:
        """Return the slot that no sequence uses for the longest time, without those of this step's loads."""
        free = [
            index
            for index, loaded in enumerate(self._loaded)
            if not in_use >> index & 1 and (loaded < self._step or not self._ids[index])
        ]
        return min(free, key=lambda index: (self._used[index], index), default=None)

    def _wait(self, lacking: bool) -> None:
        """Count the steps of an adapter without a slot; close the slot with the adapter that came first."""
        self._waited = self._waited + 1 if lacking else 0
        if not lacking:
            self._closed = 0
        elif self._waited >= PATIENCE_STEPS and not self._closed:
            self._closed = 1 + min(range(len(self._ids)), key=lambda index: self._loaded[index])
