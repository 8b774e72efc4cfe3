"""Which adapter is in which slot, as all ranks agree on it step by step; slots count from 1. Pure policy.

Every rank changes its AdapterSlots by the plans of the steps alone, so all ranks have the same adapters in the same
slots. A rank votes for the slots of its running sequences, and for one adapter that it wants beside them.

A large adapter comes into its slot in pieces, one a step, so that its copy lies beside steps and delays none of them.
"""

from collections import deque
from collections.abc import Callable

from workers.step.step_sync import StepPlan

PATIENCE_STEPS = 256
"""Steps for which an adapter waits for a slot before no further sequence of the longest resident adapter begins."""


class AdapterSlots:
    """The slots of one epoch, all empty at its begin.

    is_loaded    whether the rank has an adapter of this id in host memory
    write        write(slot, id, piece): copy a piece of an adapter, from 0 on, from host memory into a slot, behind the
                 steps that were launched before piece 0; steps behind the last piece read the adapter
    num_pieces   of an adapter; equal on all ranks
    """

    def __init__(
        self,
        num_slots: int,
        is_loaded: Callable[[int], bool],
        write: Callable[[int, int, int], None],
        num_pieces: int = 1,
    ):
        self.is_loaded = is_loaded
        self._write, self._num_pieces = write, num_pieces
        self._ids = [0] * num_slots
        self._used = [0] * num_slots  # number of the last step with a sequence in the slot
        # Number of the step that gave the adapter its slot, then of the step that brought its last piece.
        self._loaded = [0] * num_slots
        self._coming: deque[int] = deque()  # indices of slots of which pieces are to come
        self._piece = 0  # the next one of the first of them
        self._step = 0
        self._waited = 0  # steps for which a wanted adapter has had no slot
        self._closed = 0  # a slot in which no further sequence begins
        self.num_loads = 0

    @property
    def num_resident(self) -> int:
        """Adapters in slots."""
        return sum(map(bool, self._ids))

    def gauges(self) -> dict[str, int]:
        """Return the statistics of the slots by name."""
        return {"adapters_resident": self.num_resident, "adapter_loads": self.num_loads}

    def slot_of(self, adapter: int) -> int | None:
        """Return the slot in which a sequence of this adapter may begin; None: it has to wait for one."""
        if not adapter:
            return 0
        if adapter not in self._ids:
            return None
        index = self._ids.index(adapter)
        return None if index + 1 == self._closed or index in self._coming else index + 1

    def wants(self, adapter: int) -> bool:
        """Return whether the adapter has to come into a slot."""
        return bool(adapter) and adapter not in self._ids

    def follow(self, plan: StepPlan) -> None:
        """Enter a plan, and bring a piece of an adapter into a slot before its step."""
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
            self._coming.append(free)
            if free + 1 == self._closed:
                self._closed = 0
        self._bring()
        self._wait(bool(wanted))

    def _bring(self) -> None:
        """Copy the next piece of the adapter that comes first."""
        if not self._coming:
            return
        index = self._coming[0]
        self._write(index + 1, self._ids[index], self._piece)
        self._piece += 1
        if self._piece == self._num_pieces:
            self._used[index] = self._loaded[index] = self._step
            self._piece = 0
            self._coming.popleft()

    def _free(self, in_use: int) -> int | None:
        """Return the slot that no sequence uses for the longest time, and into which no adapter comes or just came."""
        free = [
            index
            for index, loaded in enumerate(self._loaded)
            if not in_use >> index & 1
            and index not in self._coming
            and (loaded < self._step or not self._ids[index])
        ]
        return min(free, key=lambda index: (self._used[index], index), default=None)

    def _wait(self, lacking: bool) -> None:
        """Count the steps of an adapter without a slot; close the slot with the adapter that came first."""
        self._waited = self._waited + 1 if lacking else 0
        if not lacking:
            self._closed = 0
        elif self._waited >= PATIENCE_STEPS and not self._closed:
            self._closed = 1 + min(range(len(self._ids)), key=lambda index: self._loaded[index])
