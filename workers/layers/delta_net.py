"""The gated delta net of a decoder layer: linear attention in the place of attention. Knows no model and no checkpoint.

T tokens, D hidden, C channels of q, k and v, O output width, V value heads, v values of a head of V, w convolution
width, P = C + O + 2V.
"""

from copy import copy
from typing import Self

import torch
from torch.nn import functional as F

from kernels.backends.select import Backends
from workers.layers.builder import LayerBuilder
from workers.layers.linear import linear
from workers.models.specs import DeltaNetSpec


class DeltaNetBlock:
    """residual + out(norm(delta_net(q, k, v, b, a)) * silu(gate)), with q, k, v, gate, b, a of norm(residual).

    A block takes and returns a sum in two parts, as `AttentionBlock` does. `layer` counts the layers of this kind.
    """

    def __init__(self, builder: LayerBuilder, spec: DeltaNetSpec, layer: int):
        self.spec = spec
        self.layer = layer
        self._bind(builder.backends)
        sizes, dim = spec.kernel_spec, builder.hidden_size
        heads = sizes.num_value_heads
        self._parts = [sizes.channels, sizes.value_size, heads, heads]
        self.input_norm = builder.norm(dim)
        self.in_PD = builder.empty(spec.input_size, dim)
        self.conv_C1w = builder.empty(sizes.channels, 1, sizes.conv_width)
        self.dt_bias_V = builder.empty(heads, dtype=torch.float32)
        self.neg_exp_a_V = builder.empty(heads, dtype=torch.float32)
        self.norm = builder.norm(sizes.value_dim, centred=False)
        self.out_DO = builder.empty(dim, sizes.value_size)

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
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """residual_TD is overwritten; no value is rotated."""
        residual_TD, h_TD = self.input_norm.add(residual_TD, hidden_TD)
        mixed_TC, gate_TO, b_TV, a_TV = torch.split(linear(h_TD, self.in_PD), self._parts, -1)
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
            gate_TVv = gate_TO.view(o_TVv.shape)
            o_TVv = triton.gated_rms_norm(o_TVv, gate_TVv, self.norm.weight, self.norm.eps)
            return residual_TD, linear(o_TVv.flatten(1), self.out_DO)
        o_TO = self.norm(o_TVv.flatten(0, 1)).view(gate_TO.shape)
        return linear(o_TO.mul_(F.silu(gate_TO)), self.out_DO, residual_TD), None
