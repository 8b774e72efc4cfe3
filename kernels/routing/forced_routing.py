"""Experts by a fixed law in place of the model's choice, for experiments: how even or uneven is then known beforehand.

    uniform   any k different experts, all alike
    zipf      k different experts drawn one after the other, the r-th most popular with weight r^-s
    balanced  in turn: the experts' counts of a step differ by one at most

The first two depend on layer, position and token alone, so a request meets the same experts in any batch and on any
number of ranks; the draws are the Gumbel top-k trick (Kool et al., "Stochastic Beams and Where to Find Them", 2019).
`balanced` goes by the row of a batch. Which experts are popular, or follow each other, differs between layers.

T rows (padding included), E experts, K experts per token.
"""

import functools
from typing import Literal

import torch

Law = Literal["uniform", "zipf", "balanced"]

NOISE_BITS = 16
_MASK = 2**32 - 1


class ForcedRouting:
    """One layer's law on one rank; called in place of the router's choice, never waits for the device."""

    def __init__(
        self,
        law: Law,
        exponent: float,
        *,
        num_experts: int,
        top_k: int,
        rank: int,
        num_ranks: int,
        device: torch.device | str,
        layer: int,
    ):
        device = torch.device(device)
        self._top_k, self._layer = top_k, layer
        self._turns_E = self._log_weight_E = None
        popular_E = torch.randperm(num_experts, generator=torch.Generator().manual_seed(layer))
        if law == "balanced":
            # Ranks begin apart, so that short steps of all of them together are even too.
            self._turns_E = popular_E.roll(-(rank * num_experts // num_ranks)).to(device)
        else:
            exponent = exponent if law == "zipf" else 0.0
            log_weight_E = torch.empty(num_experts, dtype=torch.float64)
            log_weight_E[popular_E] = -exponent * torch.arange(1, num_experts + 1).double().log()
            self._log_weight_E = log_weight_E.float().to(device)

    def __call__(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        num_tokens: int | torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """topk_idx int64 [T, K], all different in a row, and topk_weights float32 [T, K], all 1 / K.

        Rows from `num_tokens` on get ids of -1; it may be an integer tensor [1] on the device.
        """
        if positions_T.is_cuda:
            from kernels.triton.forced_route import forced_route

            return forced_route(
                input_ids_T,
                positions_T,
                self._log_weight_E,
                self._turns_E,
                noise_table(positions_T.device),
                layer=self._layer,
                top_k=self._top_k,
                num_tokens=num_tokens,
            )
        ids_TK = self._draw(input_ids_T, positions_T)
        padding = torch.arange(len(ids_TK)) >= num_tokens
        ids_TK.masked_fill_(padding.unsqueeze(1), -1)
        return ids_TK, torch.full(ids_TK.shape, 1.0 / self._top_k)

    def _draw(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """int64 [T, K] on CPU; `kernels/triton/forced_route.py` gives exactly the same."""
        if self._turns_E is not None:
            turn_TK = torch.arange(len(positions_T) * self._top_k).view(-1, self._top_k)
            return self._turns_E[turn_TK % len(self._turns_E)]
        key_T = mix(mix(positions_T + self._layer * 0x9E3779B1) + input_ids_T * 0x85EBCA77)
        expert_E = torch.arange(1, len(self._log_weight_E) + 1)
        bits_TE = mix(key_T.unsqueeze(1) + expert_E * 0xC2B2AE3D) >> (32 - NOISE_BITS)
        score_TE = noise_table(positions_T.device)[bits_TE] + self._log_weight_E
        best_TE = score_TE.sort(dim=1, descending=True, stable=True).indices
        return best_TE[:, : self._top_k].contiguous()


def mix(x: torch.Tensor) -> torch.Tensor:
    """32 well-mixed bits of the lowest 32 of each int64 (MurmurHash3's finaliser)."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


@functools.cache
def noise_table(device: torch.device) -> torch.Tensor:
    """Gumbel noise float32 [2^NOISE_BITS] by random bits: a table gives the same on every device."""
    uniform = (torch.arange(2**NOISE_BITS, dtype=torch.float64) + 0.5) / 2**NOISE_BITS
    return uniform.log().neg().log().neg().float().to(device)
