"""What a process sets in its environment before it touches a GPU. Imports nothing: it runs before torch does.

Multicast over NVLink stays off in NCCL, torch's symmetric memory and NVSHMEM: a program that dies while it uses it can
leave a host's GPUs unusable for everybody. Compiled kernels go to one folder for all ranks of a host.
"""

from collections.abc import Mapping, MutableMapping

from kernels.host.cache_folder import cache_folder

MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}


class MulticastError(RuntimeError):
    """A library might use NVLink multicast in this process; the message says which setting is off."""


def check_multicast_off(environment: Mapping[str, str]) -> None:
    """Raise MulticastError with every variable that is not as MULTICAST_OFF has it."""
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


def prepare(environment: MutableMapping[str, str]) -> None:
    """For a process that starts ranks of its own: no multicast, and compiled kernels in the shared folder."""
    environment.update(MULTICAST_OFF)
    share_compiled_kernels(environment)


def share_compiled_kernels(environment: MutableMapping[str, str]) -> None:
    """Let what compiles at first use keep its results under the cache folder, unless told where before.

    flashinfer looks once, when it is imported; the others at each compilation.
    """
    folder = cache_folder()
    for name, place in (
        ("DG_JIT_CACHE_DIR", "deep_gemm"),
        ("FLASHINFER_WORKSPACE_BASE", "flashinfer"),
        ("TRITON_CACHE_DIR", "triton"),
    ):
        environment.setdefault(name, str(folder / place))
