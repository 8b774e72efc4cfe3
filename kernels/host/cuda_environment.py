"""Environment variables that a process sets before it uses a GPU. Imports no torch, because it runs before torch.

Multicast over NVLink stays off in NCCL, torch's symmetric memory and NVSHMEM: a program that dies while it uses it can
leave a host's GPUs unusable for all programs. Compiled kernels go to one folder for all ranks of a host.
"""

import os
import sys
from collections.abc import Mapping, MutableMapping

from kernels.host.cache_folder import cache_folder, use_cache_folder

MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}

FLASHINFER = ("FLASHINFER_WORKSPACE_BASE", "flashinfer")


class MulticastError(RuntimeError):
    """A library might use NVLink multicast in this process; the message names the wrong variables."""


def check_multicast_off(environment: Mapping[str, str]) -> None:
    """Raise MulticastError with every variable that differs from MULTICAST_OFF."""
    wrong = [
        f"{name} is {environment.get(name) or 'not set'}, needed is {value}"
        for name, value in MULTICAST_OFF.items()
        if environment.get(name) != value
    ]
    if wrong:
        raise MulticastError(
            "NVLink multicast must stay off in a rank's process, from before CUDA starts: "
            + "; ".join(wrong)
        )


def prepare(environment: MutableMapping[str, str], cache: str | None = None) -> None:
    """Prepare a process that starts ranks itself: no multicast, and compiled kernels in the shared folder."""
    environment.update(MULTICAST_OFF)
    share_compiled_kernels(environment, cache)


def share_compiled_kernels(environment: MutableMapping[str, str], cache: str | None = None) -> None:
    """Set the folders of kernels that compile at first use, below the cache folder.

    cache   the cache folder, whatever variables are set; None = the one of this process, and set variables stay

    flashinfer reads its variable once, at import; DeepGEMM and Triton read theirs at each compilation.
    """
    use_cache_folder(cache)
    folder = cache_folder()
    for name, place in (
        ("DG_JIT_CACHE_DIR", "deep_gemm"),
        FLASHINFER,
        ("TRITON_CACHE_DIR", "triton"),
    ):
        if cache is not None or name not in environment:
            environment[name] = str(folder / place)


def add_own_programs(environment: MutableMapping[str, str]) -> None:
    """Add the folder of this Python's programs to PATH: pip installs ninja there, which flashinfer starts by its name.

    A command of a virtual environment that is not activated does not have the folder in its PATH.
    """
    folders = [folder for folder in environment.get("PATH", "").split(os.pathsep) if folder]
    own = os.path.dirname(sys.executable)
    if own not in folders:
        environment["PATH"] = os.pathsep.join([*folders, own])


def own_flashinfer_folder(environment: Mapping[str, str]) -> bool:
    """Return whether flashinfer's modules are in the cache folder, which no other program uses."""
    name, place = FLASHINFER
    return environment.get(name) == str(cache_folder() / place)
