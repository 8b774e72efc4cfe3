"""The adapter of each row of a forward, as the products of adapters read it. Knows nothing of requests.

T rows (padding included).
"""

from dataclasses import dataclass

import numpy as np
import torch

NO_ADAPTER = 0
"""The slot of rows without an adapter; the slots of adapters count from 1."""

Rows = slice | torch.Tensor


@dataclass(frozen=True)
class AdapterRows:
    """The rows of one forward by their adapters.

    slots_T    int64: slot of the adapter of each row, NO_ADAPTER for none
    segments   on a CPU: each slot that occurs, with its rows, a slice where they lie side by side. On a GPU the kernels
               read slots_T alone, because a CUDA graph reads it anew at each replay
    """

    slots_T: torch.Tensor
    segments: tuple[tuple[int, Rows], ...] = ()

    @classmethod
    def of(cls, slots_T: torch.Tensor) -> "AdapterRows":
        """Return the rows of these slots, int64 [T] on any device."""
        if slots_T.is_cuda:
            return cls(slots_T)
        slots = slots_T.numpy()
        found = (slot for slot in np.unique(slots).tolist() if slot != NO_ADAPTER)
        return cls(slots_T, tuple((slot, _rows(slots == slot)) for slot in found))

    @classmethod
    def of_one(cls, slot: int, num_rows: int, device: torch.device) -> "AdapterRows":
        """Return rows that all have one adapter."""
        return cls.of(torch.full((num_rows,), slot, dtype=torch.int64, device=device))

    def take(self, rows_L: torch.Tensor) -> "AdapterRows":
        """Return the chosen rows, int64 [L]."""
        return AdapterRows.of(self.slots_T.index_select(0, rows_L))


def _rows(mask_T: np.ndarray) -> Rows:
    rows = mask_T.nonzero()[0]
    first, end = int(rows[0]), int(rows[-1]) + 1
    return slice(first, end) if end - first == len(rows) else torch.from_numpy(rows)
