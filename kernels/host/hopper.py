"""What runs on Hopper only."""

import torch

HOPPER = 9  # compute capability, major


def on_hopper(device: torch.device | None = None) -> bool:
    """Whether this GPU, None: the current one, has FlashAttention 3 and products of groups of warps."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == HOPPER
