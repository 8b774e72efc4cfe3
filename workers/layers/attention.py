"""The attention half of a decoder layer. Knows no model and no checkpoint.

T tokens, D hidden, H query heads, h KV heads, N = H + h, M = H + 2h, d head dim, O = H * d, Q = M * d, or O + M * d
with an output gate.
"""

from copy import copy
from typing import ClassVar, Self

import torch

from kernels.backends.select import Backends
from kernels.block_fp8 import BLOCK, Fp8Rows
from kernels.lora.rows import AdapterRows
from workers.layers.builder import LayerBuilder
from workers.layers.rope import norm_and_rotate
from workers.specs.model import GqaSpec


class AttentionBlock:
    """residual + o_proj(attention(rope(norm(q)), rope(norm(k)), v)), with q, k, v of norm(residual).

    An output gate multiplies the attention by the sigmoid of its own projection.
    A block takes and returns a sum in two parts, (residual, hidden or None): the next block's norm adds them.
    hidden may be in parts itself, as all-to-alls give it (`AllToAll.combine`).

    num_inputs   vectors of the hidden width, side by side, that q, k and v are products of
    """

    num_inputs: ClassVar[int] = 1

    def __init__(self, builder: LayerBuilder, spec: GqaSpec, layer: int):
        self.spec = spec
        self.layer = layer
        self.attention = builder.backends.attention
        self.input_norm = builder.norm(builder.hidden_size)
        self.gate_size = spec.gate_size
        qkv_size = spec.gate_size + spec.q_size + 2 * spec.kv_size
        dim = builder.hidden_size
        inputs = self.num_inputs * dim
        self.qkv = builder.linear("attention.qkv", qkv_size, inputs, bias=spec.qkv_bias)
        self.num_qk_heads = spec.num_heads + spec.num_kv_heads
        self._heads = (self.num_qk_heads + spec.num_kv_heads, spec.head_dim)
        # one norm and rotation for the heads of q and k: half as many operators
        self.qk_norm = (
            builder.norm(self.num_qk_heads, spec.head_dim) if spec.qk_norm == "head" else None
        )
        full = spec.qk_norm == "full"
        self.q_norm = builder.norm(spec.q_size) if full else None
        self.k_norm = builder.norm(spec.kv_size) if full else None
        self.o = builder.linear("attention.o", dim, spec.q_size, bias=spec.output_bias)
        self.sinks_H = builder.empty(spec.num_heads, dtype=torch.float32) if spec.sinks else None

    def with_backends(self, backends: Backends) -> Self:
        """Return a view of the same weights that calls other attention."""
        view = copy(self)
        view.attention = backends.attention
        return view

    def forward(
        self,
        residual_TD: torch.Tensor,
        hidden_TD: torch.Tensor | None,
        rotation_T1d: torch.Tensor,
        adapters: AdapterRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """residual_TD is overwritten."""
        residual_TD, h_TD = self.input_norm.add_for(self.qkv, residual_TD, hidden_TD, adapters)
        qkv_TQ = self.qkv(h_TD, adapters=adapters)
        if self.q_norm is not None or self.spec.clip_qkv is not None:
            self._norm_and_clip(qkv_TQ)
        if self.gate_size:
            gate_TO, qkv_TQ = qkv_TQ[:, : self.gate_size], qkv_TQ[:, self.gate_size :]
            attended_TO = self._attend(qkv_TQ.view(-1, *self._heads), rotation_T1d).flatten(1)
            o_TO = self._gated(attended_TO, gate_TO, adapters)
        else:
            o_TO = self._attend(qkv_TQ.view(-1, *self._heads), rotation_T1d).flatten(1)
        if self.input_norm.triton is not None:
            return residual_TD, self.o(o_TO, partial=True, adapters=adapters)
        return self.o(o_TO, residual_TD, adapters=adapters), None

    def _gated(
        self, o_TO: torch.Tensor, gate_TO: torch.Tensor, adapters: AdapterRows | None
    ) -> torch.Tensor | Fp8Rows:
        """Return o * sigmoid(gate) in the form that the output projection takes."""
        triton = self.input_norm.triton
        if triton is None or o_TO.shape[1] % BLOCK:
            return o_TO * gate_TO.sigmoid()
        if self.o.takes_fp8(o_TO, adapters):
            return triton.output_gate_fp8(o_TO, gate_TO)
        return triton.output_gate(o_TO, gate_TO)

    def _norm_and_clip(self, qkv_TQ: torch.Tensor) -> None:
        """Norm all of q and all of k, then bound all values; in place."""
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.spec.q_size, self.spec.q_size + self.spec.kv_size
            q_TQ, k_TQ = qkv_TQ[:, :q], qkv_TQ[:, q:k]
            self.q_norm.add(q_TQ, None, q_TQ)
            self.k_norm.add(k_TQ, None, k_TQ)
        if self.spec.clip_qkv is not None:
            qkv_TQ.clamp_(-self.spec.clip_qkv, self.spec.clip_qkv)

    def _attend(self, qkv_TMd: torch.Tensor, rotation_T1d: torch.Tensor) -> torch.Tensor:
        norm, layer = self.qk_norm, self.layer
        if self.attention.fused_store:
            if norm is None:
                self.attention.store(qkv_TMd, layer, rotation_T1d)
            else:
                self.attention.store(qkv_TMd, layer, rotation_T1d, norm.weight, norm.eps)
            return self.attention.attend(qkv_TMd, layer, self.sinks_H)
        qk_TNd = norm_and_rotate(norm, qkv_TMd[:, : self.num_qk_heads], rotation_T1d)
        heads = self.spec.num_heads
        return self.attention(
            qk_TNd[:, :heads],
            qk_TNd[:, heads:],
            qkv_TMd[:, self.num_qk_heads :],
            layer,
            self.sinks_H,
        )
