"""Lists the kernel backends that were not chosen: whether they could run here, and why not. Starts nothing."""

from collections.abc import Mapping

import torch

from kernels.backends import select
from kernels.interface.backend import BackendShape
from kernels.interface.config import KernelsConfig
from kernels.interface.registry import SEAMS

ASSUMED = (
    "no GPU is here: assumed are NVIDIA GPUs of compute capability 9.0 (Hopper) that reach each other, and every "
    "backend's package in a version that works; only shapes were checked"
)


def probe_or_assume(device: str) -> tuple[Mapping[str, str], str]:
    """Return the backends that cannot run on this machine, and what was assumed ("" where all of it was probed)."""
    if device == "cuda" and not torch.cuda.is_available():
        return {}, ASSUMED
    return select.probe(device), ""


def alternatives(
    selection: select.Selection, unavailable: Mapping[str, str], shape: BackendShape
) -> dict[str, dict[str, str]]:
    """For each seam the backends that were not chosen, each with the reason why it cannot run, or ""."""
    chosen = selection.names()
    return {
        seam: {
            name: _refusal(chosen | {seam: name}, seam, unavailable, shape)
            for name in SEAMS[seam]
            if name != chosen_name
        }
        for seam, chosen_name in chosen.items()
    }


def _refusal(
    names: dict[str, str], seam: str, unavailable: Mapping[str, str], shape: BackendShape
) -> str:
    try:
        select.select(KernelsConfig(**names), unavailable, shape)
    except select.BackendChoiceError as error:
        if error.key == f"kernels.{seam}":
            return error.reason
        return f"{error.key[8:]} {error.value} cannot run with it: {error.reason}"
    return ""
