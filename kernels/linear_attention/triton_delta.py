"""Gated delta nets by our Triton kernels; forwards can be captured in CUDA graphs.

A decode reads and writes each state once, in one launch. Prompts take four launches: convolution, its tails, the
systems within the chunks, and the recurrence over chunks. Knows nothing of scheduling.

T tokens, C channels, V value heads, k key dim, v value dim, w conv width, B sequences, N chunks, n prompts.
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
    ship,
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
    mixed_graph = True
    distributions = ("triton",)

    def __init__(self, specs: Sequence[LinearAttentionSpec]):
        super().__init__(specs)
        from kernels.triton.delta_conv import convolve_prompts
        from kernels.triton.delta_decode import advance_decodes
        from kernels.triton.delta_scan import scan_chunks
        from kernels.triton.delta_solve import solve_chunks

        self._advance_decodes, self._convolve_prompts = advance_decodes, convolve_prompts
        self._solve_chunks, self._scan_chunks = solve_chunks, scan_chunks
        # The rows that the launches of decodes and of prompts take, and the first row that no launch of decodes writes
        # and that may be padding.
        self._decode_rows = self._prompt_rows = slice(0, 0)
        self._padding = 0

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
        slots, cut = signed_slots(batch, batch.block_table.device), batch.num_decodes
        self._decode_rows, self._prompt_rows = slice(0, cut), slice(cut, batch.num_tokens)
        self._padding = batch.num_tokens
        self._decode_slots, self._prompt_slots = slots[:cut], slots[cut:]
        if batch.num_seqs > cut:
            starts = batch.query_start_loc_cpu[cut:]
            packed, chunks = pack_chunks(starts - starts[0])
            self._set_chunks(ship(packed, slots.device), chunks, batch.num_seqs - cut)

    def _set_chunks(self, packed: torch.Tensor, num_chunks: int, num_prompts: int) -> None:
        parts = packed.split_with_sizes((2 * num_chunks, 3 * num_prompts))
        self._chunks, self._prompts = parts[0].view(2, -1), parts[1].view(3, -1)

    def reserve_graphs(self, max_rows: int, max_seqs: int) -> None:
        device = self.states[0].state.device
        self._max_seqs = max_seqs
        prompts, chunks = self._most(max_rows)
        self._graph_slots = torch.zeros(max_rows + prompts, dtype=torch.int64, device=device)
        room = 2 * chunks + 3 * prompts
        self._graph_chunks = torch.zeros(room, dtype=torch.int32, device=device)

    def _most(self, num_rows: int) -> tuple[int, int]:
        """Return the most prompts of a graph of `num_rows` rows, and their most chunks."""
        prompts = min(num_rows, self._max_seqs)
        return prompts, prompts + (num_rows - prompts) // MAX_CHUNK

    def plan_graph(self, batch: AttentionBatch, num_rows: int, *, prompts: bool) -> None:
        cut = batch.num_decodes
        decodes = min(num_rows, self._max_seqs) if prompts else num_rows
        assert cut <= decodes and (prompts or cut == batch.num_seqs), (cut, batch.num_seqs)
        slots = self._graph_slots[:num_rows]
        real = signed_slots(batch, slots.device)
        slots[:cut], slots[cut:] = real[:cut], 0
        self._decode_rows, self._decode_slots = slice(0, decodes), slots[:decodes]
        # The launch of decodes writes zeros where it has no decode, and prompts come after it.
        self._prompt_rows, self._padding = slice(0, 0), decodes
        if prompts:
            self._plan_graph_prompts(batch, num_rows, real[cut:])

    def _plan_graph_prompts(
        self, batch: AttentionBatch, num_rows: int, slots: torch.Tensor
    ) -> None:
        """Rows of prompts are those of the whole forward, because a graph cannot begin at another row."""
        num_prompts, num_chunks = self._most(num_rows)
        packed, _ = pack_chunks(
            batch.query_start_loc_cpu[batch.num_decodes :], num_chunks, num_prompts
        )
        target = self._graph_chunks[: len(packed)]
        target.copy_(ship(packed, target.device))
        self._set_chunks(target, num_chunks, num_prompts)
        self._prompt_slots = self._graph_slots[num_rows : num_rows + num_prompts]
        self._prompt_slots[: len(slots)], self._prompt_slots[len(slots) :] = slots, 0
        self._prompt_rows = slice(0, num_rows)

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
        if self._padding < len(out_TVv):
            out_TVv[self._padding :] = 0
        wait_previous_ubatch()
        rows = self._decode_rows
        if rows.stop:
            self._advance_decodes(
                *(mixed_TC[rows], a_TV[rows], b_TV[rows], conv_weight_Cw, neg_exp_a_V, dt_bias_V),
                *(self._decode_slots, pool.conv, pool.state, out_TVv[rows]),
                num_key_heads=spec.num_key_heads,
                eps=NORM_EPS,
            )
        rows = self._prompt_rows
        if rows.stop > rows.start:
            slots = self._prompt_slots
            q, k, v = self._convolve_prompts(
                *(mixed_TC[rows], conv_weight_Cw, self._chunks, self._prompts[:2]),
                *(slots, pool.conv),
                heads=(spec.num_key_heads, spec.num_value_heads, spec.key_dim, spec.value_dim),
                eps=NORM_EPS,
            )
            solved = self._solve_chunks(
                *(q, k, v, a_TV[rows], b_TV[rows], neg_exp_a_V, dt_bias_V),
                *(self._chunks, self._prompts[:2]),
            )
            self._scan_chunks(q, k, solved, self._prompts, slots, pool.state, out_TVv[rows])
        return out_TVv


def pack_chunks(
    starts: np.ndarray, num_chunks: int | None = None, num_prompts: int | None = None
) -> tuple[np.ndarray, int]:
    """Cut prompts into chunks of MAX_CHUNK tokens; return int32 [2N + 3n] and N.

    The array has the prompt and the first row of each chunk, then of each prompt its first row, the row behind its last
    and its first chunk. Chunks and prompts up to the given numbers have no rows.

    starts   first row of each prompt, and the row behind the last prompt
    """
    count = len(starts) - 1
    chunks = -(-np.diff(starts) // MAX_CHUNK)
    first_chunk = np.cumsum(chunks) - chunks
    prompt = np.repeat(np.arange(count), chunks)
    used = len(prompt)
    num_chunks, num_prompts = num_chunks or used, num_prompts or count
    assert used <= num_chunks and count <= num_prompts, (used, count)
    packed = np.zeros(2 * num_chunks + 3 * num_prompts, dtype=np.int32)
    of_chunks = packed[: 2 * num_chunks].reshape(2, -1)
    of_prompts = packed[2 * num_chunks :].reshape(3, -1)
    of_chunks[:, :used] = (
        prompt,
        starts[prompt] + (np.arange(used) - first_chunk[prompt]) * MAX_CHUNK,
    )
    of_chunks[0, used:], of_chunks[1, used:] = num_prompts - 1, starts[-1]
    of_prompts[:, :count] = starts[:-1], starts[1:], first_chunk
    return packed, num_chunks


def _token_bytes(spec: LinearAttentionSpec, itemsize: int) -> int:
    """Bytes of a prompt's token: q, k and v, u, w and output, a row of scores and the decay of each value head."""
    head = spec.key_dim + 2 * spec.value_dim + MAX_CHUNK
    return (spec.channels + spec.num_value_heads * head) * itemsize + 4 * spec.num_value_heads
