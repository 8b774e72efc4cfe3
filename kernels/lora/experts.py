"""The products of LoRA adapters beside those of routed experts. Rows are in expert order, as grouped GEMMs have them.

R routed rows, K input width, N output width, S slots, e local experts, P parts, r rank of the slots.
"""

from dataclasses import dataclass

import torch

from kernels.lora.product import tiles_of
from kernels.lora.rows import NO_ADAPTER


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """The adapters of routed rows.

    slots_R     int64: slot of the adapter of each row, NO_ADAPTER for none and for rows that no expert uses
    expert_R    int64: local expert of each row
    segments    on a CPU: (slot, local expert, int64 rows) of all pairs that occur
    """

    slots_R: torch.Tensor
    expert_R: torch.Tensor
    segments: tuple[tuple[int, int, torch.Tensor], ...] = ()

    @classmethod
    def in_order(cls, slots_R: torch.Tensor, offs_e: torch.Tensor) -> "ExpertRows":
        """Return the rows of a CPU; expert e has those up to offs_e[e]."""
        expert_R = torch.searchsorted(offs_e, torch.arange(len(slots_R)), right=True)
        segments = []
        rows_A = slots_R.nonzero()[:, 0]
        if len(rows_A):
            pair_A = slots_R[rows_A].long() * len(offs_e) + expert_R[rows_A]
            pairs, of_pair_A = torch.unique(pair_A, return_inverse=True)
            for index, pair in enumerate(pairs.tolist()):
                slot, expert = divmod(pair, len(offs_e))
                segments.append((slot, expert, rows_A[of_pair_A == index]))
        return cls(slots_R, expert_R, tuple(segments))

    @classmethod
    def on_device(
        cls,
        slots_N: torch.Tensor,
        row_R: torch.Tensor,
        starts_e: torch.Tensor,
        ends_e: torch.Tensor,
    ) -> "ExpertRows":
        """Return the permuted rows of a GPU, of which those outside the experts' bounds are unused.

        slots_N   slot of each gathered row; row_R int32: gathered row of each permuted row, undefined for unused ones
        """
        place_R = torch.arange(len(row_R), dtype=ends_e.dtype, device=row_R.device)
        expert_R = torch.searchsorted(ends_e, place_R, right=True).clamp_(max=len(ends_e) - 1)
        used_R = (place_R >= starts_e[expert_R]) & (place_R < ends_e[expert_R])
        slots_R = slots_N[torch.where(used_R, row_R, 0).long()].long()
        return cls(torch.where(used_R, slots_R, NO_ADAPTER), expert_R)


@dataclass(frozen=True, eq=False)
class ExpertLora:
    """The adapters of one product of all local experts, in every slot; slot s is at index s - 1.

    a_SeQK   [S, e, P * r, K]
    b_SeNr   [S, e, N, r]
    blocks   as in LoraWeights
    """

    a_SeQK: torch.Tensor
    b_SeNr: torch.Tensor
    blocks: tuple[tuple[int, int, int], ...]
    tiles: torch.Tensor | None = None

    @classmethod
    def of(
        cls, a_SeQK: torch.Tensor, b_SeNr: torch.Tensor, blocks: tuple[tuple[int, int, int], ...]
    ) -> "ExpertLora":
        """Return the adapters, with the tiles that kernels on a GPU read."""
        if not a_SeQK.is_cuda:
            return cls(a_SeQK, b_SeNr, blocks)
        tiles = torch.tensor(tiles_of(blocks), dtype=torch.int32, device=a_SeQK.device)
        return cls(a_SeQK, b_SeNr, blocks, tiles)

    def add_to(self, out_RN: torch.Tensor, x_RK: torch.Tensor, rows: ExpertRows) -> None:
        """Add the adapters' products in place, for the rows that have one."""
        if out_RN.is_cuda:
            self._add_by_kernels(out_RN, x_RK, rows)
            return
        rank = self.b_SeNr.shape[3]
        for slot, expert, chosen in rows.segments:
            h_tQ = x_RK[chosen] @ self.a_SeQK[slot - 1, expert].t()
            for first, end, part in self.blocks:
                b_Nr = self.b_SeNr[slot - 1, expert, first:end]
                delta_tN = h_tQ[:, part * rank : (part + 1) * rank] @ b_Nr.t()
                out_RN[:, first:end].index_add_(0, chosen, delta_tN)

    def _add_by_kernels(self, out_RN: torch.Tensor, x_RK: torch.Tensor, rows: ExpertRows) -> None:
        from kernels.triton.lora_expand import lora_expand
        from kernels.triton.lora_shrink import lora_shrink

        rank, experts = self.b_SeNr.shape[3], rows.expert_R
        h_ZRQ = lora_shrink(x_RK, self.a_SeQK, rows.slots_R, rank, experts)
        assert self.tiles is not None
        lora_expand(out_RN, h_ZRQ, self.b_SeNr, rows.slots_R, self.tiles, experts)


@dataclass(frozen=True, eq=False)
class ExpertAdapters:
    """The adapters of both products of the experts: `up` of gate and up, `down` of down."""

    up: ExpertLora
    down: ExpertLora
