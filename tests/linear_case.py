"""Batches for linear attention, with outputs and states of the recurrence over single tokens in float64.

T tokens, C channels, V value heads, k key dim, v value dim, w conv width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.attention.batch import AttentionBatch
from kernels.interface.linear_attention_spec import LinearAttentionSpec
from kernels.linear_attention.base import LinearAttention, LinearStates
from tests.closeness import calc_diff

Seqs = Sequence[tuple[int, int]]  # (context, new tokens) of each sequence; decodes first

SPECS = {
    "equal_heads": LinearAttentionSpec(2, 2, 16, 16, 4),
    "two_value_heads": LinearAttentionSpec(2, 4, 16, 32, 4),
    "four_value_heads": LinearAttentionSpec(1, 4, 32, 16, 3),
    "conv_of_two": LinearAttentionSpec(2, 4, 16, 16, 2),
    "no_conv": LinearAttentionSpec(1, 2, 16, 16, 1),
    "bfloat16_states": LinearAttentionSpec(2, 4, 16, 32, 4, "bfloat16"),
}
BATCHES: dict[str, Seqs] = {
    "nothing": [],
    "decodes": [(7, 1), (1, 1), (130, 1)],
    "first_tokens": [(0, 1), (5, 1)],
    "new_prompt": [(0, 13)],
    "short_prompts": [(0, 1), (0, 2), (0, 3), (9, 2)],
    "borders": [(0, 64), (0, 63), (0, 65), (64, 64), (1, 128)],
    "mixed": [(3, 1), (0, 1), (70, 1), (0, 150), (17, 70), (2, 2)],
    "one_token_parts": [(4, 2), (6, 3)],
}
# 1 - cosine-like similarity; float32 differs by roundings alone.
BFLOAT16_STATES = 1e-5  # of a state that was read once and written once
BFLOAT16_ROUNDING = 2**-8  # largest relative error of one rounding to bfloat16
TOLERANCES = {torch.float32: 1e-10, torch.float16: 2e-7, torch.bfloat16: 1e-5}


@dataclass
class LayerInputs:
    """Inputs of whole sequences [T, ...], and the weights of the layer."""

    mixed: list[torch.Tensor]
    a: list[torch.Tensor]
    b: list[torch.Tensor]
    conv_weight: torch.Tensor
    neg_exp_a: torch.Tensor
    dt_bias: torch.Tensor

    def weights(self, device: str) -> tuple[torch.Tensor, ...]:
        return tuple(x.to(device) for x in (self.conv_weight, self.neg_exp_a, self.dt_bias))


def recurrence(
    spec: LinearAttentionSpec, inputs: LayerInputs, seq: int, context: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return o [T, V, v] of one sequence, its state [V, k, v] after `context` tokens and its last one, in float64."""
    rows = torch.nn.functional.pad(inputs.mixed[seq].double(), (0, 0, spec.conv_width - 1, 0))
    windows_TCw = rows.unfold(0, spec.conv_width, 1)
    mixed_TC = torch.nn.functional.silu((windows_TCw * inputs.conv_weight.double()).sum(-1))
    mixed_TC = mixed_TC.to(
        inputs.mixed[seq].dtype
    ).double()  # as a convolution of its own returns it
    q, k, v = mixed_TC.split((spec.key_size, spec.key_size, spec.value_size), -1)
    q, k = (x.view(len(x), spec.num_key_heads, spec.key_dim) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(spec.group_size, 1) for x in (q / math.sqrt(spec.key_dim), k))
    v = v.view(len(v), spec.num_value_heads, spec.value_dim)
    dt = inputs.a[seq].double() + inputs.dt_bias.double()
    decay = (inputs.neg_exp_a.double() * torch.nn.functional.softplus(dt)).exp()
    beta = inputs.b[seq].double().sigmoid()
    state = torch.zeros(spec.state_shape(1)[1:], dtype=torch.float64)
    kept, outs = state, []
    for token in range(len(v)):
        state = state * decay[token, :, None, None]
        read = torch.einsum("hkv,hk->hv", state, k[token])
        delta = beta[token, :, None] * (v[token] - read)
        state = state + torch.einsum("hk,hv->hkv", k[token], delta)
        outs.append(torch.einsum("hkv,hk->hv", state, q[token]))
        if token + 1 == context:
            kept = state
    return torch.stack(outs), kept, state


class LinearCase:
    """Layers with random inputs of one batch; the slots of contexts are filled, all other slots are NaN."""

    def __init__(
        self,
        specs: Sequence[LinearAttentionSpec],
        seqs: Seqs,
        *,
        padding: int = 3,
        dtype: torch.dtype = torch.float32,
        seed: int = 1,
        device: str = "cpu",
    ):
        self.specs, self.seqs, self.padding, self.dtype = tuple(specs), seqs, padding, dtype
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)
        self.num_slots = 2 * len(seqs) + 2
        order = torch.randperm(self.num_slots - 1, generator=self.generator) + 1
        self.slots = order[: len(seqs)]
        self.layers = [self._inputs(spec) for spec in specs]
        self.expect()

    def expect(self) -> None:
        """Compute what the inputs lead to, and fill the slots; again after a change of the inputs."""
        self.expected = [
            [recurrence(spec, layer, seq, context) for seq, (context, _) in enumerate(self.seqs)]
            for spec, layer in zip(self.specs, self.layers, strict=True)
        ]
        self.states = [self._states(layer) for layer in range(len(self.specs))]

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def _inputs(self, spec: LinearAttentionSpec) -> LayerInputs:
        lengths = [context + new for context, new in self.seqs]
        heads = spec.num_value_heads
        return LayerInputs(
            [self._random(n, spec.channels).to(self.dtype) for n in lengths],
            [self._random(n, heads).to(self.dtype) for n in lengths],
            [self._random(n, heads).to(self.dtype) for n in lengths],
            self._random(spec.channels, spec.conv_width).to(self.dtype),
            # From heads that forget nothing to heads that forget all but the last tokens.
            -torch.logspace(-3, 0.7, heads),
            self._random(heads),
        )

    def tail(self, layer: int, seq: int, length: int) -> torch.Tensor:
        """The convolution's inputs before token `length`, zeros before the first token."""
        width = self.specs[layer].conv_width - 1
        rows = torch.nn.functional.pad(self.layers[layer].mixed[seq][:length], (0, 0, width, 0))
        return rows[len(rows) - width :]

    def _states(self, layer: int) -> LinearStates:
        (pool,) = LinearAttention.allocate(
            [self.specs[layer]], self.num_slots, self.dtype, torch.device(self.device)
        )
        pool.conv.fill_(math.nan)
        pool.state.fill_(math.nan)
        for seq, ((context, _), slot) in enumerate(zip(self.seqs, self.slots, strict=True)):
            if context:
                pool.conv[slot] = self.tail(layer, seq, context).to(self.device)
                pool.state[slot] = self.expected[layer][seq][1].float().to(self.device)
        return pool

    def batch(self) -> AttentionBatch:
        """The new tokens of all sequences."""
        new = [count for _, count in self.seqs]
        decodes = next((i for i, count in enumerate(new) if count > 1), len(new))
        return AttentionBatch(
            num_tokens=sum(new),
            num_seqs=len(new),
            num_single_rows=decodes,
            query_start_loc_cpu=np.cumsum([0, *new], dtype=np.int32),
            seq_lens_cpu=np.array([sum(seq) for seq in self.seqs], dtype=np.int32),
            block_table=torch.zeros(len(new), 1, dtype=torch.int64, device=self.device),
            slot_mapping=torch.zeros(sum(new), dtype=torch.int64, device=self.device),
            state_slots=self.slots.to(self.device),
        )

    def rows(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows of a forward: mixed, a and b of new tokens, then padding; slices of wider rows."""
        inputs = self.layers[layer]
        parts = []
        heads = self.specs[layer].num_value_heads
        widths = (self.specs[layer].channels, heads, heads)
        for of, width in zip((inputs.mixed, inputs.a, inputs.b), widths, strict=True):
            new = [x[context:] for x, (context, _) in zip(of, self.seqs, strict=True)]
            parts.append(torch.cat([*new, torch.ones(self.padding, width, dtype=self.dtype)]))
        whole = torch.cat(parts, 1).to(self.device)
        mixed, a, b = whole.split([part.shape[1] for part in parts], 1)
        return mixed, a, b

    def run(self, subject: LinearAttention, layer: int) -> torch.Tensor:
        """Call the planned backend for one layer."""
        return subject(*self.rows(layer), layer, *self.layers[layer].weights(self.device))

    def check(self, layer: int, out_TVv: torch.Tensor, tolerance: float | None = None) -> None:
        """Compare outputs and slots with the recurrence; no other slot may have changed."""
        spec, pool, found = self.specs[layer], self.states[layer], out_TVv.cpu()
        tolerance = tolerance or TOLERANCES[self.dtype]
        bfloat16 = spec.state_dtype == "bfloat16"
        num_tokens = sum(new for _, new in self.seqs)
        shape = (num_tokens + self.padding, spec.num_value_heads, spec.value_dim)
        assert pool.state.dtype == getattr(torch, spec.state_dtype)
        assert out_TVv.dtype == self.dtype and tuple(out_TVv.shape) == shape
        assert not found[num_tokens:].any()
        start = 0
        for seq, ((context, new), slot) in enumerate(zip(self.seqs, self.slots, strict=True)):
            outs, kept, state = self.expected[layer][seq]
            # Later tokens only shrink the rounding of a state, and a query has length 1 / sqrt(key_dim).
            rounding = BFLOAT16_ROUNDING * kept.norm() / math.sqrt(spec.key_dim) if bfloat16 else 0
            got, wanted = found[start : start + new].double(), outs[context:]
            bound = math.sqrt(tolerance * (got.square().sum() + wanted.square().sum()))
            assert (got - wanted).norm() <= bound + rounding * math.sqrt(new), seq
            of_states = max(tolerance, BFLOAT16_STATES) if bfloat16 else tolerance
            assert calc_diff(pool.state[slot].cpu(), state) < of_states, seq
            assert torch.equal(pool.conv[slot].cpu(), self.tail(layer, seq, context + new)), seq
            start += new
        others = torch.ones(self.num_slots, dtype=torch.bool)
        others[self.slots] = False
        assert pool.state.cpu()[others].isnan().all() and pool.conv.cpu()[others].isnan().all()


def check(
    backend: type[LinearAttention],
    specs: Sequence[LinearAttentionSpec],
    seqs: Seqs,
    tolerance: float | None = None,
    **arguments: Any,
) -> None:
    """Run one forward of all layers and compare it with the recurrence."""
    case = LinearCase(specs, seqs, **arguments)
    subject = backend(specs)
    subject.bind(case.states)
    subject.plan(case.batch())
    for layer in range(len(specs)):
        case.check(layer, case.run(subject, layer), tolerance)
