"""Rows of a batch in which several draws belong to one sequence: each verifies a draft. Knows nothing of drafters.

B rows.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from kernels.host.host_copy import to_device
from workers.step.scheduled_batch import NO_DRAFT


@dataclass(frozen=True)
class VerifiedRows:
    """The rows of a sequence lie together; each is as deep as the drafts before it are many.

    draft_B   int64, the draft that the row's draw verifies, or NO_DRAFT in the last row of a sequence
    first_B   int64, the first row of the row's sequence
    """

    draft_B: np.ndarray
    first_B: np.ndarray

    @classmethod
    def of(cls, slots_B: np.ndarray, draft_B: np.ndarray) -> Self:
        """Return the rows of a batch; slots_B: slot of each row's sequence."""
        starts = np.flatnonzero(np.diff(slots_B, prepend=-1))
        lengths = np.diff(starts, append=len(slots_B))
        return cls(draft_B, np.repeat(starts, lengths))

    @property
    def depth_B(self) -> np.ndarray:
        """int64: how many drafts stand before each row's draw."""
        depth_B: np.ndarray = np.arange(len(self.first_B)) - self.first_B
        return depth_B

    def times(self, device: torch.device) -> torch.Tensor:
        """int32 [B]: 1 in rows with a draft, else 0."""
        return to_device((self.draft_B != NO_DRAFT).astype(np.int32), device)

    def counting(self, token_B: torch.Tensor) -> torch.Tensor:
        """int32 [B]: 1 in rows of which the draw counts, because the draws before it equal their drafts; else 0."""
        first_B = to_device(self.first_B, token_B.device)
        wrong_B = (token_B != to_device(self.draft_B, token_B.device)).to(torch.int32)
        before_B = wrong_B.cumsum(0, dtype=torch.int32) - wrong_B
        return (before_B == before_B[first_B]).to(torch.int32)
