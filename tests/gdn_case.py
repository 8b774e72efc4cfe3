"""A gated delta net with q, k, v, gate and output in FP8, and the same arithmetic in operators of torch."""

from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional as F

from kernels.block_fp8 import BlockWeights, Fp8Rows, dequantise
from kernels.interface.linear_attention_spec import LinearAttentionSpec
from kernels.interface.registry import backend_class
from kernels.routing.expert_map import ContiguousMap
from workers.layers.builder import LayerBuilder
from workers.layers.gdn import GdnBlock
from workers.specs.model import GdnSpec
from workers.step.forward_batch import ForwardBatch
from workers.weights.slots import BlockSlot, WeightSlot

SIZES = LinearAttentionSpec(
    num_key_heads=2, num_value_heads=4, key_dim=128, value_dim=128, conv_width=4
)
HIDDEN, EPS, SLOTS = 1024, 1e-6, 9


def exact(rows: Fp8Rows) -> torch.Tensor:
    """What rows in FP8 stand for, float32."""
    return rows.values.float() * rows.scales.repeat_interleave(128, 1)


def moved(batch: ForwardBatch, device: str) -> ForwardBatch:
    """The batch with its tensors on the device."""
    tensors = {f.name: getattr(batch, f.name) for f in fields(batch)}
    return replace(
        batch, **{name: t.to(device) for name, t in tensors.items() if isinstance(t, torch.Tensor)}
    )


def linear_attention(name: str, device: str, dtype: torch.dtype) -> Any:
    """Linear attention with zeros for states."""
    found = backend_class("linear_attention", name)([SIZES])
    found.bind(found.allocate([SIZES], SLOTS, dtype, torch.device(device)))
    return found


def gdn(name: str, device: str, dtype: torch.dtype) -> GdnBlock:
    """A block with random weights, which depend on nothing."""
    fp8 = frozenset({"attention.qkvz.weight", "attention.out.weight"})
    builder = LayerBuilder(
        hidden_size=HIDDEN,
        norm_eps=EPS,
        backends=SimpleNamespace(linear_attention=linear_attention(name, device, dtype)),
        expert_map=ContiguousMap(2, 1),
        rank=0,
        device=torch.device(device),
        dtype=dtype,
        fp8=fp8,
    )
    block = GdnBlock(builder, GdnSpec(kernel_spec=SIZES), 0)
    generator = torch.Generator().manual_seed(3)

    def fill(parameter: Any, scale: float = 1.0, mean: float = 0.0) -> None:
        drawn = torch.randn(parameter.shape, generator=generator) * scale + mean
        held = isinstance(parameter, BlockWeights)
        (BlockSlot(parameter) if held else WeightSlot.plain(parameter)).fill(drawn)

    for linear in (block.qkvz, block.ba):
        fill(linear.weight, HIDDEN**-0.5)
    fill(block.out.weight, SIZES.value_size**-0.5)
    fill(block.conv_C1w, 0.5)
    fill(block.dt_bias_V)
    block.neg_exp_a_V.fill_(-0.2)
    for norm in (block.input_norm, block.norm):
        fill(norm.weight, 0.1, 1.0)
    return block


class Reference:
    """The block on a CPU in float32, rows rounded by `quantise` to FP8 where the block rounds them."""

    def __init__(self, block: GdnBlock, quantise: Callable[[torch.Tensor], Fp8Rows]):
        self._quantise = quantise
        weights = block.qkvz.weight, block.out.weight
        self._qkvz_PD, self._out_DO = (dequantise(w.values, w.scales).cpu() for w in weights)
        self._block = block
        self._attention = linear_attention("torch", "cpu", torch.float32)

    def forward(self, x_TD: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Return the output for x on the CPU, without the residual."""
        block, attention = self._block, self._attention
        attention.plan(batch)
        held = block.ba.weight, block.conv_C1w, block.neg_exp_a_V, block.dt_bias_V
        ba_BD, conv, neg_exp_a, dt_bias = (parameter.float().cpu() for parameter in held)
        norms = block.input_norm, block.norm
        input_weight, weight = (norm.weight.float().cpu() / norm.load_scale for norm in norms)
        h_TD = F.rms_norm(x_TD, (HIDDEN,), input_weight, EPS)
        qkvz_TP = exact(self._quantise(h_TD)) @ self._qkvz_PD.t()
        mixed_TC, gate_TO = qkvz_TP.split([SIZES.channels, SIZES.value_size], 1)
        b_TV, a_TV = (h_TD @ ba_BD.t()).chunk(2, 1)
        gates = neg_exp_a, dt_bias
        o_TVv = attention(mixed_TC.contiguous(), a_TV, b_TV, 0, conv.squeeze(1), *gates)
        normed_TO = F.rms_norm(o_TVv, (SIZES.value_dim,), weight, EPS).flatten(1)
        return exact(self._quantise(normed_TO * F.silu(gate_TO))) @ self._out_DO.t()
