"""The shape of one layer's attention, as data. Imports no torch. Knows nothing of model families or caches."""

from dataclasses import dataclass


@dataclass(frozen=True)
class AttentionSpec:
    """Causal attention of one layer: `num_heads` query heads over `num_kv_heads` heads of K and V.

    head_dim   values of a head of q, k and v
    scale      factor on the scores before the softmax
    window     tokens that a query attends to, its own included; None: its whole sequence
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_heads // self.num_kv_heads
