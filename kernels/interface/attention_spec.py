"""The shape of one layer's attention, as data. Imports no torch. Knows nothing of model families or caches."""

from dataclasses import dataclass


@dataclass(frozen=True)
class MlaDims:
    """Multi-head latent attention (MLA): all heads of K and V of a token are projections of one cached latent.

    rank       values of the latent
    rope_dim   values of the rotated key that all heads share, cached beside the latent
    nope_dim   values of a head's key that come from the latent; heads of q and k have nope_dim + rope_dim values
    value_dim  values of a head of v and of the output
    """

    rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int

    @property
    def width(self) -> int:
        """Values that a token caches."""
        return self.rank + self.rope_dim


@dataclass(frozen=True)
class AttentionSpec:
    """Causal attention of one layer: `num_heads` query heads over `num_kv_heads` heads of K and V.

    head_dim   values of a head of q, k and v
    scale      factor on the scores before the softmax
    window     tokens that a query attends to, its own included; None: its whole sequence
    sinks      each query head has a sink: a score without a key and value, which takes a part of the softmax
    fp8_cache  K and V are cached in e4m3, with a scale for each token and head; of latent attention the latents, with a
               scale for each token
    mla        sizes of latent attention, which has num_kv_heads of 1 and head_dim for q and k alone; None: heads of
               K and V are cached
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    mla: MlaDims | None = None
    sinks: bool = False
    fp8_cache: bool = False

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads
