"""A bitmask of allowed tokens, applied to logits. Knows nothing of its source: a grammar or a list of tokens.

B rows, G masked rows, W = ceil(V / 32) words, V vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from kernels.host.host_copy import to_device

FORBIDDEN = float("-inf")


@dataclass(frozen=True)
class TokenBitmask:
    """Tokens that some rows of a batch may get.

    rows_G      int64, indices of the masked rows in the batch
    allowed_GW  int32, bit v % 32 of word v // 32 is 1 if token v is allowed; on any device
    """

    rows_G: torch.Tensor
    allowed_GW: torch.Tensor

    def apply(self, logits_BV: torch.Tensor) -> None:
        """Set the logits of tokens that are not allowed to -inf in place; NaN stays NaN."""
        # One look-up gives the penalties of eight tokens: filling by a bool takes ten times as long on a CPU.
        device = logits_BV.device
        bytes_GX = _moved(self.allowed_GW.contiguous(), device).view(torch.uint8)
        penalty_GV = _byte_penalties(device)[bytes_GX.long()].flatten(1)
        logits_BV.index_add_(0, _moved(self.rows_G, device), penalty_GV[:, : logits_BV.shape[1]])


def pack_tokens(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """Return int32 [W] words in which `token_ids` are allowed; ids beyond the vocabulary are left out."""
    allowed = np.zeros(-(-vocab_size // 32) * 32, dtype=bool)
    ids = np.fromiter(token_ids, dtype=np.int64)
    allowed[ids[(ids >= 0) & (ids < vocab_size)]] = True
    return np.packbits(allowed, bitorder="little").view(np.int32)


def _moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `tensor` on `device`, without waiting for the device."""
    return tensor if tensor.device == device else to_device(tensor.numpy(), device)


@cache
def _byte_penalties(device: torch.device) -> torch.Tensor:
    """Return float32 [256, 8]: 0 for the 1 bits of each byte, -inf for its 0 bits, lowest bit first."""
    bits = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
    return torch.zeros(256, 8).masked_fill_(bits == 0, FORBIDDEN).to(device)
