"""flashinfer's kernels for the layers of one shape, planned for forwards outside of CUDA graphs.

Decodes run on flashinfer's tensor-core decode, which keeps the query heads that share a KV head in one tile. Other
sequences run on its prefill kernels: FlashAttention 3 on Hopper, 2 elsewhere. On Hopper, prompts without computed
tokens read K and V where the projection wrote them, 14 to 30 % faster than out of pages. They do so in bfloat16 only:
the last tile of a prompt multiplies V of the next prompt by 0, and V in float16 may have overflowed.

T tokens, H query heads, h KV heads, d head dim.
"""

from typing import Any, Protocol

import numpy as np
import torch

from kernels.attention.base import AttentionBatch
from kernels.attention.flashinfer_decodes import (
    ALIGNMENT_BYTES,
    Decodes,
    Pages,
    Shape,
    chunk_pages,
    plan_new_prompts,
)
from kernels.attention.flashinfer_shared import SharedRun

PREFILL_TILE = 128  # rows of query heads times query tokens
# For partial results of sequences that are cut, at least.
WORKSPACE_BYTES = 128 * 2**20

NewRows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q_THd, k_Thd, v_Thd of one layer
Caches = tuple[torch.Tensor, torch.Tensor]  # K and V of one layer, with the new rows


class Planned(Protocol):
    """The attention of one forward, planned for the layers of one shape."""

    def run(self, new: NewRows, caches: Caches) -> torch.Tensor:
        """Return o_THd of one layer."""


def workspace_bytes(shape: Shape, *, hopper: bool) -> int:
    """Return the bytes of the workspace that `EagerPlans` of this shape needs."""
    prefill_bytes = 0 if hopper else shape.num_blocks * shape.chunk_bytes(PREFILL_TILE)
    decode_bytes = shape.num_blocks * shape.chunk_bytes(shape.tile)
    return max(prefill_bytes, decode_bytes, WORKSPACE_BYTES) + ALIGNMENT_BYTES


class EagerPlans:
    """Decode and prefill wrappers of one shape; also the `Planned` of their last plan."""

    def __init__(self, flashinfer: Any, shape: Shape, workspace: torch.Tensor, *, hopper: bool):
        """Build the wrappers over `workspace` of `workspace_bytes`; wrappers of several shapes may share it."""
        self._shape = shape
        self._max_chunks = (len(workspace) - ALIGNMENT_BYTES) // shape.chunk_bytes(shape.tile)
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, use_tensor_cores=True)
        self._decode = Decodes(wrapper, flashinfer.fast_decode_plan)
        self._prefill = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            workspace, backend="fa3" if hopper else "fa2"
        )
        self._new_prompts: Any = None
        if hopper and shape.dtype == torch.bfloat16:
            ragged = flashinfer.BatchPrefillWithRaggedKVCacheWrapper
            self._new_prompts = ragged(workspace, backend="fa3")
        self._num_tokens = self._num_decodes = 0
        self._all_new = False
        self._shared: SharedRun | None = None

    def plan(
        self,
        batch: AttentionBatch,
        pages: Pages,
        *,
        all_new: bool,
        shared: SharedRun | None = None,
    ) -> None:
        """Plan a batch; `pages` hold all its sequences.

        all_new   prompts read K and V from the new rows
        shared    computes the decodes, which share blocks
        """
        self._num_tokens, self._num_decodes = batch.num_tokens, batch.num_single_rows
        self._all_new, self._shared = all_new, shared
        if batch.num_single_rows and shared is None:
            self.plan_decodes(pages, batch.num_single_rows)
        if batch.num_single_rows == batch.num_seqs:
            return
        if all_new:
            self.plan_new_prompts(batch.query_start_loc_cpu[batch.num_single_rows :])
        else:
            self.plan_extends(pages, batch.num_single_rows, batch.query_start_loc_cpu)

    def plan_nothing(self) -> None:
        """Plan a forward without sequences."""
        self._num_tokens = self._num_decodes = 0
        self._shared = None

    def plan_decodes(self, pages: Pages, num_decodes: int) -> None:
        """Plan the first `num_decodes` sequences."""
        num_pages = np.diff(pages.starts_cpu.numpy()[: num_decodes + 1])
        chunk = chunk_pages(num_pages, num_decodes, self._max_chunks, self._shape.num_blocks)
        self._decode.plan(pages, num_decodes, chunk, self._shape)

    def plan_extends(self, pages: Pages, first: int, query_start_loc: np.ndarray) -> None:
        """Plan the sequences from `first` on; each earlier sequence has one token."""
        first_page = int(pages.starts_cpu[first])
        self._prefill.plan(
            torch.from_numpy(query_start_loc[first:] - np.int32(first)),
            pages.starts_cpu[first:] - first_page,
            pages.pages[first_page:],
            pages.last_lens_cpu[first:],
            *self._shape.arguments,
            causal=True,
            **self._shape.types,
        )

    def plan_new_prompts(self, query_start_loc: np.ndarray) -> None:
        """Plan prompts without computed tokens."""
        starts = torch.from_numpy(query_start_loc - query_start_loc[0])
        plan_new_prompts(self._new_prompts, starts, self._shape)

    def run(self, new: NewRows, caches: Caches) -> torch.Tensor:
        q_THd = new[0]
        out_THd = torch.empty(q_THd.shape, dtype=q_THd.dtype, device=q_THd.device)
        split, end = self._num_decodes, self._num_tokens
        if split:
            decodes = self._shared or self._decode.wrapper
            decodes.run(q_THd[:split], caches, out=out_THd[:split])
        prompts = slice(split, end)
        if split < end and self._all_new:
            self._new_prompts.run(*(rows[prompts] for rows in new), out=out_THd[prompts])
        elif split < end:
            self._prefill.run(q_THd[prompts], caches, out=out_THd[prompts])
        if end < len(q_THd):
            out_THd[end:] = 0
        return out_THd
