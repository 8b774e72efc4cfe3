"""The weight maps of grouped-query attention and of latent attention (MLA). Need no torch.

D hidden, d head dim.
"""

from workers.models.decoder_weights import LayerWeights, Weights
from workers.specs.model import GqaSpec, MlaSpec
from workers.specs.weight_map import WeightEntry, WeightKind


def gqa_weights(layer: LayerWeights, spec: GqaSpec) -> Weights:
    """Fused rows: output gates, then query heads, then key heads, then value heads."""
    at, path = f"{layer.disk}self_attn.", f"{layer.path}attention."
    head_dim = 0 if spec.rope.interleaved else spec.head_dim
    rotary = spec.rotary_dim or 0
    yield layer.norm("input_layernorm", "attention.input_norm")
    gate, kv = spec.gate_size, spec.kv_size
    q = gate + spec.q_size
    parts = [
        ("q", (gate, q), head_dim),
        ("k", (q, q + kv), head_dim),
        ("v", (q + kv, q + 2 * kv), 0),
    ]
    if gate:
        yield from _gated_queries(layer, spec, head_dim)
        del parts[0]
    for part, rows, heads in parts:
        shape = (rows[1] - rows[0], layer.dim)
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
    shape = (layer.dim, spec.q_size)
    yield WeightEntry(f"{at}o_proj.weight", shape, f"{path}o.weight", WeightKind.PROJECTION)
    if spec.output_bias:
        yield WeightEntry(f"{at}o_proj.bias", shape[:1], f"{path}o.bias", WeightKind.BIAS)
    if spec.sinks:
        heads_shape = (spec.num_heads,)
        yield WeightEntry(f"{at}sinks", heads_shape, f"{path}sinks_H", WeightKind.SINK)
    yield from _qk_norms(layer, spec, head_dim)


def _gated_queries(layer: LayerWeights, spec: GqaSpec, head_dim: int) -> Weights:
    """One tensor with the rows of each head's query, then of its output gate."""
    name, parameter = f"{layer.disk}self_attn.q_proj", f"{layer.path}attention.qkv"
    heads, size, gate = spec.num_heads, spec.head_dim, spec.gate_size
    query = WeightEntry(
        f"{name}.weight",
        (2 * spec.q_size, layer.dim),
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


def _qk_norms(layer: LayerWeights, spec: GqaSpec, head_dim: int) -> Weights:
    """One norm of all heads of q and k with a row a head, or one of all of q and one of all of k."""
    at, path = f"{layer.disk}self_attn.", f"{layer.path}attention."
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
                offset=layer.norm_offset,
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


def mla_weights(layer: LayerWeights, spec: MlaSpec) -> Weights:
    """One product of the hidden state: rows of q or of its latent, then those of the latent and the rotated key."""
    at, path, dims = f"{layer.disk}self_attn.", f"{layer.path}attention.", spec.dims
    kind = WeightKind.PROJECTION
    yield layer.norm("input_layernorm", "attention.input_norm")
    q = spec.q_rank or spec.q_size
    down = {
        "q_proj" if spec.q_rank is None else "q_a_proj": (0, q),
        "kv_a_proj_with_mqa": (q, q + dims.width),
    }
    unbiased = 0 if spec.q_rank else q  # rows before the first with a bias
    for name, (start, stop) in down.items():
        shape, rows = (stop - start, layer.dim), (start, stop)
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
    yield WeightEntry(f"{at}kv_b_proj.weight", shape, f"{path}kv_up.weight", kind)
    shape = (layer.dim, spec.o_size)
    yield WeightEntry(f"{at}o_proj.weight", shape, f"{path}o.weight", kind)
    if spec.bias:
        yield WeightEntry(f"{at}o_proj.bias", shape[:1], f"{path}o.bias", WeightKind.BIAS)
