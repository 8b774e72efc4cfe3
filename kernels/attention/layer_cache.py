"""The cache of one layer as torch's operators read and write it, in the model's dtype or in e4m3.

T tokens, L keys, h KV heads, d head dim.
"""

import torch

from kernels.attention.fp8_pages import Fp8Pages, round_heads, widen
from kernels.interface.attention_spec import AttentionSpec


class Cache:
    """One layer's spec, and flat views of its cache: whole blocks for reading, slots for writing."""

    def __init__(self, spec: AttentionSpec, kv_cache: torch.Tensor):
        self.spec = spec
        _, num_blocks, block_size, num_kv_heads, head_dim = kv_cache.shape
        self.k_blocks, self.v_blocks = kv_cache.view(2, num_blocks, -1).unbind(0)
        slots = kv_cache.view(2, num_blocks * block_size, num_kv_heads * head_dim)
        self.k_slots, self.v_slots = slots.unbind(0)

    def store(
        self, k_Thd: torch.Tensor, v_Thd: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new K and V to their slots; return them as a reader of the cache finds them."""
        self.k_slots.index_copy_(0, slots, k_Thd.flatten(1))
        self.v_slots.index_copy_(0, slots, v_Thd.flatten(1))
        return k_Thd, v_Thd

    def read(self, blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return k_Lhd and v_Lhd of all tokens of these blocks in the model's dtype; blocks is int64 [any]."""
        paged = (-1, self.spec.num_kv_heads, self.spec.head_dim)
        return (
            self.k_blocks.index_select(0, blocks).view(paged),
            self.v_blocks.index_select(0, blocks).view(paged),
        )


class Fp8Cache(Cache):
    """The same over a cache in e4m3."""

    def __init__(self, spec: AttentionSpec, kv_cache: torch.Tensor, block_size: int):
        self.spec, self._block_size = spec, block_size
        self.pages = Fp8Pages(kv_cache, spec, block_size)
        k, v, *exponents = self.pages.tensors
        # As bytes, because few operators take e4m3.
        self._blocks = [values.view(torch.uint8).flatten(1) for values in (k, v)]
        self._slots = [values.view(torch.uint8).flatten(0, 1).flatten(1) for values in (k, v)]
        self._exponents = exponents

    def store(
        self, k_Thd: torch.Tensor, v_Thd: torch.Tensor, slots: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        blocks, offsets = slots // self._block_size, slots % self._block_size
        stored = []
        places = zip(self._slots, self._exponents, (k_Thd, v_Thd), strict=True)
        for values, exponents, x_Thd in places:
            new_Thd, new_Th = round_heads(x_Thd)
            values.index_copy_(0, slots, new_Thd.view(torch.uint8).flatten(1))
            exponents[blocks, :, offsets] = new_Th
            stored.append(widen(new_Thd, new_Th, x_Thd.dtype))
        return stored[0], stored[1]

    def read(self, blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        paged = (-1, self.spec.num_kv_heads, self.spec.head_dim)
        found = []
        for values, exponents in zip(self._blocks, self._exponents, strict=True):
            of_Lhd = values.index_select(0, blocks).view(torch.float8_e4m3fn).view(paged)
            of_Lh = exponents.index_select(0, blocks).transpose(1, 2).flatten(0, 1)
            found.append(widen(of_Lhd, of_Lh, dtype))
        return found[0], found[1]
