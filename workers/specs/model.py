"""The layers of a model as plain data. Needs neither torch nor transformers.

A spec of a part of a layer names the class of its block, built as block(builder, spec, number), and the generator of
its weight map, called as weights(LayerWeights, spec): both as "module:name", because they are above this module. A spec
of attention names the memory of its sequences too. So a new kind of layer is its spec, its block and its weights.
A model family reads config.json into a `ModelConfig`; all code outside `workers/models/<family>/` reads this alone.
Knows nothing of ranks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pkgutil import resolve_name
from typing import ClassVar, Literal

from kernels.activation import Activation
from kernels.interface.attention_spec import AttentionSpec, MlaDims
from kernels.interface.linear_attention_spec import LinearAttentionSpec
from workers.specs.four_bit import FourBitForm
from workers.specs.pooling import PoolingSpec
from workers.specs.quantization import Quantization
from workers.specs.rope import RopeSpec
from workers.specs.vision import VisionSpec
from workers.specs.weight_map import QUANTISABLE, WeightEntry

# Yields the tensors of the checkpoint of a config, see `weight_map`.
WeightEntries = Callable[["ModelConfig"], Iterator[WeightEntry]]
DtypeName = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[DtypeName, ...] = ("float32", "bfloat16", "float16")
QkNorm = Literal["head", "full"]
ScoringFunc = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top2"]


@dataclass(frozen=True, kw_only=True)
class GqaSpec:
    """Grouped-query attention of one layer.

    cache      memory of a sequence: KV blocks, or one state of constant size ("state")
    qk_norm    RMS norm of q and k before the rotation: per head, over all heads together ("full"), or None
    clip_qkv   bound on the absolute values of q, k and v after the norm, None for no bound
    rotary_dim values of a head that are rotated, the first ones; None: all
    score_scale  factor on the scores; None: 1 / sqrt(head_dim)
    window     tokens that a token attends to, its own included; None: all before
    sinks      a sink for each query head, see AttentionSpec
    output_gate  the output is multiplied by the sigmoid of further values of q's projection, one a value
    """

    block: ClassVar[str] = "workers.layers.attention:AttentionBlock"
    weights: ClassVar[str] = "workers.models.attention_weights:gqa_weights"
    cache: ClassVar[Literal["kv"]] = "kv"

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    qk_norm: QkNorm | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    clip_qkv: float | None = None
    rotary_dim: int | None = None
    score_scale: float | None = None
    window: int | None = None
    sinks: bool = False
    output_gate: bool = False

    @property
    def rope_dim(self) -> int:
        """Rotated values of a head."""
        return self.rotary_dim or self.head_dim

    @property
    def q_size(self) -> int:
        """Width of all query heads together; may differ from hidden_size."""
        return self.num_heads * self.head_dim

    @property
    def gate_size(self) -> int:
        """Width of the output gate."""
        return self.q_size if self.output_gate else 0

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        scale: float = self.head_dim**-0.5
        return scale if self.score_scale is None else self.score_scale

    def problems(self) -> Iterator[str]:
        """Yield what is wrong between sizes that are valid alone, by the names that config.json has for them."""
        if self.num_heads % self.num_kv_heads:
            yield (
                f"num_attention_heads is {self.num_heads}; "
                f"expected a multiple of num_key_value_heads ({self.num_kv_heads})"
            )
        if self.head_dim % 2:
            yield f"head_dim is {self.head_dim}; expected an even number (RoPE turns pairs)"
        elif self.rope_dim % 2:
            yield (
                f"partial_rotary_factor rotates {self.rope_dim} of {self.head_dim} values of a head; "
                "expected an even number (RoPE turns pairs)"
            )

    @property
    def kernel_spec(self) -> AttentionSpec:
        """The spec of this layer for the attention kernels."""
        return AttentionSpec(
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.scale,
            window=self.window,
            sinks=self.sinks,
        )


@dataclass(frozen=True, kw_only=True)
class MlaSpec:
    """Multi-head latent attention (MLA) of one layer; `dims` has the sizes of its heads.

    q_rank       q comes from a normed latent of this many values too; None: from the hidden state
    bias         the projections to latents and the output have biases
    scale        factor on the scores, of the lengthened rotary embedding too
    latent_eps   of the norms of both latents, which may differ from the norms of the layer
    """

    block: ClassVar[str] = "workers.layers.mla:MlaBlock"
    weights: ClassVar[str] = "workers.models.attention_weights:mla_weights"
    cache: ClassVar[Literal["kv"]] = "kv"

    num_heads: int
    dims: MlaDims
    q_rank: int | None
    scale: float
    rope: RopeSpec
    bias: bool = False
    latent_eps: float = 1e-6

    @property
    def rope_dim(self) -> int:
        """Rotated values of a head."""
        return self.dims.rope_dim

    @property
    def head_dim(self) -> int:
        """Values of a head of q and k."""
        return self.dims.nope_dim + self.dims.rope_dim

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_up_size(self) -> int:
        """Width of the unrotated keys and the values of all heads together."""
        return self.num_heads * (self.dims.nope_dim + self.dims.value_dim)

    @property
    def o_size(self) -> int:
        """Width of the output of all heads together."""
        return self.num_heads * self.dims.value_dim

    def problems(self) -> Iterator[str]:
        """Yield the odd sizes, which break pairs of rotated values, by the names that config.json has for them."""
        sizes = {
            "kv_lora_rank": self.dims.rank,
            "qk_nope_head_dim": self.dims.nope_dim,
            "qk_rope_head_dim": self.dims.rope_dim,
            "q_lora_rank": self.q_rank or 0,
        }
        for key, value in sizes.items():
            if value % 2:
                yield f"{key} is {value}; expected an even number (RoPE turns pairs)"

    @property
    def kernel_spec(self) -> AttentionSpec:
        """The spec of this layer for the attention kernels."""
        return AttentionSpec(self.num_heads, 1, self.head_dim, self.scale, mla=self.dims)


@dataclass(frozen=True, kw_only=True)
class GdnSpec:
    """Gated delta net of one layer: linear attention with a state of constant size a sequence."""

    block: ClassVar[str] = "workers.layers.gdn:GdnBlock"
    weights: ClassVar[str] = "workers.models.gdn_weights:gdn_weights"
    cache: ClassVar[Literal["state"]] = "state"

    kernel_spec: LinearAttentionSpec

    @property
    def input_size(self) -> int:
        """Width of the projection of the hidden state: q, k, v, output gate, and two values a value head."""
        spec = self.kernel_spec
        return spec.channels + spec.value_size + 2 * spec.num_value_heads


@dataclass(frozen=True, kw_only=True)
class MlpSpec:
    """Dense gated MLP: down(activation(gate(x)) * up(x)), `intermediate_size` values between."""

    block: ClassVar[str] = "workers.layers.mlp:MlpBlock"
    weights: ClassVar[str] = "workers.models.mlp_weights:mlp_weights"
    has_experts: ClassVar[bool] = False

    intermediate_size: int
    activation: Activation


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """Choice of `top_k` experts by the score of their logits, and their weights.

    norm_topk_prob   divide the weights of a token by their sum
    routed_scaling_factor   factor on the weights, applied here and nowhere else
    bias          each expert has a bias on its score, for the choice alone: weights come from the scores without it
    logit_bias    each expert has a bias on its logit, for choice and weights
    num_groups    groups of neighbouring experts, of which the `topk_group` best are open to the choice
    group_score   score of a group: of its best expert, or the sum of its two best
    """

    top_k: int
    norm_topk_prob: bool
    scoring_func: ScoringFunc = "softmax"
    routed_scaling_factor: float = 1.0
    bias: bool = False
    logit_bias: bool = False
    num_groups: int = 1
    topk_group: int = 1
    group_score: GroupScore = "max"

    @property
    def plain(self) -> bool:
        """Whether the best scores alone decide: no bias and no closed groups."""
        return not self.bias and self.topk_group == self.num_groups


@dataclass(frozen=True, kw_only=True)
class SharedExpertSpec:
    """Dense MLP beside the routed experts. `gated`: its output is multiplied by sigmoid(x @ gate)."""

    intermediate_size: int
    activation: Activation
    gated: bool


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """Routed experts, each a gated MLP of `intermediate_size`, and maybe a shared expert beside them.

    bias   both products of an expert have biases
    """

    block: ClassVar[str] = "workers.layers.moe:MoeBlock"
    weights: ClassVar[str] = "workers.models.mlp_weights:moe_weights"
    has_experts: ClassVar[bool] = True

    num_experts: int
    intermediate_size: int
    activation: Activation
    router: RouterSpec
    shared: SharedExpertSpec | None = None
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One decoder layer: attention, then an MLP or experts, each behind a norm and added to the residual."""

    attention: GqaSpec | MlaSpec | GdnSpec
    mlp: MlpSpec | MoeSpec


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model as its checkpoint describes it; `dtype` is the dtype of the checkpoint.

    moe       the experts of every layer that has experts; one kind today, because kernels are built once for all layers
    weight_entries   yields the tensors of the checkpoint as the family names them; `weight_map` completes them
    kept, skipped   beginnings of the names of tensors that alone are read, and of those that are not
    embedding_factor, logits_factor   on the embeddings and on the logits, for families that have such factors
    renamed   parts of names of tensors as transformers saves them in its own layout, and as the weight map has them
    stacked_form   how the checkpoint packs tensors that hold all experts in four bits; None: it does not
    norm_offset   added to the weights of norms, for families that store their distance from it
    skipped_parts   parts of the checkpoint that are not served, in words, as its vision tower
    mtp       the checkpoint's head for multi-token prediction as a model of one layer; None: no head that can be run
    pooling   how prompts become vectors or scores; None: the model generates
    has_logits, num_labels   whether the head of the vocabulary is loaded; classes of the classification head, or 0
    vision    the vision tower; None: the model takes no images
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    moe: MoeSpec
    norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    quantization: Quantization | None
    dtype: DtypeName
    eos_token_ids: tuple[int, ...]
    weight_entries: WeightEntries
    skipped: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    embedding_factor: float = 1.0
    logits_factor: float = 1.0
    stacked_form: FourBitForm | None = None
    norm_offset: float = 0.0
    skipped_parts: tuple[str, ...] = ()
    kept: tuple[str, ...] = ("",)
    mtp: "ModelConfig | None" = None
    pooling: PoolingSpec | None = None
    has_logits: bool = True
    num_labels: int = 0
    vision: VisionSpec | None = None

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def num_moe_layers(self) -> int:
        """Number of decoder layers that have experts."""
        return sum(layer.mlp.has_experts for layer in self.layers)

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """The specs for the attention kernels of all layers with KV blocks."""
        return tuple(
            layer.attention.kernel_spec for layer in self.layers if layer.attention.cache == "kv"
        )

    @property
    def linear_specs(self) -> tuple[LinearAttentionSpec, ...]:
        """The specs for the kernels of all layers of linear attention."""
        return tuple(
            layer.attention.kernel_spec for layer in self.layers if layer.attention.cache == "state"
        )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer with KV blocks."""
        return tuple(spec.window for spec in self.attention_specs)

    @property
    def window(self) -> int | None:
        """The largest window of a layer; None: no layer has one."""
        return max((window for window in self.windows if window is not None), default=None)

    @property
    def attention(self) -> GqaSpec | MlaSpec | None:
        """That of the first layer with KV blocks, None without such layers. They differ in their windows alone."""
        for layer in self.layers:
            if layer.attention.cache == "kv":
                return layer.attention
        return None

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer."""
        return self.moe.num_experts

    @property
    def top_k(self) -> int:
        """Routed experts per token."""
        return self.moe.router.top_k


@lru_cache(maxsize=4)  # benchmarks compare a few configs
def weight_map(config: ModelConfig) -> tuple[WeightEntry, ...]:
    """Return every tensor of the checkpoint but scales, in the order of the forward, the vision tower last."""
    entries, quantization = config.weight_entries(config), config.quantization
    if quantization is not None:
        entries = (_stored(it, quantization) if it.kind in QUANTISABLE else it for it in entries)
    vision = config.vision
    return (*entries, *(() if vision is None else resolve_name(vision.weights)(vision)))


def _stored(entry: WeightEntry, quantization: Quantization) -> WeightEntry:
    form = quantization.form(entry.name)
    if isinstance(form, FourBitForm):
        return entry._replace(four_bit=form)
    return entry._replace(fp8=form)
