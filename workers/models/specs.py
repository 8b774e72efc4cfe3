"""The layers of a model as plain data. Needs neither torch nor transformers.

A model family reads config.json into a `ModelConfig`; all code outside `workers/models/<family>/` reads this alone.
Knows nothing of config.json's names, weights or ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kernels.activation import Activation
from kernels.attention.spec import AttentionSpec
from workers.weights.quantization import BlockQuantization

DtypeName = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[DtypeName, ...] = ("float32", "bfloat16", "float16")
QkNorm = Literal["head", "full"]
ScoreFunction = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding of whole heads. `scaling` holds the type's parameters under transformers' names, without nulls.

    interleaved   the checkpoint stores the two values of a pair side by side; False: half a head apart
    """

    rope_type: str = "default"
    rope_theta: float = 10_000.0
    scaling: Mapping[str, float | bool] = field(default_factory=dict, hash=False)
    interleaved: bool = False


@dataclass(frozen=True, kw_only=True)
class GqaSpec:
    """Grouped-query attention of one layer over all tokens before.

    qk_norm    RMS norm of q and k before the rotation: per head, over all heads together ("full"), or None
    clip_qkv   bound on the absolute values of q, k and v after the norm, None for no bound
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    qk_norm: QkNorm | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    clip_qkv: float | None = None

    @property
    def q_size(self) -> int:
        """Width of all query heads together; may differ from hidden_size."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        scale: float = self.head_dim**-0.5
        return scale

    @property
    def kernel_spec(self) -> AttentionSpec:
        """The spec of this layer for the attention kernels."""
        return AttentionSpec(self.num_heads, self.num_kv_heads, self.head_dim, self.scale)


@dataclass(frozen=True, kw_only=True)
class MlpSpec:
    """Dense gated MLP: down(activation(gate(x)) * up(x)), `width` values between."""

    width: int
    activation: Activation


@dataclass(frozen=True, kw_only=True)
class RouterSpec:
    """Choice of `top_k` experts by the score of their logits, and their weights.

    renormalise   divide the weights of a token by their sum
    scaling       factor on the weights
    """

    top_k: int
    renormalise: bool
    score: ScoreFunction = "softmax"
    scaling: float = 1.0


@dataclass(frozen=True, kw_only=True)
class SharedExpertSpec:
    """Dense MLP beside the routed experts. `gated`: its output is multiplied by sigmoid(x @ gate)."""

    width: int
    activation: Activation
    gated: bool


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """Routed experts, each a gated MLP of `width`, and maybe a shared expert beside them."""

    num_experts: int
    width: int
    activation: Activation
    router: RouterSpec
    shared: SharedExpertSpec | None = None


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One decoder layer: attention, then an MLP or experts, each behind a norm and added to the residual."""

    attention: GqaSpec
    mlp: MlpSpec | MoeSpec


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model as its checkpoint describes it; `dtype` is the dtype of the checkpoint.

    moe   the experts of every layer that has experts; one kind today, because kernels are built once for all layers
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    moe: MoeSpec
    norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    quantization: BlockQuantization | None
    dtype: DtypeName
    eos_token_ids: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @property
    def num_moe_layers(self) -> int:
        """Number of decoder layers that have experts."""
        return sum(isinstance(layer.mlp, MoeSpec) for layer in self.layers)

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        """The specs of all layers for the attention kernels."""
        return tuple(layer.attention.kernel_spec for layer in self.layers)

    @property
    def attention(self) -> GqaSpec:
        """The attention of every layer; one kind today, as for `moe`."""
        return self.layers[0].attention

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer."""
        return self.moe.num_experts

    @property
    def top_k(self) -> int:
        """Routed experts per token."""
        return self.moe.router.top_k
