"""A contiguous copy of the pages of running decodes, kept from step to step so that a step need not gather them.

On a CPU the gather of every sequence's pages, each step and layer, costs more than the attention over them. While the
same sequences decode one token after the other, the copy only needs their new tokens. Knows nothing of layers' shapes
beyond the row that one token takes.

B sequences, L keys, W width of a token's row (KV heads times head dim).
"""

import numpy as np
import torch

MAX_BYTES = 64 * 2**20  # of all layers together; larger batches gather every step
SPARE_BLOCKS = 8  # room to grow before the window must be made anew


class DecodeWindow:
    """Follows batches by their block tables. `plan` once a forward, then `keys_and_values` once a layer."""

    def __init__(self, num_layers: int, block_size: int):
        self._num_layers = num_layers
        self._block_size = block_size
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._table = torch.empty(0, 0, dtype=torch.int64)
        self._lens = np.empty(0, dtype=np.int32)
        self._capacity = 0  # keys of a sequence that the window has room for
        self._continues = False
        self._blocks = torch.empty(0, dtype=torch.int64)

    def forget(self) -> None:
        """Pages are written that the window does not follow: it starts anew when it is next used."""
        self._lens = np.empty(0, dtype=np.int32)

    def plan(self, table_BM: torch.Tensor, seq_lens_B: np.ndarray, token_bytes: int) -> bool:
        """Follow a batch of nothing but decodes; False when its copy would take too much memory.

        table_BM int64, M blocks in use by the longest; token_bytes of K and V of one token in one layer. Every batch
        since the last `plan` that wrote to pages must have come through here, or `forget` must have been called.
        """
        width = table_BM.shape[1] * self._block_size
        self._continues = (
            np.array_equal(seq_lens_B, self._lens + 1)
            and width <= self._capacity
            and torch.equal(table_BM[:, : self._table.shape[1]], self._table)
        )
        if not self._continues:
            capacity = width + SPARE_BLOCKS * self._block_size
            if len(seq_lens_B) * capacity * token_bytes * self._num_layers > MAX_BYTES:
                self.forget()
                return False
            self._capacity, self._layers = capacity, []
            self._blocks = table_BM.reshape(-1)
        # The batch's buffer is overwritten by the next one.
        self._table = table_BM.clone()
        self._lens = seq_lens_B.copy()
        rows_B = np.arange(len(seq_lens_B)) * self._capacity + seq_lens_B - 1
        self._new_rows = torch.from_numpy(rows_B.astype(np.int64))
        return True

    def keys_and_values(
        self,
        layer: int,
        k_blocks: torch.Tensor,
        v_blocks: torch.Tensor,
        k_BW: torch.Tensor,
        v_BW: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the planned batch, each [B, capacity, W]; keys beyond a sequence's length are undefined.

        k_blocks, v_blocks [num_blocks, block_size * W] hold the new tokens already; k_BW, v_BW are those tokens.
        """
        if self._continues:
            k_BLW, v_BLW = self._layers[layer]
            k_BLW.view(-1, k_BW.shape[1]).index_copy_(0, self._new_rows, k_BW)
            v_BLW.view(-1, v_BW.shape[1]).index_copy_(0, self._new_rows, v_BW)
            return k_BLW, v_BLW
        assert layer == len(self._layers), "layers come in order"
        copies = self._gather(k_blocks, k_BW.shape[1]), self._gather(v_blocks, v_BW.shape[1])
        self._layers.append(copies)
        return copies

    def _gather(self, blocks: torch.Tensor, width: int) -> torch.Tensor:
        num_seqs = len(self._lens)
        # Zeros, since a NaN in an unused key would survive its mask.
        copy_BLW = blocks.new_zeros(num_seqs, self._capacity, width)
        pages = blocks.index_select(0, self._blocks).view(num_seqs, -1, width)
        copy_BLW[:, : pages.shape[1]] = pages
        return copy_BLW
