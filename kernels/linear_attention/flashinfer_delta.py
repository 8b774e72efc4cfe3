"""Gated delta nets with prompts by flashinfer's kernel for Hopper GPUs; decodes as in `triton`.

One launch takes the place of the inverses and of the recurrence over chunks, and holds both in registers and shared
memory. The states pass through copies in its layout. Only decodes can be captured in CUDA graphs, because the kernel
takes no empty sequences. `auto` never takes it: it was not compared with our kernels on a GPU yet.

T tokens, C channels, V value heads, v value dim, w conv width, N prompts, P rows of prompts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.attention.batch import AttentionBatch
from kernels.attention.flashinfer import FlashInferAttention
from kernels.host.hopper import on_hopper
from kernels.host.host_copy import to_device
from kernels.interface.backend import BackendShape
from kernels.interface.linear_attention_spec import LinearAttentionSpec
from kernels.linear_attention.base import NORM_EPS
from kernels.linear_attention.triton_delta import TritonLinearAttention

HEAD_DIM = 128  # of keys and of values


@dataclass(frozen=True)
class _Prompts:
    """Rows of the planned prompts, and int64 [N + 1] where each begins, counted from the first prompt's first row."""

    rows: slice
    starts: torch.Tensor


class FlashInferLinearAttention(TritonLinearAttention):
    """Six launches for prompts: the convolution, gates, states out, flashinfer's, states and tails into their slots."""

    name = "flashinfer"
    auto = None
    mixed_graph = False
    distributions = ("flashinfer-python", "triton")

    def __init__(self, specs: Sequence[LinearAttentionSpec]):
        super().__init__(specs)
        from flashinfer.gdn_prefill import chunk_gated_delta_rule

        from kernels.triton import delta_handover
        from kernels.triton.delta_prepare import convolve_prompts

        self._delta_rule: Any = chunk_gated_delta_rule
        self._convolve, self._handover = convolve_prompts, delta_handover
        self._prompts: _Prompts | None = None

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        if not on_hopper(device):
            return "it needs a Hopper GPU (compute capability 9.0)"
        return super().unavailable(device) or FlashInferAttention.unavailable(device)

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        if reason := super().unsupported_reason(shape):
            return reason
        if shape.dtype not in (torch.float16, torch.bfloat16):
            return f"it computes in float16 or bfloat16, model.dtype is {shape.dtype_name}"
        for spec in shape.linear_specs:
            if not spec.key_dim == spec.value_dim == HEAD_DIM:
                found = f"{spec.key_dim} and {spec.value_dim}"
                return f"it takes keys and values of {HEAD_DIM} values, the model has {found}"
        return None

    @classmethod
    def step_bytes(cls, shape: BackendShape) -> int:
        """As in `triton`, and two copies of the states of the prompts of a step, in float32."""
        seqs = min(shape.max_num_tokens, shape.max_num_seqs or shape.max_num_tokens)
        state = max((it.value_size * it.key_dim for it in shape.linear_specs), default=0)
        return super().step_bytes(shape) + 2 * 4 * seqs * state

    def plan(self, batch: AttentionBatch) -> None:
        super().plan(batch)
        self._prompts, cut = None, batch.num_decodes
        if self._table is not None:
            starts = batch.query_start_loc_cpu[cut:].astype(np.int64)
            rows = slice(int(starts[0]), int(starts[-1]))
            self._prompts = _Prompts(rows, to_device(starts - starts[0], self._table.slots.device))

    def _prefill(
        self,
        mixed_TC: torch.Tensor,
        a_TV: torch.Tensor,
        b_TV: torch.Tensor,
        layer: int,
        weights: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        out_TVv: torch.Tensor,
    ) -> None:
        prompts, table = self._prompts, self._table
        assert prompts is not None and table is not None
        pool, rows, slots = self.states[layer], prompts.rows, table.slots
        conv_weight_Cw, neg_exp_a_V, dt_bias_V = weights
        gates = a_TV, b_TV, neg_exp_a_V, dt_bias_V
        heads = self._heads(layer)
        convolved = self._convolve(
            mixed_TC, conv_weight_Cw, gates, table, pool.conv, heads, NORM_EPS
        )
        alpha_PV, beta_PV = self._handover.token_gates(
            a_TV[rows], b_TV[rows], neg_exp_a_V, dt_bias_V
        )
        states = self._handover.read_states(pool.state, slots)
        self._delta_rule(
            *(convolved.q[rows], convolved.k[rows], convolved.v[rows], alpha_PV, beta_PV),
            scale=1.0,  # q has it already
            initial_state=states,
            output_final_state=True,
            cu_seqlens=prompts.starts,
            output=out_TVv[rows],
            output_state=(final := torch.empty_like(states)),
        )
        self._handover.write_states(pool.state, slots, final)
        self._handover.store_tails(mixed_TC[rows], prompts.starts, slots, pool.conv)
        out_TVv[rows.stop :] = 0
