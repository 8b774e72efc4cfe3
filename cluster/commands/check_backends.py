"""Which kernel backends besides the chosen ones could run here, and why the others cannot. Starts nothing."""

from typing import Any, get_args

import torch

from kernels.backends import select
from kernels.backends.config import KernelsConfig

ASSUMED = (
    "no GPU is here: assumed are NVIDIA GPUs of compute capability 9.0 (Hopper) that reach each other, and every "
    "backend's package in a version that works; only shapes were checked"
)


def capabilities(device: str) -> tuple[select.Capabilities, str]:
    """What this machine offers, and what of it is assumed ("" where all of it was looked at)."""
    if device == "cuda" and not torch.cuda.is_available():
        return select.Capabilities("cuda", {"shm": "it exchanges CPU tensors only"}), ASSUMED
    return select.probe(device), ""


def alternatives(
    selection: select.Selection, found: select.Capabilities, model: dict[str, Any]
) -> dict[str, dict[str, str]]:
    """Family to the names that were not chosen, each with why it cannot run beside the other choices, or "".

    `model` is what `select` wants to know of the model and the ranks.
    """
    chosen = selection.names()
    result: dict[str, dict[str, str]] = {}
    for family, name_here in chosen.items():
        names = get_args(KernelsConfig.model_fields[family].annotation)
        result[family] = {
            name: _obstacle(chosen | {family: name}, family, found, model)
            for name in names
            if name not in ("auto", name_here)
        }
    return result


def _obstacle(
    names: dict[str, str], family: str, found: select.Capabilities, model: dict[str, Any]
) -> str:
    try:
        select.select(KernelsConfig(**names), found, **model)
    except select.BackendChoiceError as error:
        if error.key == f"kernels.{family}":
            return error.reason
        return f"{error.key[8:]} {error.value} cannot run with it: {error.reason}"
    return ""
