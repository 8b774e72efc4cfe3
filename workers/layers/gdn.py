"""The gated delta net of a decoder layer: linear attention in the place of attention. Knows no model and no checkpoint.

T tokens, D hidden, C channels of q, k and v, O output width, V value heads, v values of a head of V, w convolution
width, J = C + O + 2V.
"""

from collections.abc import Sequence
from copy import copy
from typing import Self

import torch
from torch.nn import functional as F

from kernels.backends.select import Backends
from kernels.block_fp8 import BLOCK, Fp8Rows
from kernels.fused import FusedKernels
from kernels.lora.rows import AdapterRows
from workers.layers.builder import LayerBuilder
from workers.layers.linear import DenseLinear, Linear
from workers.specs.model import GdnSpec


class GdnBlock:
    """residual + out(norm(gdn(q, k, v, b, a)) * silu(gate)), with q, k, v, gate, b, a of norm(residual).

    A block takes and returns a sum in two parts, as `AttentionBlock` does. `layer` counts the layers of this kind.
    One product computes all six, unless q, k, v and gate are in FP8: b and a never are.
    """

    def __init__(self, builder: LayerBuilder, spec: GdnSpec, layer: int):
        self.spec = spec
        self.layer = layer
        self._bind(builder.backends)
        sizes, dim = spec.kernel_spec, builder.hidden_size
        heads = sizes.num_value_heads
        self._parts = [sizes.channels, sizes.value_size, heads, heads]
        qkvz = sizes.channels + sizes.value_size
        self.input_norm = builder.norm(dim)
        self.inputs: Linear | None = None
        self.qkvz: Linear
        if builder.holds_fp8("attention.qkvz"):
            self.qkvz = builder.linear("attention.qkvz", qkvz, dim)
            self.ba = builder.dense(2 * heads, dim)
        else:
            in_JD = builder.empty(spec.input_size, dim)
            self.inputs = DenseLinear(in_JD)
            self.qkvz, self.ba = map(DenseLinear, torch.split(in_JD, [qkvz, 2 * heads]))
        self.conv_C1w = builder.empty(sizes.channels, 1, sizes.conv_width)
        self.dt_bias_V = builder.empty(heads, dtype=torch.float32)
        self.neg_exp_a_V = builder.empty(heads, dtype=torch.float32)
        self.norm = builder.norm(sizes.value_dim, centred=False)
        self.out = builder.linear("attention.out", dim, sizes.value_size)

    def _bind(self, backends: Backends) -> None:
        assert backends.linear_attention is not None, "the model has linear attention"
        self.linear_attention = backends.linear_attention

    def with_backends(self, backends: Backends) -> Self:
        """Return a view of the same weights that calls other linear attention."""
        view = copy(self)
        view._bind(backends)
        return view

    def forward(
        self,
        residual_TD: torch.Tensor,
        hidden_TD: torch.Tensor | None,
        rotation_T1r: torch.Tensor,
        adapters: AdapterRows | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """residual_TD is overwritten; no value is rotated."""
        residual_TD, inputs = self._inputs(residual_TD, hidden_TD, adapters)
        mixed_TC, gate_TO, b_TV, a_TV = inputs
        o_TVv = self.linear_attention(
            mixed_TC,
            a_TV,
            b_TV,
            self.layer,
            self.conv_C1w.squeeze(1),
            self.neg_exp_a_V,
            self.dt_bias_V,
        )
        triton = self.input_norm.triton
        if triton is not None:
            o_TO = self._gated_norm(triton, o_TVv, gate_TO.view(o_TVv.shape), adapters)
            return residual_TD, self.out(o_TO, partial=True, adapters=adapters)
        normed_TO = self.norm(o_TVv.flatten(0, 1)).view(gate_TO.shape)
        gated_TO = normed_TO.mul_(F.silu(gate_TO))
        return self.out(gated_TO, residual_TD, adapters=adapters), None

    def _inputs(
        self,
        residual_TD: torch.Tensor,
        hidden_TD: torch.Tensor | None,
        adapters: AdapterRows | None,
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Return the sum of both, and of its norm q, k and v as one tensor, gate, b and a."""
        if self.inputs is not None:
            residual_TD, h_TD = self.input_norm.add(residual_TD, hidden_TD)
            in_TJ = self.inputs(h_TD)
            if adapters is not None:
                of_qkvz, of_ba = torch.split(
                    in_TJ, [sum(self._parts[:2]), sum(self._parts[2:])], -1
                )
                for linear, out_T in ((self.qkvz, of_qkvz), (self.ba, of_ba)):
                    if linear.lora is not None:
                        linear.lora.add_to(out_T, h_TD, adapters)
            return residual_TD, torch.split(in_TJ, self._parts, -1)
        residual_TD, rows_TD, h_TD = self.input_norm.add_for_both(
            self.qkvz, residual_TD, hidden_TD, adapters
        )
        qkvz = torch.split(self.qkvz(rows_TD, adapters=adapters), self._parts[:2], -1)
        ba = torch.split(self.ba(h_TD, adapters=adapters), self._parts[2:], -1)
        return residual_TD, (*qkvz, *ba)

    def _gated_norm(
        self,
        triton: FusedKernels,
        o_TVv: torch.Tensor,
        gate_TVv: torch.Tensor,
        adapters: AdapterRows | None,
    ) -> torch.Tensor | Fp8Rows:
        """Return the gated norm of every head in the form that the output projection takes."""
        inputs = o_TVv, gate_TVv, self.norm.weight, self.norm.eps
        if o_TVv.shape[2] == BLOCK and self.out.takes_fp8(o_TVv.flatten(1), adapters):
            return triton.gated_rms_norm_fp8(*inputs)
        return triton.gated_rms_norm(*inputs)
