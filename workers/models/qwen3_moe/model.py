"""Qwen3-MoE, read from top to bottom. Knows nothing of requests, steps or files.

T tokens (padding included), L logits rows, D hidden, H query heads, h KV heads, N = H + h,
d head dim, E experts, e experts of this rank, I expert or MLP width, V vocabulary.

Weights are plain tensors, not nn.Parameters in nn.Modules: nothing is trained here, and a step of a
small model is bound by Python and operator overhead. Run inside `torch.inference_mode()`.
"""

from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from typing import Protocol

import torch
from torch.nn import functional as F

from kernels.all2all.base import sum_partials
from kernels.backends.select import Backends
from kernels.block_fp8 import BlockWeights
from kernels.routing.forced_routing import ForcedRouting
from kernels.routing.placement import ExpertPlacement
from workers.layers.linear import linear
from workers.layers.norm import RMSNorm
from workers.layers.rope import build_rope_table, norm_and_rotate
from workers.layers.router import route_tokens
from workers.models.qwen3_moe.config import Qwen3MoeConfig
from workers.weights.slots import BlockSlot, Slot, WeightSlot

Slots = Iterator[tuple[str, Slot]]
Sum = tuple[torch.Tensor, torch.Tensor | None]


class ModelBatch(Protocol):
    """What the model itself reads of a ForwardBatch; attention was given the rest by `plan`.

    input_ids, positions   int64 [T] on the device
    num_tokens             real tokens; rows beyond are padding and reach no expert. For graphs an integer tensor [1]
    """

    num_tokens: int | torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor


class Qwen3MoeForCausalLM:
    """One rank's model: everything but other ranks' experts. Fill it with `load_weights`.

    `max_positions` bounds the positions of a batch (default: the checkpoint's own limit);
    `forced_routing(layer=...)` gives what chooses a layer's experts in place of its router.
    """

    def __init__(
        self,
        config: Qwen3MoeConfig,
        kernels: Backends,
        *,
        placement: ExpertPlacement,
        rank: int,
        device: torch.device | str,
        dtype: torch.dtype,
        max_positions: int | None = None,
        forced_routing: Callable[..., ForcedRouting] | None = None,
    ):
        self.config = config
        self.dtype = dtype
        self.device = torch.device(device)
        make = _Maker(config, self.device, dtype)
        self.embed_VD = make.empty(config.vocab_size, config.hidden_size)
        self.layers: list[tuple[AttentionBlock, MlpBlock | MoeBlock]] = []
        for layer in range(config.num_hidden_layers):
            attention = AttentionBlock(make, kernels, layer)
            if config.is_moe_layer(layer):
                forced = None if forced_routing is None else forced_routing(layer=layer)
                self.layers.append((attention, MoeBlock(make, kernels, placement, rank, forced)))
            else:
                self.layers.append((attention, MlpBlock(make)))
        self.norm = make.norm(config.hidden_size)
        self.lm_head_VD = (
            self.embed_VD
            if config.tie_word_embeddings
            else make.empty(config.vocab_size, config.hidden_size)
        )
        num_positions = max_positions or config.max_position_embeddings
        self._rope_table = build_rope_table(config, num_positions, self.device)

    def with_kernels(self, kernels: Backends) -> "Qwen3MoeForCausalLM":
        """A view of the same weights that calls other attention and all-to-all."""
        view = copy(self)
        view.layers = [
            (attention.with_kernels(kernels), mlp.with_kernels(kernels))
            for attention, mlp in self.layers
        ]
        return view

    def forward(self, batch: ModelBatch) -> torch.Tensor:
        """hidden_TD after the last layer, before the final norm; after `attention.plan(batch)`."""
        rotation_T1d = self._rope_table.index_select(0, batch.positions).unsqueeze(1)
        x_TD, delta_TD = torch.embedding(self.embed_VD, batch.input_ids), None
        for attention, mlp in self.layers:
            x_TD, delta_TD = attention.forward(x_TD, delta_TD, rotation_T1d)
            x_TD, delta_TD = mlp.forward(x_TD, delta_TD, batch)
        return x_TD if delta_TD is None else x_TD.add_(sum_partials(delta_TD))

    def compute_logits(
        self, hidden_LD: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """float32 [L, V], in `out` if given, from rows of forward's result; the final norm runs on these rows only."""
        logits_LV = linear(self.norm(hidden_LD), self.lm_head_VD)
        return logits_LV.float() if out is None else out.copy_(logits_LV)

    def weight_slots(self) -> dict[str, Slot]:
        """Disk name -> where its values go, for every tensor that this rank holds."""
        slots: dict[str, Slot] = {"model.embed_tokens.weight": WeightSlot.plain(self.embed_VD)}
        for layer, (attention, mlp) in enumerate(self.layers):
            prefix = f"model.layers.{layer}."
            for name, slot in (*attention.weight_slots(), *mlp.weight_slots()):
                slots[prefix + name] = slot
        slots["model.norm.weight"] = _norm_slot(self.norm)
        if not self.config.tie_word_embeddings:
            slots["lm_head.weight"] = WeightSlot.plain(self.lm_head_VD)
        return slots


class _Maker:
    """Allocates parameters of one device and dtype."""

    def __init__(self, config: Qwen3MoeConfig, device: torch.device, dtype: torch.dtype):
        self.config = config
        self.device = device
        self.dtype = dtype

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def norm(self, *shape: int) -> RMSNorm:
        return RMSNorm(shape, self.config.rms_norm_eps, device=self.device, dtype=self.dtype)


def _norm_slot(norm: RMSNorm) -> WeightSlot:
    return WeightSlot.plain(norm.weight, norm.load_scale)


class AttentionBlock:
    """x + o_proj(attention(rope(norm(q)), rope(norm(k)), v)), with q, k, v of norm(x).

    A block takes and returns a sum in two parts, (x, delta or None): the next block's norm adds them on its way.
    delta may be in parts itself, as all-to-alls give it (`AllToAll.combine`).
    """

    def __init__(self, make: _Maker, kernels: Backends, layer: int):
        config = self.config = make.config
        self.layer = layer
        self.attention = kernels.attention
        self.input_norm = make.norm(config.hidden_size)
        qkv_size = config.q_size + 2 * config.kv_size
        self.qkv_QD = make.empty(qkv_size, config.hidden_size)
        self.qkv_bias_Q = make.empty(qkv_size) if config.attention_bias else None
        self.num_heads = config.num_attention_heads
        self.num_qk_heads = config.num_attention_heads + config.num_key_value_heads
        self.qkv_view = (-1, self.num_qk_heads + config.num_key_value_heads, config.head_dim)
        # q and k heads are normalised and rotated together: half as many operators
        self.qk_norm = make.norm(self.num_qk_heads, config.head_dim)
        self.o_DQ = make.empty(config.hidden_size, config.q_size)
        self.o_bias_D = make.empty(config.hidden_size) if config.attention_bias else None

    def with_kernels(self, kernels: Backends) -> "AttentionBlock":
        """The same weights, another attention."""
        view = copy(self)
        view.attention = kernels.attention
        return view

    def forward(
        self, x_TD: torch.Tensor, delta_TD: torch.Tensor | None, rotation_T1d: torch.Tensor
    ) -> Sum:
        """x_TD is overwritten."""
        x_TD, h_TD = self.input_norm.add(x_TD, delta_TD)
        qkv_TQ = linear(h_TD, self.qkv_QD, self.qkv_bias_Q)
        o_TQ = self._attend(qkv_TQ.view(self.qkv_view), rotation_T1d).flatten(1)
        if self.input_norm.triton is not None:
            return x_TD, linear(o_TQ, self.o_DQ, self.o_bias_D)
        out_TD = linear(o_TQ, self.o_DQ, x_TD)
        return out_TD if self.o_bias_D is None else out_TD.add_(self.o_bias_D), None

    def _attend(self, qkv_TNd: torch.Tensor, rotation_T1d: torch.Tensor) -> torch.Tensor:
        if self.attention.fuses_qk_norm:
            norm, layer = self.qk_norm, self.layer
            self.attention.norm_rotate_store(qkv_TNd, norm.weight, norm.eps, rotation_T1d, layer)
            return self.attention.attend(qkv_TNd, layer)
        qk_TNd = norm_and_rotate(self.qk_norm, qkv_TNd[:, : self.num_qk_heads], rotation_T1d)
        return self.attention(
            qk_TNd[:, : self.num_heads],
            qk_TNd[:, self.num_heads :],
            qkv_TNd[:, self.num_qk_heads :],
            self.layer,
        )

    def weight_slots(self) -> Slots:
        """Slots by disk name below the layer's prefix."""
        config, d = self.config, self.config.head_dim
        sizes = (config.q_size, config.kv_size, config.kv_size)
        yield "input_layernorm.weight", _norm_slot(self.input_norm)
        for kind, fused in (("weight", self.qkv_QD), ("bias", self.qkv_bias_Q)):
            if fused is not None:
                q, k, v = fused.split(sizes)
                yield f"self_attn.q_proj.{kind}", WeightSlot.interleaved(q, d)
                yield f"self_attn.k_proj.{kind}", WeightSlot.interleaved(k, d)
                yield f"self_attn.v_proj.{kind}", WeightSlot.plain(v)
        yield "self_attn.o_proj.weight", WeightSlot.plain(self.o_DQ)
        if self.o_bias_D is not None:
            yield "self_attn.o_proj.bias", WeightSlot.plain(self.o_bias_D)
        norm_Nd, scale = self.qk_norm.weight, self.qk_norm.load_scale
        q_norm, k_norm = norm_Nd[: self.num_heads], norm_Nd[self.num_heads :]
        yield "self_attn.q_norm.weight", WeightSlot.interleaved_per_head(q_norm, scale)
        yield "self_attn.k_norm.weight", WeightSlot.interleaved_per_head(k_norm, scale)


class MlpBlock:
    """x + down(silu(gate(h)) * up(h)) with h = norm(x)."""

    def __init__(self, make: _Maker):
        dim, width = make.config.hidden_size, make.config.intermediate_size
        self.norm = make.norm(dim)
        self.w13_2ID = make.empty(2 * width, dim)
        self.w2_DI = make.empty(dim, width)

    def with_kernels(self, kernels: Backends) -> "MlpBlock":
        """Itself: it uses none of the kernels."""
        return self

    def forward(self, x_TD: torch.Tensor, delta_TD: torch.Tensor | None, batch: ModelBatch) -> Sum:
        """Padding rows are computed and ignored."""
        x_TD, h_TD = self.norm.add(x_TD, delta_TD)
        gate_TI, up_TI = linear(h_TD, self.w13_2ID).chunk(2, dim=-1)
        return linear(F.silu(gate_TI).mul_(up_TI), self.w2_DI, x_TD), None

    def weight_slots(self) -> Slots:
        """Slots by disk name below the layer's prefix."""
        gate, up = self.w13_2ID.chunk(2)
        yield "post_attention_layernorm.weight", _norm_slot(self.norm)
        yield "mlp.gate_proj.weight", WeightSlot.plain(gate)
        yield "mlp.up_proj.weight", WeightSlot.plain(up)
        yield "mlp.down_proj.weight", WeightSlot.plain(self.w2_DI)


class MoeBlock:
    """x + the weighted sum of the chosen experts' MLPs of norm(x)."""

    def __init__(
        self,
        make: _Maker,
        kernels: Backends,
        placement: ExpertPlacement,
        rank: int,
        forced_routing: ForcedRouting | None,
    ):
        config = self.config = make.config
        self.forced_routing = forced_routing
        self.all2all = kernels.all2all
        self.grouped_gemm = kernels.grouped_gemm
        self.expert_load = kernels.expert_load
        self.experts = placement.local_experts(rank)
        dim, width, num_local = config.hidden_size, config.moe_intermediate_size, len(self.experts)
        self.norm = make.norm(dim)
        self.router_ED = make.empty(config.num_experts, dim)
        empty = partial(
            self.grouped_gemm.empty_weights, num_local, device=make.device, dtype=make.dtype
        )
        self.w13_e2ID, self.w2_eDI = empty(2 * width, dim), empty(dim, width)

    def with_kernels(self, kernels: Backends) -> "MoeBlock":
        """The same weights, another exchange and expert product of the same kinds."""
        view = copy(self)
        view.all2all, view.grouped_gemm = kernels.all2all, kernels.grouped_gemm
        return view

    def forward(self, x_TD: torch.Tensor, delta_TD: torch.Tensor | None, batch: ModelBatch) -> Sum:
        """Every rank comes here in every step, tokens or not. x_TD is overwritten."""
        x_TD, h_TD = self.norm.add(x_TD, delta_TD, self.all2all.dispatch_buffer(len(x_TD)))
        topk_idx_TK, topk_weights_TK = self._route(h_TD, batch)
        expert_input = self.all2all.dispatch(h_TD, topk_idx_TK, topk_weights_TK).wait()
        if self.expert_load.watching:
            self.expert_load.add(expert_input.offs_e)
        y_RD = self.grouped_gemm(expert_input, self.w13_e2ID, self.w2_eDI)
        return x_TD, self.all2all.combine(y_RD, expert_input.handle).wait()

    def _route(self, h_TD: torch.Tensor, batch: ModelBatch) -> tuple[torch.Tensor, torch.Tensor]:
        if self.forced_routing is not None:
            linear(h_TD, self.router_ED)  # a step costs what it would
            return self.forced_routing(batch.input_ids, batch.positions, batch.num_tokens)
        return route_tokens(
            h_TD,
            self.router_ED,
            top_k=self.config.num_experts_per_tok,
            renormalise=self.config.norm_topk_prob,
            num_tokens=batch.num_tokens,
        )

    def weight_slots(self) -> Slots:
        """Slots by disk name below the layer's prefix, for this rank's experts."""
        yield "post_attention_layernorm.weight", _norm_slot(self.norm)
        yield "mlp.gate.weight", WeightSlot.plain(self.router_ED)
        for local, expert in enumerate(self.experts):
            prefix = f"mlp.experts.{expert}."
            w13_2ID, w2_DI = self.w13_e2ID[local], self.w2_eDI[local]
            if isinstance(w13_2ID, BlockWeights):
                gate, up, down = map(BlockSlot, (*w13_2ID.split_rows(), w2_DI))
            else:
                gate, up, down = map(WeightSlot.plain, (*w13_2ID.chunk(2), w2_DI))
            yield f"{prefix}gate_proj.weight", gate
            yield f"{prefix}up_proj.weight", up
            yield f"{prefix}down_proj.weight", down
