"""Attention over the paged KV cache. T tokens, H query heads, h KV heads, d head dim, B sequences."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import torch


class AttentionBatch(Protocol):
    """What attention reads of a ForwardBatch. Sequences with one new token come first.

    num_tokens            real tokens; rows beyond are padding, whose output is undefined but finite
    num_seqs, num_decodes sequences; the first num_decodes of them have exactly one new token
    query_start_loc_cpu   int32 [B+1] numpy, seq_lens_cpu int32 [B] numpy (context + new tokens)
    block_table           int64 [B, max_blocks] on the device, entries beyond a sequence's blocks are 0
    slot_mapping          int64 [num_tokens] on the device: block * block_size + offset of each new token
    """

    num_tokens: int
    num_seqs: int
    num_decodes: int
    query_start_loc_cpu: np.ndarray
    seq_lens_cpu: np.ndarray
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class GraphForm(IntEnum):
    """What the attention of a captured forward can compute.

    EVEN_DECODES  decodes of which none is much longer than the others; a little faster
    DECODES       any decodes
    NEW_PROMPTS   decodes, and prompts of which nothing was computed before; faster
    MIXED         decodes and any prompts
    """

    EVEN_DECODES = 0
    DECODES = 1
    NEW_PROMPTS = 2
    MIXED = 3


@dataclass(frozen=True)
class AttentionSpec:
    """The shape of one layer's attention. `scale` multiplies the scores."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    scale: float


class Attention(ABC):
    """plan() once a forward, then one call a layer, which also writes the new K and V to the cache.

    On GPUs it calls `wait_previous_ubatch` between what writes and what reads the cache.
    """

    name: str
    # Whether decodes can be planned for CUDA graphs: reserve_graphs, forms, form, plan_graph.
    graph: bool = False
    # Whether prompts can too; known when the caches are bound.
    mixed_graph: bool = False
    # Whether it has `norm_rotate_store` and `attend`, which together do all that comes after the QKV projection.
    fuses_qk_norm: bool = False

    def __init__(self, spec: AttentionSpec):
        self.spec = spec
        self.kv_caches: Sequence[torch.Tensor] = ()

    def bind(self, kv_caches: Sequence[torch.Tensor]) -> None:
        """One cache a layer: [2, num_blocks, block_size, h, d], K first, then V."""
        self.kv_caches = kv_caches

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> None:
        """Prepare what all layers of this forward share."""

    @abstractmethod
    def __call__(
        self, q_THd: torch.Tensor, k_Thd: torch.Tensor, v_Thd: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """Causal attention of the new tokens over their sequences: o_THd in q's dtype."""

    def norm_rotate_store(
        self,
        qkv_TMd: torch.Tensor,
        weight_Nd: torch.Tensor,
        eps: float,
        rotation_T1d: torch.Tensor,
        layer: int,
    ) -> None:
        """Norm q and k per head and rotate them in place, write K and V to the cache, for `attend`.

        qkv [T, H + 2h, d]; weight [H + h, d]; rotation complex64 [T, 1, d/2] of interleaved pairs.
        """
        raise NotImplementedError(f"{self.name} leaves this to the model")

    def attend(self, qkv_TMd: torch.Tensor, layer: int) -> torch.Tensor:
        """Attention over a cache that has the new K and V already, q, k and v as in it: o_THd in qkv's dtype."""
        raise NotImplementedError(f"{self.name} writes K and V itself")
