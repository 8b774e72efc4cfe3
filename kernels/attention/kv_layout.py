"""What a layer keeps in the KV cache: shape and bytes. Imports no torch. Knows nothing of requests or free blocks.

A cache consists of blocks of `block_size` tokens. Block b of a sequence's block table is block b in the cache of every
layer, whatever the layer's layout, so one block table serves all layers of a model.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

from kernels.attention.spec import AttentionSpec


class KVLayout(ABC):
    """The cache of one layer. Layouts are values: equal layouts have equal shapes."""

    @abstractmethod
    def shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        """Return the shape of one layer's cache tensor."""

    def block_values(self, block_size: int) -> int:
        """Return how many values one block of one layer has."""
        return math.prod(self.shape(1, block_size))


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


@dataclass(frozen=True)
class PagedLatents(KVLayout):
    """One latent of every token and the rotated key beside it, for all heads: [num_blocks, block_size, width]."""

    width: int

    def shape(self, num_blocks: int, block_size: int) -> tuple[int, ...]:
        return num_blocks, block_size, self.width


def layout_of(spec: AttentionSpec) -> KVLayout:
    """Return the layout of a layer's cache in every backend that declares no other."""
    return PagedHeads.of(spec) if spec.latent is None else PagedLatents(spec.latent.width)


@dataclass(frozen=True)
class KVGroup:
    """Layers of one layout, in ascending order."""

    layout: KVLayout
    layers: tuple[int, ...]


def group_layers(layouts: Iterable[KVLayout]) -> tuple[KVGroup, ...]:
    """Group layers by layout; `layouts` has one entry a layer. Groups are in the order of their first layers."""
    layers: dict[KVLayout, list[int]] = {}
    for layer, layout in enumerate(layouts):
        layers.setdefault(layout, []).append(layer)
    return tuple(KVGroup(layout, tuple(members)) for layout, members in layers.items())


def kv_block_bytes(groups: Iterable[KVGroup], block_size: int, value_bytes: int) -> int:
    """Return the bytes of one block over all layers, for values of `value_bytes` bytes."""
    values = sum(len(group.layers) * group.layout.block_values(block_size) for group in groups)
    return values * value_bytes
