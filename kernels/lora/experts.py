"""The products of LoRA adapters beside those of routed experts. Outputs are in expert order, as of grouped GEMMs.

N gathered rows, R permuted rows, K input width, S slots, e local experts, E experts with matrices, P parts, r rank of
the slots.
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional as F

from kernels.lora.product import device_tiles
from kernels.lora.rows import NO_ADAPTER


def tile_columns(rank: int, dtype: torch.dtype) -> int:
    """Return the output columns of a program of the kernel on GPUs; a tile has columns of one part.

    They are the most with which a program of Hopper keeps the tiles of B and of the output in registers, up to ranks of
    256 bytes.
    """
    rank_bytes = max(16, rank) * dtype.itemsize
    if rank_bytes <= 32:
        return 256
    return 128 if rank_bytes <= 256 else 64


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """The adapters of routed rows.

    slots_N     int64 or int32: slot of the adapter of each gathered row, NO_ADAPTER for none
    row_R       int32 or int64: gathered row of each permuted row; undefined for those outside the experts' bounds
    starts_e    int32 or int64: first permuted row of each local expert
    ends_e      as starts_e: end of each local expert's rows
    """

    slots_N: torch.Tensor
    row_R: torch.Tensor
    starts_e: torch.Tensor
    ends_e: torch.Tensor

    @classmethod
    def in_order(cls, slots_R: torch.Tensor, offs_e: torch.Tensor) -> "ExpertRows":
        """Return rows that lie in expert order; expert e has those up to offs_e[e]."""
        row_R = torch.arange(len(slots_R), device=slots_R.device)
        return cls(slots_R, row_R, F.pad(offs_e[:-1], (1, 0)), offs_e)

    @cached_property
    def tiles(self) -> Any:
        """The rows as the kernels of a GPU take them, for all products of the experts."""
        from kernels.triton.expert_lora_tiles import expert_lora_tiles

        return expert_lora_tiles(self.slots_N, self.row_R, self.starts_e, self.ends_e)

    @cached_property
    def segments(self) -> tuple[tuple[int, int, torch.Tensor], ...]:
        """(slot, local expert, int64 permuted rows) of all pairs that occur, for a CPU: a GPU would be waited for."""
        place_R = torch.arange(len(self.row_R))
        expert_R = torch.searchsorted(self.ends_e, place_R, right=True)
        expert_R.clamp_(max=max(0, len(self.ends_e) - 1))
        used_R = (place_R >= self.starts_e[expert_R]) & (place_R < self.ends_e[expert_R])
        used_A = used_R.nonzero()[:, 0]
        slot_A = self.slots_N[self.row_R[used_A]]
        used_A, slot_A = used_A[slot_A != NO_ADAPTER], slot_A[slot_A != NO_ADAPTER]
        pair_A2 = torch.stack((slot_A.long(), expert_R[used_A]), 1)
        pairs, of_pair_A = torch.unique(pair_A2, dim=0, return_inverse=True)
        return tuple(
            (slot, expert, used_A[of_pair_A == index])
            for index, (slot, expert) in enumerate(pairs.tolist())
        )


@dataclass(frozen=True, eq=False)
class ExpertLora:
    """The adapters of one product of experts, in every slot; slot s is at index s - 1.

    a_SEQK     [S, E, P * r, K]
    b_SENr     [S, E, N, r], N outputs
    blocks     as in LoraWeights
    places_e   int32: index of each local expert in the matrices. Its contents change as experts move
    tiles      as in LoraWeights, of `tile_columns` rows
    """

    a_SEQK: torch.Tensor
    b_SENr: torch.Tensor
    blocks: tuple[tuple[int, int, int], ...]
    places_e: torch.Tensor
    tiles: torch.Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        tiles = device_tiles(self.blocks, self.a_SEQK.device, self._tile_columns)
        object.__setattr__(self, "tiles", tiles)

    @property
    def _tile_columns(self) -> int:
        return tile_columns(self.b_SENr.shape[3], self.b_SENr.dtype)

    def add_to(
        self, out_RN: torch.Tensor, x: torch.Tensor, rows: ExpertRows, *, gathered: bool
    ) -> None:
        """Add the adapters' products in place, for the rows that have one.

        x          in the dtype of out; gathered rows [N, K] where `gathered`, else permuted rows [R, K]
        """
        if out_RN.is_cuda:
            self._add_by_kernels(out_RN, x, rows, gathered=gathered)
            return
        rank, places = self.b_SENr.shape[3], self.places_e.tolist()
        for slot, expert, chosen in rows.segments:
            at = slot - 1, places[expert]
            h_tQ = x[rows.row_R[chosen] if gathered else chosen] @ self.a_SEQK[at].t()
            for first, end, part in self.blocks:
                b_Nr = self.b_SENr[at][first:end]
                delta_tN = h_tQ[:, part * rank : (part + 1) * rank] @ b_Nr.t()
                out_RN[:, first:end].index_add_(0, chosen, delta_tN)

    def _add_by_kernels(
        self, out_RN: torch.Tensor, x: torch.Tensor, rows: ExpertRows, *, gathered: bool
    ) -> None:
        from kernels.triton.expert_lora_expand import expert_lora_expand
        from kernels.triton.expert_lora_shrink import expert_lora_shrink

        assert self.tiles is not None
        rank, at = self.b_SENr.shape[3], (rows.tiles, self.places_e)
        h_ZRQ = expert_lora_shrink(x, self.a_SEQK, *at, rank, gathered=gathered)
        columns = self.tiles, self._tile_columns
        expert_lora_expand(out_RN, h_ZRQ, self.b_SENr, *at, *columns)


@dataclass(frozen=True, eq=False)
class ExpertAdapters:
    """The adapters of both products of the experts: `up` of gate and up, `down` of down."""

    up: ExpertLora
    down: ExpertLora
