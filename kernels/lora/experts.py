"""The products of LoRA adapters beside those of routed experts. Rows are in expert order, as grouped GEMMs have them.

R routed rows, K input width, N output width, S slots, e local experts, E experts with matrices, P parts, r rank of the
slots.
"""

from dataclasses import dataclass, field
from functools import cached_property

import torch

from kernels.lora.product import device_tiles
from kernels.lora.rows import NO_ADAPTER


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """The adapters of routed rows.

    slots_R     int64: slot of the adapter of each row, NO_ADAPTER for none and for rows that no expert uses
    expert_R    int64, rising: local expert of each row
    """

    slots_R: torch.Tensor
    expert_R: torch.Tensor

    @classmethod
    def in_order(cls, slots_R: torch.Tensor, offs_e: torch.Tensor) -> "ExpertRows":
        """Return the rows of a CPU; expert e has those up to offs_e[e]."""
        expert_R = torch.searchsorted(offs_e, torch.arange(len(slots_R)), right=True)
        return cls(slots_R.long(), expert_R)

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

    @cached_property
    def segments(self) -> tuple[tuple[int, int, torch.Tensor], ...]:
        """(slot, local expert, int64 rows) of all pairs that occur, for a CPU: a GPU would be waited for."""
        rows_A = self.slots_R.nonzero()[:, 0]
        pair_A2 = torch.stack((self.slots_R[rows_A], self.expert_R[rows_A]), 1)
        pairs, of_pair_A = torch.unique(pair_A2, dim=0, return_inverse=True)
        return tuple(
            (slot, expert, rows_A[of_pair_A == index])
            for index, (slot, expert) in enumerate(pairs.tolist())
        )


@dataclass(frozen=True, eq=False)
class ExpertLora:
    """The adapters of one product of experts, in every slot; slot s is at index s - 1.

    a_SEQK     [S, E, P * r, K]
    b_SENr     [S, E, N, r]
    blocks     as in LoraWeights
    places_e   int32: index of each local expert in the matrices. Its contents change as experts move
    tiles      as in LoraWeights
    """

    a_SEQK: torch.Tensor
    b_SENr: torch.Tensor
    blocks: tuple[tuple[int, int, int], ...]
    places_e: torch.Tensor
    tiles: torch.Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "tiles", device_tiles(self.blocks, self.a_SEQK.device))

    def add_to(self, out_RN: torch.Tensor, x_RK: torch.Tensor, rows: ExpertRows) -> None:
        """Add the adapters' products in place, for the rows that have one."""
        if out_RN.is_cuda:
            self._add_by_kernels(out_RN, x_RK, rows)
            return
        rank, places = self.b_SENr.shape[3], self.places_e.tolist()
        for slot, expert, chosen in rows.segments:
            at = slot - 1, places[expert]
            h_tQ = x_RK[chosen] @ self.a_SEQK[at].t()
            for first, end, part in self.blocks:
                b_Nr = self.b_SENr[at][first:end]
                delta_tN = h_tQ[:, part * rank : (part + 1) * rank] @ b_Nr.t()
                out_RN[:, first:end].index_add_(0, chosen, delta_tN)

    def _add_by_kernels(self, out_RN: torch.Tensor, x_RK: torch.Tensor, rows: ExpertRows) -> None:
        from kernels.triton.lora_expand import lora_expand
        from kernels.triton.lora_shrink import lora_shrink

        rank, experts = self.b_SENr.shape[3], (rows.expert_R, self.places_e)
        h_ZRQ = lora_shrink(x_RK, self.a_SEQK, rows.slots_R, rank, experts)
        assert self.tiles is not None
        lora_expand(out_RN, h_ZRQ, self.b_SENr, rows.slots_R, self.tiles, experts)


@dataclass(frozen=True, eq=False)
class ExpertAdapters:
    """The adapters of both products of the experts: `up` of gate and up, `down` of down."""

    up: ExpertLora
    down: ExpertLora
