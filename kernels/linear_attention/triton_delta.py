"""Gated delta nets by our Triton kernels; decodes can be captured in CUDA graphs.

A decode reads and writes each state once, in one launch. Prompts take four launches: convolution, its tails, the
systems within the chunks, and the recurrence over chunks. Knows nothing of scheduling.

T tokens, C channels, V value heads, k key dim, v value dim, w conv width, B sequences.
"""

from collections.abc import Sequence

import numpy as np
import torch

from kernels.attention.batch import AttentionBatch
from kernels.backends.backend import BackendShape
from kernels.host.capability import too_old_gpu
from kernels.host.triton_version import triton_unavailable
from kernels.linear_attention.base import (
    NORM_EPS,
    LinearAttention,
    signed_slots,
)
from kernels.linear_attention.chunks import MAX_CHUNK
from kernels.linear_attention.spec import LinearAttentionSpec
from kernels.pending import wait_previous_ubatch

MAX_CONV_WIDTH = 4
HEAD_DIMS = (16, 32, 64, 128, 256)


class TritonLinearAttention(LinearAttention):
    """States stay float32; the products of prompts take the dtype of the hidden states and add in float32."""

    name = "triton"
    devices = ("cuda",)
    auto = "a decode reads and writes each state once"
    graph = True
    distributions = ("triton",)

    def __init__(self, specs: Sequence[LinearAttentionSpec]):
        super().__init__(specs)
        from kernels.triton.delta_conv import convolve_prompts
        from kernels.triton.delta_decode import advance_decodes
        from kernels.triton.delta_scan import scan_chunks
        from kernels.triton.delta_solve import solve_chunks

        self._advance_decodes, self._convolve_prompts = advance_decodes, convolve_prompts
        self._solve_chunks, self._scan_chunks = solve_chunks, scan_chunks
        self._graph_slots = torch.empty(0, dtype=torch.int64)

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
        tokens = (_token_bytes(spec, shape.dtype.itemsize) for spec in shape.linear_specs)
        return shape.max_num_tokens * max(tokens, default=0)

    def plan(self, batch: AttentionBatch) -> None:
        slots = signed_slots(batch, batch.block_table.device)
        self._num_tokens, self._num_decodes = batch.num_tokens, batch.num_decodes
        self._decode_slots = slots[: batch.num_decodes]
        self._prompt_slots = slots[batch.num_decodes :]
        if batch.num_seqs > batch.num_decodes:
            self._plan_prompts(batch.query_start_loc_cpu[batch.num_decodes :], slots.device)

    def _plan_prompts(self, starts: np.ndarray, device: torch.device) -> None:
        starts = starts - starts[0]
        counts = -(-np.diff(starts) // MAX_CHUNK)
        first_chunk = np.cumsum(counts) - counts
        prompt = np.repeat(np.arange(len(counts)), counts)
        first_row = starts[prompt] + (np.arange(len(prompt)) - first_chunk[prompt]) * MAX_CHUNK
        packed = np.concatenate((prompt, first_row, starts[:-1], starts[1:], first_chunk))
        on_device = torch.from_numpy(packed.astype(np.int32)).to(device)  # one copy
        self._chunks = on_device[: 2 * len(prompt)].view(2, -1)
        self._prompts = on_device[2 * len(prompt) :].view(3, -1)

    def reserve_graphs(self, max_rows: int) -> None:
        device = self.states[0].state.device
        self._graph_slots = torch.zeros(max_rows, dtype=torch.int64, device=device)

    def plan_graph(self, batch: AttentionBatch, num_rows: int) -> None:
        assert batch.num_decodes == batch.num_seqs <= num_rows <= len(self._graph_slots)
        slots = self._graph_slots[:num_rows]
        slots[: batch.num_seqs] = signed_slots(batch, slots.device)
        slots[batch.num_seqs :] = 0
        self._num_tokens = self._num_decodes = num_rows
        self._decode_slots, self._prompt_slots = slots, slots[:0]

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
        spec, pool = self.specs[layer], self.states[layer]
        out_TVv = mixed_TC.new_empty(mixed_TC.shape[0], spec.num_value_heads, spec.value_dim)
        cut, end = self._num_decodes, self._num_tokens
        if end < len(out_TVv):
            out_TVv[end:] = 0
        wait_previous_ubatch()
        if cut:
            self._advance_decodes(
                *(mixed_TC[:cut], a_TV[:cut], b_TV[:cut], conv_weight_Cw, neg_exp_a_V, dt_bias_V),
                *(self._decode_slots, pool.conv, pool.state, out_TVv[:cut]),
                num_key_heads=spec.num_key_heads,
                eps=NORM_EPS,
            )
        if end > cut:
            slots = self._prompt_slots
            q, k, v = self._convolve_prompts(
                *(mixed_TC[cut:end], conv_weight_Cw, self._chunks, self._prompts[:2]),
                *(slots, pool.conv),
                heads=(spec.num_key_heads, spec.num_value_heads, spec.key_dim, spec.value_dim),
                eps=NORM_EPS,
            )
            solved = self._solve_chunks(
                *(q, k, v, a_TV[cut:end], b_TV[cut:end], neg_exp_a_V, dt_bias_V),
                *(self._chunks, self._prompts[:2]),
            )
            self._scan_chunks(q, k, solved, self._prompts, slots, pool.state, out_TVv[cut:end])
        return out_TVv


def _token_bytes(spec: LinearAttentionSpec, itemsize: int) -> int:
    """Bytes of a prompt's token: q, k and v, u, w and output, a row of scores and the decay of each value head."""
    head = spec.key_dim + 2 * spec.value_dim + MAX_CHUNK
    return (spec.channels + spec.num_value_heads * head) * itemsize + 4 * spec.num_value_heads
