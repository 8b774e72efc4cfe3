"""Decodes that share leading blocks, for the plans of flashinfer, by the kernels of `triton`.

flashinfer's decodes take a plan that the host computes for each part of a sequence, and merge parts in each call. Our
kernels read own and shared keys from lists that one copy brings to the device, and merge both in one launch.

R rows, a decode each; H query heads, d head dim.
"""

from collections.abc import Sequence
from typing import Any

import torch

from kernels.attention.base import AttentionBatch, GraphForm
from kernels.attention.triton_paged import TritonPagedAttention
from kernels.interface.attention_spec import AttentionSpec
from kernels.interface.shared_reads import SharedReads

Caches = tuple[torch.Tensor, torch.Tensor]


class SharedRun:
    """The planned decodes, for the layers of one shape; `run` as of flashinfer's wrappers."""

    def __init__(self, kernel: Any, chunks: Any, scale: float):
        self._kernel, self._chunks, self._scale = kernel, chunks, scale

    def run(self, q_RHd: torch.Tensor, caches: Caches, *, out: torch.Tensor) -> None:
        """Write the attention of all rows of the plan to `out`, zeros for rows without a sequence."""
        self._kernel(q_RHd, caches, out, self._chunks, scale=self._scale, sinks_H=None)


class SharedDecodes:
    """Plans of decodes with shared blocks, for one forward at a time. `slots`: of the rows of a graph."""

    def __init__(
        self,
        specs: Sequence[AttentionSpec],
        block_size: int,
        reads: SharedReads,
        kv_caches: Sequence[torch.Tensor],
    ):
        self._attention = TritonPagedAttention(specs, block_size)
        self._attention.shared_reads = reads
        self._attention.bind(kv_caches)
        self.slots = torch.empty(0, dtype=torch.int64)

    def plan(self, batch: AttentionBatch) -> None:
        """Plan the decodes of a batch, outside of graphs."""
        self._attention.plan(batch.ubatch(0, batch.num_single_rows))

    def reserve_graphs(self, max_seqs: int, max_blocks: int) -> None:
        """As GraphAttention.reserve_graphs, for graphs with up to `max_seqs` decodes."""
        self._attention.reserve_graphs(max_seqs, max_seqs, max_blocks)

    def plan_graph(self, batch: AttentionBatch, num_rows: int) -> None:
        """Plan the decodes of a batch for a graph with `num_rows` rows of decodes."""
        decodes = batch.ubatch(0, batch.num_single_rows)
        self._attention.plan_graph(decodes, num_rows, GraphForm.SHARED_DECODES)
        self.slots = self._attention.layers[None].slots

    def of(self, spec: AttentionSpec) -> SharedRun:
        """Return the planned decodes of the layers of this shape."""
        chunks = self._attention.layers[None].chunks
        return SharedRun(self._attention.decode, chunks, spec.scale)
