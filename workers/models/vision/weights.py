"""The weight maps of vision towers, below `model.visual.` in checkpoints. Need no torch.

Rows of q and k come in pairs as the rotary embedding of `workers.layers.rope` takes them.
"""

from collections.abc import Iterator

from workers.specs.vision import GlmVisionSpec, QwenVisionSpec, VisionSpec
from workers.specs.weight_map import WeightEntry, WeightKind

Weights = Iterator[WeightEntry]
ROOT = "model.visual."
PATH = "vision."  # begins the names of the parameters


def _matrix(name: str, parameter: str, shape: tuple[int, ...], *, bias: bool) -> Weights:
    entry = WeightEntry(
        f"{ROOT}{name}.weight", shape, f"{PATH}{parameter}.weight", WeightKind.VISION
    )
    yield entry
    if bias:
        yield _vector(name, parameter, shape[0])


def _vector(name: str, parameter: str, size: int) -> WeightEntry:
    return WeightEntry(f"{ROOT}{name}.bias", (size,), f"{PATH}{parameter}.bias", WeightKind.BIAS)


def _norm(name: str, parameter: str, size: int, *, bias: bool) -> Weights:
    kind = WeightKind.NORM
    yield WeightEntry(f"{ROOT}{name}.weight", (size,), PATH + parameter, kind)
    if bias:
        yield _vector(name, parameter, size)


def _patches(spec: VisionSpec) -> Weights:
    shape = spec.channels, spec.temporal_patch_size, spec.patch_size, spec.patch_size
    yield from _matrix("patch_embed.proj", "patches", (spec.hidden_size, *shape), bias=True)


def _table(spec: VisionSpec, name: str) -> WeightEntry:
    shape = spec.grid_side**2, spec.hidden_size
    return WeightEntry(f"{ROOT}{name}.weight", shape, f"{PATH}table_GD", WeightKind.POSITIONS)


def _qkv(spec: VisionSpec, at: str, path: str, *, bias: bool) -> Weights:
    """One tensor with q, k and v of all heads."""
    dim = spec.hidden_size
    heads = WeightEntry(
        f"{ROOT}{at}attn.qkv.weight",
        (3 * dim, dim),
        f"{PATH}{path}qkv.weight",
        WeightKind.VISION,
        (0, 2 * dim),
        spec.head_dim,
        part=(1, 0, 2 * dim),
    )
    values = heads._replace(rows=(2 * dim, 3 * dim), head_dim=0, part=(1, 2 * dim, 3 * dim))
    for entry in (heads, values):
        yield entry
        if bias:
            yield entry._replace(
                name=f"{ROOT}{at}attn.qkv.bias",
                shape=(3 * dim,),
                parameter=f"{PATH}{path}qkv.bias",
                kind=WeightKind.BIAS,
            )


def qwen_weights(spec: QwenVisionSpec) -> Weights:
    """Yield every tensor of the tower, in the order of the forward."""
    dim, width = spec.hidden_size, spec.intermediate_size
    yield from _patches(spec)
    yield _table(spec, "pos_embed")
    for number in range(spec.depth):
        at = path = f"blocks.{number}."
        yield from _norm(f"{at}norm1", f"{path}norm1", dim, bias=True)
        yield from _qkv(spec, at, path, bias=True)
        yield from _matrix(f"{at}attn.proj", f"{path}out", (dim, dim), bias=True)
        yield from _norm(f"{at}norm2", f"{path}norm2", dim, bias=True)
        yield from _matrix(f"{at}mlp.linear_fc1", f"{path}up", (width, dim), bias=True)
        yield from _matrix(f"{at}mlp.linear_fc2", f"{path}down", (dim, width), bias=True)
    yield from _qwen_merger(spec, "merger", "mergers.0", dim)
    for number in range(len(spec.deepstack)):
        at, path = f"deepstack_merger_list.{number}", f"mergers.{1 + number}"
        yield from _qwen_merger(spec, at, path, dim * spec.merged)


def _qwen_merger(spec: QwenVisionSpec, at: str, path: str, norm_size: int) -> Weights:
    size = spec.hidden_size * spec.merged
    yield from _norm(f"{at}.norm", f"{path}.norm", norm_size, bias=True)
    yield from _matrix(f"{at}.linear_fc1", f"{path}.up", (size, size), bias=True)
    yield from _matrix(f"{at}.linear_fc2", f"{path}.down", (spec.output_size, size), bias=True)


def glm_weights(spec: GlmVisionSpec) -> Weights:
    """Yield every tensor of the tower, in the order of the forward."""
    dim, out, side = spec.hidden_size, spec.output_size, spec.merge_size
    yield from _patches(spec)
    yield from _norm("post_conv_layernorm", "first_norm", dim, bias=False)
    yield _table(spec, "embeddings.position_embedding")
    for number in range(spec.depth):
        at = path = f"blocks.{number}."
        yield from _norm(f"{at}norm1", f"{path}norm1", dim, bias=False)
        yield from _qkv(spec, at, path, bias=spec.qkv_bias)
        yield from _matrix(f"{at}attn.proj", f"{path}out", (dim, dim), bias=False)
        yield from _norm(f"{at}norm2", f"{path}norm2", dim, bias=False)
        yield from _glm_mlp(f"{at}mlp.", path, dim, out)
    yield from _norm("post_layernorm", "last_norm", dim, bias=False)
    yield from _matrix("downsample", "merge", (out, dim, side, side), bias=True)
    yield from _matrix("merger.proj", "merger.proj", (out, out), bias=False)
    yield from _norm("merger.post_projection_norm", "merger.norm", out, bias=True)
    yield from _glm_mlp("merger.", "merger.", out, spec.intermediate_size)


def _glm_mlp(at: str, path: str, dim: int, width: int) -> Weights:
    """gate, up and down; gate and up are one parameter."""
    for name, rows in (("gate_proj", (0, width)), ("up_proj", (width, 2 * width))):
        for entry in _matrix(at + name, f"{path}gate_up", (width, dim), bias=False):
            yield entry._replace(rows=rows)
    yield from _matrix(f"{at}down_proj", f"{path}down", (dim, width), bias=False)
