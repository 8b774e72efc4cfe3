"""What a layer keeps in the KV cache: shape and bytes. Imports no torch. Knows nothing of requests or free blocks.

A cache consists of blocks of `block_size` tokens. Block b of a sequence's block table is block b in the cache of every
layer, whatever the layer's layout, so one block table serves all layers of a model.

Layers with a window have a block table of their own, because their old blocks are freed. The i-th layer with a window
and the i-th layer without share one cache: a block is in one of the two block tables, and holds tokens of the layers
of that table.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import ClassVar

from kernels.interface.attention_spec import AttentionSpec, MlaDims


class KVLayout(ABC):
    """The cache of one layer. Layouts are values: equal layouts have equal shapes."""

    @abstractmethod
    def shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Return the shape of one layer's cache tensor."""

    # Whether a cache is a tensor of bytes, whatever the model's dtype.
    in_bytes: ClassVar[bool] = False

    def block_bytes(self, block_size: int, value_bytes: int) -> int:
        """Return the bytes of one block of one layer, for a model with values of `value_bytes` bytes."""
        return math.prod(self.shape(1, block_size)) * (1 if self.in_bytes else value_bytes)

    def piece_bytes(self, block_size: int, value_bytes: int) -> tuple[int, ...]:
        """Return the bytes of each piece of a block; a cache has the first pieces of all blocks, then the second."""
        return (self.block_bytes(block_size, value_bytes),)


@dataclass(frozen=True)
class PagedHeads(KVLayout):
    """K and V of every token, head by head: [2, num_blocks, block_size, num_kv_heads, head_dim], K first, then V."""

    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, spec: AttentionSpec) -> "PagedHeads":
        """Return the layout for K and V of this attention."""
        return cls(spec.num_kv_heads, spec.head_dim)

    def shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return 2, num_blocks, block_size, self.num_kv_heads, self.head_dim

    def piece_bytes(self, block_size: int, value_bytes: int) -> tuple[int, ...]:
        return 2 * (self.block_bytes(block_size, value_bytes) // 2,)


@dataclass(frozen=True)
class PagedFp8Heads(KVLayout):
    """K and V of every token in e4m3, and the exponent of a power-of-two scale for each token and head.

    One tensor of bytes: the values of all blocks, [2, num_blocks, block_size, num_kv_heads, head_dim], K first, then V;
    behind them the exponents, [2, num_blocks, num_kv_heads, block_size]. `Fp8Pages` has the views.
    """

    num_kv_heads: int
    head_dim: int
    in_bytes = True

    @classmethod
    def of(cls, spec: AttentionSpec) -> "PagedFp8Heads":
        """Return the layout for K and V of this attention."""
        return cls(spec.num_kv_heads, spec.head_dim)

    def shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return (2 * num_blocks * block_size * self.num_kv_heads * (self.head_dim + 1),)

    def piece_bytes(self, block_size: int, value_bytes: int) -> tuple[int, ...]:
        exponents = block_size * self.num_kv_heads
        return (*2 * (exponents * self.head_dim,), *2 * (exponents,))


@dataclass(frozen=True)
class PagedLatents(KVLayout):
    """One latent of every token and the rotated key beside it, for all heads: [num_blocks, block_size, width]."""

    width: int

    def shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return num_blocks, block_size, self.width


@dataclass(frozen=True)
class PagedFp8Latents(KVLayout):
    """The latent of every token in e4m3 with the exponent of a power-of-two scale, and the rotated key in bfloat16.

    One tensor of bytes: the keys of all blocks, [num_blocks, block_size, rope_dim] of two bytes each, the latents,
    [num_blocks, block_size, rank], and the exponents, [num_blocks, block_size]. `Fp8Latents` has the views.
    """

    rank: int
    rope_dim: int
    in_bytes = True

    @classmethod
    def of(cls, mla: MlaDims) -> "PagedFp8Latents":
        """Return the layout for latents of these sizes."""
        return cls(mla.rank, mla.rope_dim)

    def shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return (num_blocks * block_size * (2 * self.rope_dim + self.rank + 1),)


def layout_of(spec: AttentionSpec) -> KVLayout:
    """Return the layout of a layer's cache in every backend that declares no other."""
    if spec.mla is not None:
        return PagedFp8Latents.of(spec.mla) if spec.fp8_cache else PagedLatents(spec.mla.width)
    return PagedFp8Heads.of(spec) if spec.fp8_cache else PagedHeads.of(spec)


@dataclass(frozen=True)
class KVGroup:
    """Layers of one layout, in ascending order: those over all tokens, and those with a window."""

    layout: KVLayout
    layers: tuple[int, ...]
    window_layers: tuple[int, ...] = ()

    @property
    def caches(self) -> tuple[tuple[int, ...], ...]:
        """The layers of each cache."""
        pairs = zip_longest(self.layers, self.window_layers)
        return tuple(tuple(layer for layer in pair if layer is not None) for pair in pairs)


def group_layers(
    layouts: Iterable[KVLayout], windows: Iterable[int | None] = ()
) -> tuple[KVGroup, ...]:
    """Group layers by layout; `layouts` has one entry a layer. Groups are in the order of their first layers.

    windows   of each layer, None for a layer over all tokens; empty: no layer has one
    """
    layers: dict[KVLayout, tuple[list[int], list[int]]] = {}
    for layer, (layout, window) in enumerate(zip_longest(layouts, windows)):
        layers.setdefault(layout, ([], []))[window is not None].append(layer)
    return tuple(
        KVGroup(layout, tuple(whole), tuple(windowed))
        for layout, (whole, windowed) in layers.items()
    )


def kv_block_bytes(groups: Iterable[KVGroup], block_size: int, value_bytes: int) -> int:
    """Return the bytes of one block over all layers, for a model with values of `value_bytes` bytes."""
    return sum(
        len(group.caches) * group.layout.block_bytes(block_size, value_bytes) for group in groups
    )
