"""The paged KV cache: which blocks are whose, and how many fit. Knows nothing of requests."""

import math

import numpy as np
import torch

from workers.models.config import Qwen3MoeConfig


def allocate_kv_caches(
    config: Qwen3MoeConfig,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[torch.Tensor]:
    """One zeroed tensor a layer: [2, num_blocks, block_size, kv heads, head_dim]."""
    shape = (2, num_blocks, block_size, config.num_key_value_heads, config.head_dim)
    return [_zeros(shape, dtype, device) for _ in range(config.num_hidden_layers)]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros take memory when they are first written; torch's take all of it at once.
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)


class BlockPool:
    """Blocks with reference counts; a block is free again when its last holder releases it."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks nobody holds."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of blocks held, 0 to 1."""
        return 1 - self.num_free / self.num_blocks

    def allocate(self, count: int) -> list[int]:
        """`count` free blocks, held once. The caller has checked `num_free`."""
        assert count <= self.num_free, f"asked for {count} blocks, {self.num_free} are free"
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: list[int]) -> None:
        """One more holder for each of `blocks`, which must be held already."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is free and cannot be shared"
            self._references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One holder fewer for each of `blocks`."""
        for block in blocks:
            assert self._references[block] > 0, f"block {block} is released but not held"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)
