"""Computed tokens of prompts with latent attention (MLA), to which a step's new rows attend chunk by chunk.

M rows of prompts, L computed tokens of a chunk.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.attention.context_chunks import Piece
from kernels.host.host_copy import to_device


@dataclass(frozen=True)
class Chunk:
    """Rows of the prompts, counted from the first one, that attend to computed tokens in `slots`, int64 [L].

    firsts   first of `rows` of each sequence
    counts   computed tokens of each
    """

    rows: slice
    slots: torch.Tensor
    wrapper: Any
    firsts: np.ndarray
    counts: np.ndarray

    def adapters(self, slots_M: torch.Tensor | None) -> torch.Tensor | None:
        """Return the slots of the adapters of the computed tokens, int64 [L], of those of all rows."""
        if slots_M is None:
            return None
        firsts, counts = (to_device(it, slots_M.device) for it in (self.firsts, self.counts))
        return slots_M[firsts].repeat_interleave(counts, output_size=len(self.slots))


def slots_of(block_table: torch.Tensor, piece: Piece, block_size: int) -> torch.Tensor:
    """Return int64 [tokens of the piece], the slots of its tokens.

    block_table   of the prompts
    """
    blocks = block_table[piece.seq, piece.start // block_size : -(-piece.end // block_size)]
    offsets = torch.arange(block_size, device=blocks.device)
    return (blocks[:, None] * block_size + offsets).flatten()[: piece.end - piece.start]
