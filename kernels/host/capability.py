"""The compute capability of a GPU against the one that a kernel needs."""

import torch


def too_old_gpu(device: torch.device, needed: tuple[int, int]) -> str | None:
    """Return why the GPU `device` is too old, or None; None for a CPU."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_capability(device)
    if found >= needed:
        return None
    return "it needs compute capability {}.{}, found {}.{}".format(*needed, *found)
