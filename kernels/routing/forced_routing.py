"""Experts by a fixed law in place of the router's choice, for experiments with a known balance.

    uniform   K different experts, all equally likely
    zipf      K different experts drawn one after the other, the r-th most popular with weight r^-s
    balanced  in turn: the counts of any two experts in a step differ by one at most

`uniform` and `zipf` depend on layer, position and token alone, so a request gets the same experts in any batch and on
any number of ranks. The draws are the Gumbel top-k trick (Kool et al., "Stochastic Beams and Where to Find Them",
2019). `balanced` depends on the row of the batch. The order of the experts differs between layers.

T rows (padding included), E experts, K experts per token.
"""

import functools
from typing import Literal

import torch

from kernels.routing.expert_slots import to_slots
from kernels.slot_table import SlotTable

Law = Literal["uniform", "zipf", "balanced"]

NOISE_BITS = 16
_MASK = 2**32 - 1


class ForcedRouting:
    """The law of one layer on one rank, called in place of the router. Never waits for the device."""

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
        self._in_turn = law == "balanced"
        popular_E = torch.randperm(num_experts, generator=torch.Generator().manual_seed(layer))
        if self._in_turn:
            # Each rank begins at another expert, so that short steps of all ranks together are even too.
            self._table_E = popular_E.roll(-(rank * num_experts // num_ranks)).to(device)
        else:
            exponent = exponent if law == "zipf" else 0.0
            log_weight_E = torch.empty(num_experts, dtype=torch.float64)
            log_weight_E[popular_E] = -exponent * torch.arange(1, num_experts + 1).double().log()
            self._table_E = log_weight_E.float().to(device)

    def __call__(
        self,
        input_ids_T: torch.Tensor,
        positions_T: torch.Tensor,
        num_tokens: int | torch.Tensor,
        table: SlotTable | None = None,
        *,
        spread: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return topk_idx int64 [T, K], different within a row, and topk_weights float32 [T, K], all 1 / K.

        num_tokens   rows from it on get ids of -1; an int, or an integer tensor [1] on the device
        table, spread   return slots in the place of experts, see kernels.routing.expert_slots; None: experts
        """
        if positions_T.is_cuda:
            from kernels.triton.forced_route import forced_route

            return forced_route(
                input_ids_T,
                positions_T,
                self._table_E,
                noise_table(positions_T.device),
                in_turn=self._in_turn,
                layer=self._layer,
                top_k=self._top_k,
                num_tokens=num_tokens,
                table=table,
                spread=spread,
            )
        ids_TK = self._draw(input_ids_T, positions_T)
        padding = torch.arange(len(ids_TK)) >= num_tokens
        ids_TK.masked_fill_(padding.unsqueeze(1), -1)
        return to_slots(ids_TK, table, spread), torch.full(ids_TK.shape, 1.0 / self._top_k)

    def _draw(self, input_ids_T: torch.Tensor, positions_T: torch.Tensor) -> torch.Tensor:
        """Return int64 [T, K] on CPU, equal to the result of `kernels/triton/forced_route.py`."""
        if self._in_turn:
            turn_TK = torch.arange(len(positions_T) * self._top_k).view(-1, self._top_k)
            return self._table_E[turn_TK % len(self._table_E)]
        key_T = mix(mix(positions_T + self._layer * 0x9E3779B1) + input_ids_T * 0x85EBCA77)
        expert_E = torch.arange(1, len(self._table_E) + 1)
        bits_TE = mix(key_T.unsqueeze(1) + expert_E * 0xC2B2AE3D) >> (32 - NOISE_BITS)
        score_TE = noise_table(positions_T.device)[bits_TE] + self._table_E
        best_TE = score_TE.sort(dim=1, descending=True, stable=True).indices
        return best_TE[:, : self._top_k].contiguous()


def mix(x: torch.Tensor) -> torch.Tensor:
    """Return 32 well-mixed bits of the lowest 32 bits of each int64 (MurmurHash3's finaliser)."""
    x = x & _MASK
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK
    return x ^ (x >> 16)


@functools.cache
def noise_table(device: torch.device) -> torch.Tensor:
    """Return Gumbel noise float32 [2^NOISE_BITS] by random bits. A table is equal on every device."""
    uniform = (torch.arange(2**NOISE_BITS, dtype=torch.float64) + 0.5) / 2**NOISE_BITS
    noise: torch.Tensor = uniform.log().neg().log().neg().float().to(device)
    return noise
