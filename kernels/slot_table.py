"""The slots of the copies of each expert of one layer, as tensors that routing reads: a captured graph too.

T tokens, K experts per token, E logical experts, C most copies of an expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class SlotTable:
    """A map of one layer on a device. The addresses stay; `copy_from` changes the contents.

    slots_EC   int32: the slots of the copies of each expert, in the first `copies_E` columns. Column 0 is the copy of
               steps that take one copy of each expert: those of all experts are spread over the ranks
    copies_E   int32, at least 1
    first      where rows spread over all copies, row t takes copy (t + first) % copies: another one on each rank
    """

    slots_EC: torch.Tensor
    copies_E: torch.Tensor
    first: int

    @classmethod
    def of(
        cls,
        experts: Sequence[int],
        starts: Sequence[int],
        num_experts: int,
        rank: int,
        device: torch.device | str,
    ) -> "SlotTable":
        """Return the table of a layer for the rows of `rank`, of a shape that all maps of equal `starts` have.

        experts, starts   as of ExpertMap: the expert in each slot, and the first slot of each rank
        """
        experts_S, num_ranks = np.array(experts, dtype=np.int64), len(starts) - 1
        rank_S = np.repeat(np.arange(num_ranks), np.diff(starts))
        columns = min(num_ranks, 1 + len(experts_S) - num_experts)
        slots_EC = np.zeros((num_experts, columns), dtype=np.int32)
        copies_E = np.bincount(experts_S, minlength=num_experts).astype(np.int32)
        by_expert_S = np.argsort(experts_S, kind="stable")
        ends_E = np.cumsum(copies_E)
        slots_EC[:, 0] = by_expert_S[ends_E - copies_E]
        # Experts of which the first copy is on each rank; a loop over the experts with copies alone, because the thread
        # that calls this shares the interpreter with the steps.
        single_R = np.bincount(rank_S[slots_EC[copies_E == 1, 0]], minlength=num_ranks)
        several = np.flatnonzero(copies_E > 1)
        for expert in several[np.argsort(copies_E[several], kind="stable")].tolist():
            slots = by_expert_S[ends_E[expert] - copies_E[expert] : ends_E[expert]]
            chosen = int(single_R[rank_S[slots]].argmin())
            single_R[rank_S[slots[chosen]]] += 1
            slots_EC[expert, : len(slots)] = np.roll(slots, -chosen)
        first, second = (torch.from_numpy(array).to(device) for array in (slots_EC, copies_E))
        return cls(first, second, max(rank, 0))

    def copy_from(self, other: "SlotTable") -> None:
        """Take the contents of a table of equal shape, on the current stream."""
        self.slots_EC.copy_(other.slots_EC)
        self.copies_E.copy_(other.copies_E)
