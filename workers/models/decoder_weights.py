"""The weight map of a decoder with the blocks of `workers/layers`. Needs no torch.

A family gives the names that its checkpoints use; shapes and rows follow from the config.
V vocabulary, D hidden, d head dim.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from workers.models.delta_net_weights import delta_net_weights
from workers.specs.model import (
    DeltaNetSpec,
    GqaSpec,
    LatentSpec,
    MlpSpec,
    ModelConfig,
    MoeSpec,
)
from workers.specs.weight_map import WeightEntry, WeightKind

Weights = Iterator[WeightEntry]


@dataclass(frozen=True, kw_only=True)
class WeightNames:
    """Names in which checkpoints of families differ, below `layers.N` but for `root`."""

    root: str = "model."
    moe: str = "mlp"
    router: str = "gate.weight"
    expert_gate: str = "experts.{}.gate_proj.weight"
    expert_up: str = "experts.{}.up_proj.weight"
    expert_down: str = "experts.{}.down_proj.weight"
    fused_gate_up: str = (
        "experts.gate_up_proj"  # of all experts, where a checkpoint has such tensors
    )
    fused_down: str = "experts.down_proj"
    shared: str = "mlp.shared_expert"
    shared_gate_up: str = ""  # gate and up of the shared expert as one tensor
    shared_down: str = "down_proj"
    stacked_experts: bool = (
        False  # one tensor for all experts, gate and up alternating, as gpt-oss has them
    )
    router_bias: str = "gate.e_score_correction_bias"
    router_bias_is_row: bool = False  # stored as [1, E]
    joined_delta_inputs: bool = False  # of delta nets: one tensor of q, k, v and gate by key head


def decoder_weights(config: ModelConfig, names: WeightNames) -> Weights:
    """Yield every tensor of the checkpoint but scales, in the order of the forward."""
    table = (config.vocab_size, config.hidden_size)
    root, offset = names.root, config.norm_offset
    yield WeightEntry(f"{root}embed_tokens.weight", table, "embed_VD", WeightKind.EMBEDDING)
    for number, layer in enumerate(config.layers):
        at, path = f"{root}layers.{number}.", f"layers.{number}."
        block = _Layer(config.hidden_size, at, path, config.mxfp4, offset)
        for spec in (layer.attention, layer.mlp):
            yield from _WEIGHTS[type(spec)](block, spec, names)
    shape = (config.hidden_size,)
    yield WeightEntry(f"{root}norm.weight", shape, "norm", WeightKind.NORM, offset=offset)
    if not config.tie_word_embeddings:
        yield WeightEntry("lm_head.weight", table, "lm_head.weight", WeightKind.HEAD)


@dataclass(frozen=True)
class _Layer:
    """The tensors of one layer: `disk` begins names in the checkpoint, `path` begins those of parameters."""

    dim: int
    disk: str
    path: str
    mxfp4: bool = False
    norm_offset: float = 0.0

    def norm(self, name: str, parameter: str) -> WeightEntry:
        return WeightEntry(
            f"{self.disk}{name}.weight",
            (self.dim,),
            self.path + parameter,
            WeightKind.NORM,
            offset=self.norm_offset,
        )

    def attention(self, spec: GqaSpec, names: WeightNames) -> Weights:
        """Fused rows: output gates, then query heads, then key heads, then value heads."""
        at, path = f"{self.disk}self_attn.", f"{self.path}attention."
        head_dim = 0 if spec.rope.interleaved else spec.head_dim
        rotary = spec.rotary_dim or 0
        yield self.norm("input_layernorm", "attention.input_norm")
        gate, kv = spec.gate_size, spec.kv_size
        q = gate + spec.q_size
        parts = [
            ("q", (gate, q), head_dim),
            ("k", (q, q + kv), head_dim),
            ("v", (q + kv, q + 2 * kv), 0),
        ]
        if gate:
            yield from self._gated_queries(spec, head_dim)
            del parts[0]
        for part, rows, heads in parts:
            shape = (rows[1] - rows[0], self.dim)
            name = f"{at}{part}_proj"
            yield WeightEntry(
                f"{name}.weight",
                shape,
                f"{path}qkv.weight",
                WeightKind.PROJECTION,
                rows,
                heads,
                rotary_dim=rotary if heads else 0,
            )
            if spec.qkv_bias:
                yield WeightEntry(
                    f"{name}.bias",
                    shape[:1],
                    f"{path}qkv.bias",
                    WeightKind.BIAS,
                    rows,
                    heads,
                    rotary_dim=rotary if heads else 0,
                )
        shape = (self.dim, spec.q_size)
        yield WeightEntry(f"{at}o_proj.weight", shape, f"{path}o.weight", WeightKind.PROJECTION)
        if spec.output_bias:
            yield WeightEntry(f"{at}o_proj.bias", shape[:1], f"{path}o.bias", WeightKind.BIAS)
        if spec.sinks:
            heads_shape = (spec.num_heads,)
            yield WeightEntry(f"{at}sinks", heads_shape, f"{path}sinks_H", WeightKind.SINK)
        yield from self._qk_norms(spec, head_dim)

    def _gated_queries(self, spec: GqaSpec, head_dim: int) -> Weights:
        """One tensor with the rows of each head's query, then of its output gate."""
        name, parameter = f"{self.disk}self_attn.q_proj", f"{self.path}attention.qkv"
        heads, size, gate = spec.num_heads, spec.head_dim, spec.gate_size
        query = WeightEntry(
            f"{name}.weight",
            (2 * spec.q_size, self.dim),
            f"{parameter}.weight",
            WeightKind.PROJECTION,
            (gate, gate + spec.q_size),
            head_dim,
            rotary_dim=(spec.rotary_dim or 0) if head_dim else 0,
            part=(heads, 0, size),
        )
        part = (heads, size, 2 * size)
        gates = query._replace(rows=(0, gate), head_dim=0, rotary_dim=0, part=part)
        for entry in (query, gates):
            yield entry
            if spec.qkv_bias:
                yield entry._replace(
                    name=f"{name}.bias",
                    shape=entry.shape[:1],
                    parameter=f"{parameter}.bias",
                    kind=WeightKind.BIAS,
                )

    def _qk_norms(self, spec: GqaSpec, head_dim: int) -> Weights:
        """One norm of all heads of q and k with a row a head, or one of all of q and one of all of k."""
        at, path = f"{self.disk}self_attn.", f"{self.path}attention."
        kind = WeightKind.QK_NORM
        heads, all_heads = spec.num_heads, spec.num_heads + spec.num_kv_heads
        if spec.qk_norm == "head":
            shape, parameter = (spec.head_dim,), f"{path}qk_norm"
            for name, rows in (("q_norm", (0, heads)), ("k_norm", (heads, all_heads))):
                yield WeightEntry(
                    f"{at}{name}.weight",
                    shape,
                    parameter,
                    kind,
                    rows,
                    head_dim,
                    rotary_dim=(spec.rotary_dim or 0) if head_dim else 0,
                    offset=self.norm_offset,
                )
        elif spec.qk_norm == "full":
            for name, size in (("q_norm", spec.q_size), ("k_norm", spec.kv_size)):
                yield WeightEntry(
                    f"{at}{name}.weight",
                    (size,),
                    path + name,
                    kind,
                    None,
                    head_dim,
                    rotary_dim=(spec.rotary_dim or 0) if head_dim else 0,
                )

    def latent_attention(self, spec: LatentSpec, names: WeightNames) -> Weights:
        """One product of the hidden state: rows of q or of its latent, then those of the latent and the rotated key."""
        at, path, dims = f"{self.disk}self_attn.", f"{self.path}attention.", spec.dims
        kind = WeightKind.PROJECTION
        yield self.norm("input_layernorm", "attention.input_norm")
        q = spec.q_rank or spec.q_size
        down = {
            "q_proj" if spec.q_rank is None else "q_a_proj": (0, q),
            "kv_a_proj_with_mqa": (q, q + dims.width),
        }
        unbiased = 0 if spec.q_rank else q  # rows before the first with a bias
        for name, (start, stop) in down.items():
            shape, rows = (stop - start, self.dim), (start, stop)
            yield WeightEntry(f"{at}{name}.weight", shape, f"{path}down.weight", kind, rows)
            if spec.bias and start >= unbiased:
                rows = (start - unbiased, stop - unbiased)
                bias = f"{path}down_bias"
                yield WeightEntry(f"{at}{name}.bias", shape[:1], bias, WeightKind.BIAS, rows)
        norm = WeightKind.NORM
        if spec.q_rank is not None:
            width = (spec.q_rank,)
            yield WeightEntry(f"{at}q_a_layernorm.weight", width, f"{path}q_norm", norm)
            shape = (spec.q_size, spec.q_rank)
            yield WeightEntry(f"{at}q_b_proj.weight", shape, f"{path}q_up.weight", kind)
        yield WeightEntry(f"{at}kv_a_layernorm.weight", (dims.rank,), f"{path}kv_norm", norm)
        shape = (spec.kv_up_size, dims.rank)
        yield WeightEntry(f"{at}kv_b_proj.weight", shape, f"{path}kv_up", kind)
        shape = (self.dim, spec.o_size)
        yield WeightEntry(f"{at}o_proj.weight", shape, f"{path}o.weight", kind)
        if spec.bias:
            yield WeightEntry(f"{at}o_proj.bias", shape[:1], f"{path}o.bias", WeightKind.BIAS)

    def delta_net(self, spec: DeltaNetSpec, names: WeightNames) -> Weights:
        """A gated delta net."""
        yield self.norm("input_layernorm", "attention.input_norm")
        yield from delta_net_weights(
            self.disk, self.path, self.dim, spec, joined=names.joined_delta_inputs
        )

    def dense(self, spec: MlpSpec, names: WeightNames) -> Weights:
        """An MLP in the place of experts."""
        yield self.norm("post_attention_layernorm", "mlp.norm")
        yield from self.gated("mlp.", "mlp.", spec.width)

    def moe(self, spec: MoeSpec, names: WeightNames) -> Weights:
        """Router, experts and shared expert."""
        at = f"{self.disk}{names.moe}."
        yield self.norm("post_attention_layernorm", "mlp.norm")
        shape = (spec.num_experts, self.dim)
        router = f"{self.path}mlp.router.weight"
        yield WeightEntry(at + names.router, shape, router, WeightKind.ROUTER)
        if spec.router.logit_bias:
            name = at + names.router.replace("weight", "bias")
            parameter = f"{self.path}mlp.router.bias"
            yield WeightEntry(name, shape[:1], parameter, WeightKind.BIAS)
        if spec.router.bias:
            name, parameter = f"{at}{names.router_bias}", f"{self.path}mlp.score_bias_E"
            row = (1,) if names.router_bias_is_row else ()
            yield WeightEntry(name, (*row, spec.num_experts), parameter, WeightKind.BIAS)
        if names.stacked_experts:
            yield from self.stacked_experts(f"{at}experts.", spec)
        else:
            yield from self.experts(spec, names, at)
        if spec.shared is not None:
            name = names.shared
            if names.shared_gate_up:
                yield from self.joined(names, spec.shared.width)
            else:
                yield from self.gated(f"{name}.", "mlp.shared.", spec.shared.width)
            if spec.shared.gated:
                parameter = f"{self.path}mlp.shared.gate.weight"
                yield WeightEntry(
                    f"{self.disk}{name}_gate.weight", (1, self.dim), parameter, WeightKind.GATE
                )

    def experts(self, spec: MoeSpec, names: WeightNames, at: str) -> Weights:
        """gate, up and down of every routed expert."""
        width, path = spec.width, f"{self.path}mlp."
        up, down = (width, self.dim), (self.dim, width)
        parts = (
            (names.expert_gate, up, "w13_e2ID", (0, width), names.fused_gate_up),
            (names.expert_up, up, "w13_e2ID", (width, 2 * width), names.fused_gate_up),
            (names.expert_down, down, "w2_eDI", None, names.fused_down),
        )
        for expert in range(spec.num_experts):
            for name, shape, parameter, rows, fused in parts:
                yield WeightEntry(
                    at + name.format(expert),
                    shape,
                    path + parameter,
                    WeightKind.PROJECTION if rows else WeightKind.DOWN_PROJECTION,
                    rows,
                    expert=expert,
                    fused=at + fused,
                )

    def joined(self, names: WeightNames, width: int) -> Weights:
        """gate and up as one tensor, and down, of a shared expert."""
        at, path = f"{self.disk}{names.shared}.", f"{self.path}mlp.shared."
        up, down = (2 * width, self.dim), (self.dim, width)
        name = f"{at}{names.shared_gate_up}.weight"
        yield WeightEntry(name, up, f"{path}gate_up.weight", WeightKind.PROJECTION)
        name = f"{at}{names.shared_down}.weight"
        yield WeightEntry(name, down, f"{path}down.weight", WeightKind.DOWN_PROJECTION)

    def stacked_experts(self, at: str, spec: MoeSpec) -> Weights:
        """One tensor for all experts. Rows of gate and up alternate; unless packed in MXFP4, columns come first."""
        path, width, mxfp4 = f"{self.path}mlp.", spec.width, self.mxfp4
        up, down = (2 * width, self.dim), (self.dim, width)
        weights = (
            ("gate_up_proj", up, "w13_e2ID", WeightKind.PROJECTION),
            ("down_proj", down, "w2_eDI", WeightKind.DOWN_PROJECTION),
        )
        for name, shape, parameter, kind in weights:
            for expert in range(spec.num_experts):
                entry = WeightEntry(
                    at + name,
                    shape if mxfp4 else shape[::-1],
                    path + parameter,
                    kind,
                    expert=expert,
                    stacked=spec.num_experts,
                    transposed=not mxfp4,
                    interleaved=name == "gate_up_proj",
                    mxfp4=mxfp4,
                )
                yield entry
                if spec.bias:
                    bias = "b13_e2I" if entry.interleaved else "b2_eD"
                    yield entry._replace(
                        name=f"{at}{name}_bias",
                        shape=shape[:1],
                        parameter=path + bias,
                        kind=WeightKind.BIAS,
                        transposed=False,
                        mxfp4=False,
                    )

    def gated(self, name: str, parameter: str, width: int) -> Weights:
        """gate, up and down of an MLP that is not a routed expert's."""
        at, path = self.disk + name, self.path + parameter
        up, w13 = (width, self.dim), f"{path}gate_up.weight"
        yield WeightEntry(f"{at}gate_proj.weight", up, w13, WeightKind.PROJECTION, (0, width))
        yield WeightEntry(f"{at}up_proj.weight", up, w13, WeightKind.PROJECTION, (width, 2 * width))
        down = (self.dim, width)
        yield WeightEntry(
            f"{at}down_proj.weight", down, f"{path}down.weight", WeightKind.DOWN_PROJECTION
        )


_WEIGHTS: dict[type, Callable[..., Weights]] = {
    GqaSpec: _Layer.attention,
    LatentSpec: _Layer.latent_attention,
    DeltaNetSpec: _Layer.delta_net,
    MlpSpec: _Layer.dense,
    MoeSpec: _Layer.moe,
}
"""The tensors of a block, by its spec."""
