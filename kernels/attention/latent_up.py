"""The product that makes K and V of latents, head by head, and the LoRA adapters beside it.

Attention over heads expands latents. Attention over latents moves the product to queries and to sums, where B and A of
an adapter change their order: its part of a query is (q B) A, that of a value (o A) B.

T rows, R rows of a forward, L latents, H heads, n unrotated values of a head of k, v values of a head of V, u = n + v,
C values of a latent, S slots of adapters, r their rank, Q = S * r.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional as F

from kernels.lora.product import LoraWeights
from kernels.lora.rows import AdapterRows


class LatentUp:
    """The layer. Its weight is never in FP8, because attention multiplies it head by head.

    weight   [H * u, C]
    lora     the slots of adapters; None: the layer takes none
    """

    lora: LoraWeights | None = None

    def __init__(self, weight_NC: torch.Tensor, num_heads: int):
        self.weight, self._num_heads = weight_NC, num_heads

    def heads(self, adapters: AdapterRows | None = None) -> "LatentHeads":
        """Return what attention multiplies in a forward with these rows; None: no row has an adapter."""
        weight_HuC = self.weight.view(self._num_heads, -1, self.weight.shape[1])
        if adapters is None or self.lora is None:
            return LatentHeads(weight_HuC)
        return LatentHeads(weight_HuC, self.lora, adapters)


@dataclass(frozen=True, eq=False)
class LatentHeads:
    """The product for the rows of one forward.

    weight_HuC   the rows of K come first in each head
    lora         of the rows' adapters; None: no row has one
    """

    weight_HuC: torch.Tensor
    lora: LoraWeights | None = None
    rows: AdapterRows | None = None

    def float(self) -> "LatentHeads":
        """Return the product in float32."""
        if self.lora is None:
            return LatentHeads(self.weight_HuC.float())
        lora = LoraWeights(self.lora.a_SQK.float(), self.lora.b_SNr.float(), self.lora.blocks)
        return LatentHeads(self.weight_HuC.float(), lora, self.rows)

    def absorb(self, q_THd: torch.Tensor, nope_dim: int) -> torch.Tensor:
        """Return queries of latents [H, T, C] of the forward's first rows.

        q_THd   [T, H, d], the first `nope_dim` values of a head are not rotated
        """
        q_HTn = q_THd[..., :nope_dim].transpose(0, 1)
        q_HTC = torch.bmm(q_HTn, self.weight_HuC[:, :nope_dim])
        if self.lora is None:
            return q_HTC
        h_HTQ = torch.bmm(q_HTn, self._b_HuQ[:, :nope_dim])
        h_HTQ.mul_(self._own_RQ[: q_HTn.shape[1]])
        return q_HTC + h_HTQ @ self._a_QC

    def values(self, o_HTC: torch.Tensor, nope_dim: int, out_THv: torch.Tensor) -> None:
        """Write the values of sums of latents [H, T, C] of the forward's first rows to out_THv."""
        out_HTv = out_THv.transpose(0, 1)
        torch.bmm(o_HTC, self.weight_HuC[:, nope_dim:].transpose(1, 2), out=out_HTv)
        if self.lora is not None:
            h_HTQ = (o_HTC @ self._a_QC.t()).mul_(self._own_RQ[: o_HTC.shape[1]])
            out_HTv += torch.bmm(h_HTQ, self._b_HuQ[:, nope_dim:].transpose(1, 2))

    def expand(self, latents_LC: torch.Tensor, slots_L: torch.Tensor | None) -> torch.Tensor:
        """Return K and V of latents, [L, H, u].

        latents_LC   rows may be strided
        slots_L      int64, the adapter of each latent's sequence, see `slots`; None: none
        """
        count, (heads, width, _) = len(latents_LC), self.weight_HuC.shape
        kv_LN = F.linear(latents_LC, self.weight_HuC.flatten(0, 1))
        if self.lora is not None and slots_L is not None:
            self.lora.add_to(kv_LN, latents_LC, AdapterRows.of(slots_L))
        return kv_LN.view(count, heads, width)

    def slots(self, rows: slice) -> torch.Tensor | None:
        """Return the slots of these rows of the forward, int64, for `expand`; None: no row has an adapter."""
        return None if self.lora is None or self.rows is None else self.rows.slots_T[rows]

    @cached_property
    def _own_RQ(self) -> torch.Tensor:
        """1 where a column of all slots, S * r, belongs to the adapter of the forward's row; else 0.

        All slots are multiplied, which a captured graph can do for any adapters; they are thin.
        """
        assert self.lora is not None and self.rows is not None
        slots = torch.arange(1, len(self.lora.b_SNr) + 1, device=self.rows.slots_T.device)
        own_RS = self.rows.slots_T[:, None] == slots
        return own_RS.repeat_interleave(self.lora.rank, 1).to(self.weight_HuC.dtype)

    @cached_property
    def _a_QC(self) -> torch.Tensor:
        """A of all slots, [S * r, C]."""
        assert self.lora is not None
        return self.lora.a_SQK.flatten(0, 1)

    @cached_property
    def _b_HuQ(self) -> torch.Tensor:
        """B of all slots, [H, u, S * r]."""
        assert self.lora is not None
        heads, width, _ = self.weight_HuC.shape
        slots, _, rank = self.lora.b_SNr.shape
        b_SHur = self.lora.b_SNr.view(slots, heads, width, rank)
        return b_SHur.permute(1, 2, 0, 3).flatten(2)
