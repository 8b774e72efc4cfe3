"""The weight map of a gated delta net (`workers/layers/gdn.py`). Needs no torch."""

from kernels.interface.linear_attention_spec import LinearAttentionSpec
from workers.models.decoder_weights import LayerWeights, Weights
from workers.specs.model import GdnSpec
from workers.specs.weight_map import WeightEntry, WeightKind


def gdn_weights(layer: LayerWeights, spec: GdnSpec) -> Weights:
    """Yield the tensors of one layer. The rows of its inputs are q, k, v, output gate; and b, a."""
    yield layer.norm("input_layernorm", "attention.input_norm")
    sizes, at, to = spec.kernel_spec, f"{layer.disk}linear_attn.", f"{layer.path}attention."
    dim, inputs = layer.dim, _joined_inputs if layer.names.joined_delta_inputs else _inputs
    yield from inputs(at, to, dim, sizes)
    heads = (sizes.num_value_heads,)
    conv = (sizes.channels, 1, sizes.conv_width)
    yield WeightEntry(f"{at}conv1d.weight", conv, f"{to}conv_C1w", WeightKind.CONVOLUTION)
    yield WeightEntry(f"{at}dt_bias", heads, f"{to}dt_bias_V", WeightKind.BIAS)
    yield WeightEntry(f"{at}A_log", heads, f"{to}neg_exp_a_V", WeightKind.DECAY)
    yield WeightEntry(f"{at}norm.weight", (sizes.value_dim,), f"{to}norm", WeightKind.NORM)
    shape = (dim, sizes.value_size)
    yield WeightEntry(f"{at}out_proj.weight", shape, f"{to}out.weight", WeightKind.PROJECTION)


def _inputs(at: str, to: str, dim: int, sizes: LinearAttentionSpec) -> Weights:
    heads, qkvz, ba = sizes.num_value_heads, f"{to}qkvz.weight", f"{to}ba.weight"
    end = sizes.channels + sizes.value_size
    for name, parameter, rows in (
        ("qkv", qkvz, (0, sizes.channels)),
        ("z", qkvz, (sizes.channels, end)),
        ("b", ba, (0, heads)),
        ("a", ba, (heads, 2 * heads)),
    ):
        name, shape = f"{at}in_proj_{name}.weight", (rows[1] - rows[0], dim)
        yield WeightEntry(name, shape, parameter, WeightKind.PROJECTION, rows)


def _joined_inputs(at: str, to: str, dim: int, sizes: LinearAttentionSpec) -> Weights:
    """Two tensors with rows by key head: q, k, v, output gate; and b, a."""
    key_heads, value_rows = sizes.num_key_heads, sizes.group_size * sizes.value_dim
    for name, parameter, of_head in (
        ("qkvz", "qkvz.weight", (sizes.key_dim, sizes.key_dim, value_rows, value_rows)),
        ("ba", "ba.weight", (sizes.group_size, sizes.group_size)),
    ):
        shape, start, first = (key_heads * sum(of_head), dim), 0, 0
        for count in of_head:
            rows = (start, start + key_heads * count)
            yield WeightEntry(
                f"{at}in_proj_{name}.weight",
                shape,
                to + parameter,
                WeightKind.PROJECTION,
                rows,
                part=(key_heads, first, first + count),
            )
            start, first = rows[1], first + count
