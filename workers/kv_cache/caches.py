"""Allocates the KV caches of a model's layers. Knows nothing of requests or of which blocks are free."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from kernels.interface.kv_layout import KVGroup


def allocate_kv_caches(
    groups: Sequence[KVGroup],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[torch.Tensor]:
    """Return a zeroed tensor for each layer, in the shape of its layout; `groups` hold every layer once.

    Layers that share a cache get the same tensor.
    """
    caches: dict[int, torch.Tensor] = {}
    for group in groups:
        for layers in group.caches:
            of_layout = torch.uint8 if group.layout.in_bytes else dtype
            shared = _zeros(group.layout.shape(num_blocks, block_size), of_layout, device)
            caches |= dict.fromkeys(layers, shared)
    return [caches[layer] for layer in range(len(caches))]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros take memory when they are first written; torch's take all of it at once.
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
