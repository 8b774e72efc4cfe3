"""What the launches of Triton's kernels take: steps of any size whose slices begin anywhere.

N rows, K experts per row.
"""

from collections.abc import Sequence

import torch

from kernels.attention.fp8_latents import latent_parts
from kernels.attention.fp8_pages import Fp8Pages
from kernels.interface.attention_spec import AttentionSpec, MlaDims
from kernels.interface.kv_layout import layout_of

# One, a multiple of 16, and neither; 16 and 17 rows of 8 experts are both one chunk of pairs.
SIZES = (5, 1, 16, 17)
OFFSETS = (0, 1, 2)
WIDTH, TOP_K, EXPERTS, HEADS, HEAD_DIM, BLOCK = 64, 8, 32, 4, 64, 16


class Inputs:
    """Tensors as a step's are: fresh ones are aligned, slices of the batch's begin anywhere."""

    def __init__(self, device: str, size: int, offset: int):
        self.device, self.size, self.offset = device, size, offset

    def rows(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Zeros, fresh."""
        return torch.zeros(self.size, *shape, dtype=dtype, device=self.device)

    def slice(self, *shape: int) -> torch.Tensor:
        """int64 zeros behind `offset` rows of others."""
        whole = torch.zeros(self.offset + self.size, *shape, dtype=torch.int64, device=self.device)
        return whole[self.offset :]

    def ids(self) -> torch.Tensor:
        """int64 [N, K], each row's ids different."""
        return torch.arange(TOP_K, device=self.device).repeat(self.size, 1)

    def caches(self, head_dim: int = HEAD_DIM) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer."""
        shape = (4, BLOCK, HEADS, head_dim)
        return self.rows()[:0].new_zeros(shape), self.rows()[:0].new_zeros(shape)

    def fp8_caches(self, head_dim: int = HEAD_DIM) -> Sequence[torch.Tensor]:
        """K and V of a layer in e4m3, and their exponents."""
        spec = AttentionSpec(HEADS, HEADS, head_dim, 1.0, fp8_cache=True)
        cache = torch.zeros(layout_of(spec).shape(4, BLOCK), dtype=torch.uint8, device=self.device)
        return Fp8Pages(cache, spec, BLOCK).tensors

    def latents(self, *, fp8: bool) -> Sequence[torch.Tensor]:
        """Latents and rotated keys of a layer in DeepSeek's sizes, in e4m3 with their exponents."""
        spec = AttentionSpec(HEADS, 1, 192, 1.0, mla=MlaDims(512, 64, 128, 128), fp8_cache=fp8)
        dtype = torch.uint8 if fp8 else torch.bfloat16
        cache = torch.zeros(layout_of(spec).shape(4, BLOCK), dtype=dtype, device=self.device)
        return latent_parts(cache, spec, BLOCK)
