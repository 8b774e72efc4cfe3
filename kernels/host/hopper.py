"""Detection of Hopper GPUs."""

import torch

HOPPER = 9  # compute capability, major


def on_hopper(device: torch.device | None = None) -> bool:
    """Return whether `device` is Hopper, with FlashAttention 3 and products of warp groups. None: the current GPU."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device)[0] == HOPPER
