"""Gated delta nets by our Triton kernels; forwards can be captured in CUDA graphs.

A decode reads and writes each state once, in two launches. Prompts take three launches: the convolution, the systems
within the chunks, and the recurrence over chunks. Knows nothing of scheduling.

T tokens, C channels, V value heads, k key dim, v value dim, w conv width, B sequences.
"""

from collections.abc import Sequence

import numpy as np
import torch

from kernels.attention.batch import AttentionBatch
from kernels.host.capability import too_old_gpu
from kernels.host.host_copy import fill, to_device
from kernels.host.triton_version import triton_unavailable
from kernels.interface.backend import BackendShape
from kernels.interface.linear_attention_spec import LinearAttentionSpec
from kernels.linear_attention.base import (
    NORM_EPS,
    LinearAttention,
    signed_slots,
)
from kernels.linear_attention.chunks import MAX_CHUNK
from kernels.linear_attention.prompt_table import fill_table, graph_table, step_table, with_rows
from kernels.pending import wait_previous_ubatch
from kernels.triton.delta_table import DecodeTable, PromptTable

MAX_CONV_WIDTH = 4
HEAD_DIMS = (16, 32, 64, 128, 256)


class TritonLinearAttention(LinearAttention):
    """States are read into float32; the products of prompts take the dtype of the hidden states and add in float32."""

    name = "triton"
    devices = ("cuda",)
    auto: str | None = "a decode reads and writes each state once"
    graph = True
    mixed_graph = True
    distributions: tuple[str, ...] = ("triton",)

    def __init__(self, specs: Sequence[LinearAttentionSpec]):
        super().__init__(specs)
        from kernels.triton.delta_decode import advance_decodes
        from kernels.triton.delta_prepare import prepare_chunks
        from kernels.triton.delta_scan import scan_chunks

        self._advance_decodes = advance_decodes
        self._prepare_chunks, self._scan_chunks = prepare_chunks, scan_chunks
        self._graph_slots, self._graph_starts = torch.empty(2, 0, dtype=torch.int64)
        self._num_graph_slots = 0  # the first ones; all slots behind them are 0
        self._table: PromptTable | None = None

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        return triton_unavailable() or too_old_gpu(device, (8, 0))

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        if reason := super().unsupported_reason(shape):
            return reason
        for spec in shape.linear_specs:
            if spec.conv_width > MAX_CONV_WIDTH:
                return f"it takes convolutions of up to {MAX_CONV_WIDTH} tokens, the model has {spec.conv_width}"
            for dim in (spec.key_dim, spec.value_dim):
                if dim not in HEAD_DIMS:
                    return f"it takes heads of {HEAD_DIMS} values, the model has {dim}"
        return None

    @classmethod
    def step_bytes(cls, shape: BackendShape) -> int:
        return max((_step_bytes(spec, shape) for spec in shape.linear_specs), default=0)

    def plan(self, batch: AttentionBatch) -> None:
        slots, cut = signed_slots(batch, batch.block_table.device), batch.num_decodes
        starts = None
        if batch.num_verify:
            starts = to_device(self._numbers(batch, cut), slots.device)
        num_rows = int(batch.query_start_loc_cpu[cut])
        self._decodes = DecodeTable(slots[:cut], starts, num_rows)
        self._num_tokens, self._table = batch.num_tokens, None
        if batch.num_seqs > cut:
            self._table = step_table(batch.query_start_loc_cpu[cut:], slots[cut:])

    def reserve_graphs(self, max_rows: int, max_seqs: int) -> None:
        device = self.states[0].state.device
        self._max_seqs, self._num_graph_slots = max_seqs, 0
        self._graph_slots = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._graph_starts = torch.zeros(2 + max_rows, dtype=torch.int32, device=device)
        self._graph_table = graph_table(max_rows, max_seqs, device)

    def plan_graph(
        self, batch: AttentionBatch, num_rows: int, *, prompts: bool, drafts: bool = False
    ) -> None:
        cut, device = batch.num_decodes, self._graph_slots.device
        several = bool(self.num_drafts) and (prompts or drafts)
        most = min(num_rows, self._max_seqs) if prompts or drafts else num_rows
        assert cut <= most and (prompts or cut == batch.num_seqs), (cut, batch.num_seqs)
        slots, signed = self._graph_slots[:most], signed_slots(batch, device)
        slots[:cut].copy_(signed[:cut])
        # Also behind this graph's slots: the next graph may have more.
        if cut < self._num_graph_slots:
            self._graph_slots[cut : self._num_graph_slots].zero_()
        self._num_graph_slots = cut
        starts, most_rows = None, most
        if several:
            starts, most_rows = self._graph_starts[: 2 + most], most * (1 + self.num_drafts)
            fill(starts, self._numbers(batch, most))
        # The launch of decodes writes zeros where it has no decode, and prompts come after it.
        zeros_to = 0 if prompts else num_rows
        self._decodes = DecodeTable(slots, starts, min(num_rows, most_rows), zeros_to)
        self._num_tokens, self._table = num_rows, None
        if prompts:
            fill_table(self._graph_table, batch.query_start_loc_cpu[cut:], signed[cut:])
            self._table = with_rows(self._graph_table, num_rows)

    def _numbers(self, batch: AttentionBatch, count: int) -> np.ndarray:
        """Return `DecodeTable.starts` for `count` sequences; those behind the batch's have no rows."""
        starts = self.decode_starts(batch)
        numbers = np.full(2 + count, starts[-1], dtype=np.int32)
        numbers[0], numbers[1 : 1 + len(starts)] = batch.rows_before, starts
        return numbers

    def __call__(
        self,
        mixed_TC: torch.Tensor,
        a_TV: torch.Tensor,
        b_TV: torch.Tensor,
        layer: int,
        conv_weight_Cw: torch.Tensor,
        neg_exp_a_V: torch.Tensor,
        dt_bias_V: torch.Tensor,
    ) -> torch.Tensor:
        spec, pool, table = self.specs[layer], self.states[layer], self._table
        out_TVv = mixed_TC.new_empty(mixed_TC.shape[0], spec.num_value_heads, spec.value_dim)
        weights = conv_weight_Cw, neg_exp_a_V, dt_bias_V
        wait_previous_ubatch()
        self._advance_decodes(
            *(mixed_TC, a_TV, b_TV, *weights, self._decodes),
            (pool.conv, pool.state, pool.drafts, pool.accepted),
            out_TVv,
            num_key_heads=spec.num_key_heads,
            eps=NORM_EPS,
        )
        if table is None:
            out_TVv[self._num_tokens :] = 0
        else:
            self._prefill(mixed_TC, a_TV, b_TV, layer, weights, out_TVv)
        return out_TVv

    def _prefill(
        self,
        mixed_TC: torch.Tensor,
        a_TV: torch.Tensor,
        b_TV: torch.Tensor,
        layer: int,
        weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        out_TVv: torch.Tensor,
    ) -> None:
        """Advance the planned prompts; write their outputs, and zeros behind the real rows."""
        pool, table = self.states[layer], self._table
        assert table is not None
        prepared = self._prepare_chunks(
            *(mixed_TC, a_TV, b_TV, *weights, table, pool.conv),
            heads=self._heads(layer),
            eps=NORM_EPS,
        )
        self._scan_chunks(prepared, mixed_TC, table, pool.conv, pool.state, out_TVv)

    def _heads(self, layer: int) -> tuple[int, int, int, int]:
        """Return key heads, value heads, and the values of each."""
        spec = self.specs[layer]
        return spec.num_key_heads, spec.num_value_heads, spec.key_dim, spec.value_dim


def _step_bytes(spec: LinearAttentionSpec, shape: BackendShape) -> int:
    """Bytes of prompts: q, k, v and output, and two rows of a chunk and four gates of each value head; or of decodes:
    output, and inputs in float32, those of accepted drafts too."""
    itemsize, heads, num_tokens = shape.dtype.itemsize, spec.num_value_heads, shape.max_num_tokens
    prompt = (spec.channels + heads * (spec.value_dim + 2 * MAX_CHUNK)) * itemsize + 16 * heads
    num_seqs = min(num_tokens, shape.max_num_seqs or num_tokens)
    rows = min(num_tokens, num_seqs * (1 + spec.num_drafts)) + num_seqs * spec.num_drafts
    decodes = rows * 4 * spec.row_size + num_tokens * spec.value_size * itemsize
    return max(num_tokens * prompt, decodes)
