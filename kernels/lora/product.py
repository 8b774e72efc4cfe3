"""The segmented product of LoRA adapters: out += B[slot] (A[slot] x), with the slot of each row.

A product of the model may join the outputs of several modules of a checkpoint, as q, k and v. Each module is a part,
with an A of its own, side by side with those of the other parts; a row of B reads the values of its part alone.

T rows, K input width, N output width, S slots, P parts, r rank of the slots.
"""

from dataclasses import dataclass, field

import torch

from kernels.lora.rows import AdapterRows

TILE_COLUMNS = 128
"""Output columns of a program of the kernel on GPUs; a tile has columns of one part."""


@dataclass(frozen=True, eq=False)
class LoraWeights:
    """The adapters of one product, in every slot; slot s is at index s - 1. A slot without an adapter is undefined.

    a_SQK    [S, P * r, K], rows of part p from p * r on; of a rank below r, the rest is zero
    b_SNr    [S, N, r]
    blocks   (first row, end row, part) of B, which cover the rows of all parts in rising order
    tiles    int32 [tiles, 3] on a GPU: the blocks in pieces of at most TILE_COLUMNS rows
    """

    a_SQK: torch.Tensor
    b_SNr: torch.Tensor
    blocks: tuple[tuple[int, int, int], ...]
    tiles: torch.Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        tiles = device_tiles(self.blocks, self.a_SQK.device, TILE_COLUMNS)
        object.__setattr__(self, "tiles", tiles)

    @property
    def rank(self) -> int:
        """r."""
        return self.b_SNr.shape[2]

    def add_to(self, out_TN: torch.Tensor, x_TK: torch.Tensor, rows: AdapterRows) -> torch.Tensor:
        """Add the adapters' products in place, for the rows that have one, and return `out`.

        out_TN   in the model's dtype, rows may be strided
        x_TK     in the model's dtype, rows may be strided
        """
        if not out_TN.is_cuda:
            return self._add_by_torch(out_TN, x_TK, rows)
        from kernels.triton.lora_expand import lora_expand
        from kernels.triton.lora_shrink import lora_shrink

        h_ZTQ = lora_shrink(x_TK, self.a_SQK, rows.slots_T, self.rank)
        assert self.tiles is not None
        lora_expand(out_TN, h_ZTQ, self.b_SNr, rows.slots_T, self.tiles)
        return out_TN

    def _add_by_torch(
        self, out_TN: torch.Tensor, x_TK: torch.Tensor, rows: AdapterRows
    ) -> torch.Tensor:
        """The reference, by torch's operators: two products for each adapter and part."""
        r = self.rank
        for slot, chosen in rows.segments:
            h_tQ = x_TK[chosen] @ self.a_SQK[slot - 1].t()
            for first, end, part in self.blocks:
                columns_TN = out_TN[:, first:end]
                b_Nr = self.b_SNr[slot - 1, first:end]
                delta_tN = h_tQ[:, part * r : (part + 1) * r] @ b_Nr.t()
                if isinstance(chosen, slice):
                    columns_TN[chosen] += delta_tN
                else:
                    columns_TN.index_add_(0, chosen, delta_tN)
        return out_TN


@dataclass(frozen=True, eq=False)
class EmbeddingLora:
    """The adapters of an embedding, in every slot; slot s is at index s - 1.

    table_SVr   [S, V, r]: A, a row for each token
    b_SDr       [S, D, r]
    """

    table_SVr: torch.Tensor
    b_SDr: torch.Tensor
    tiles: torch.Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        blocks = ((0, self.b_SDr.shape[1], 0),)
        object.__setattr__(self, "tiles", device_tiles(blocks, self.b_SDr.device, TILE_COLUMNS))

    def add_to(self, out_TD: torch.Tensor, ids_T: torch.Tensor, rows: AdapterRows) -> None:
        """Add the adapters' embeddings of int64 tokens in place, for the rows that have an adapter."""
        if out_TD.is_cuda:
            from kernels.triton.lora_expand import lora_expand

            slots_T = (rows.slots_T - 1).clamp_(min=0)
            h_Tr = self.table_SVr[slots_T, ids_T].float()
            assert self.tiles is not None
            lora_expand(out_TD, h_Tr.unsqueeze(0), self.b_SDr, rows.slots_T, self.tiles)
            return
        for slot, chosen in rows.segments:
            out_TD[chosen] += self.table_SVr[slot - 1, ids_T[chosen]] @ self.b_SDr[slot - 1].t()


def device_tiles(
    blocks: tuple[tuple[int, int, int], ...], device: torch.device, columns: int
) -> torch.Tensor | None:
    """Return int32 [tiles, 3] of `tiles_of` for the kernels of a GPU; None on a CPU."""
    if device.type == "cpu":
        return None
    return torch.tensor(tiles_of(blocks, columns), dtype=torch.int32, device=device)


def tiles_of(blocks: tuple[tuple[int, int, int], ...], columns: int) -> list[tuple[int, int, int]]:
    """Return the blocks in pieces of at most `columns` rows."""
    return [
        (start, min(start + columns, end), part)
        for first, end, part in blocks
        for start in range(first, end, columns)
    ]
