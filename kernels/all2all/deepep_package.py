"""The package `deep_ep`: what its versions lack, and whether the ranks of a group live. Knows no all-to-all.

`Buffer` of DeepEP 1.2.1 is tested. DeepEP 2.x has the same class, and was never run here.
"""

import functools
import inspect
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

NEEDED_VERSION = "1.2.1"
MIN_CAPABILITY = (9, 0)
DISTRIBUTIONS = ("deep_ep", "sgl-deep-ep")
NEEDED = {  # method of Buffer to a parameter that early versions lack
    "__init__": "explicitly_destroy",
    "dispatch": "num_worst_tokens",
    "combine": "config",
    "get_dispatch_layout": "num_experts",
    "low_latency_dispatch": "return_recv_hook",
    "low_latency_combine": "return_recv_hook",
    "clean_low_latency_buffer": "num_experts",
}
CLOSE_TIMEOUT_S = 5.0


class DeepEpUnavailableError(RuntimeError):
    """DeepEP cannot be used here. The message has the reason, the version found and the version needed."""


def load_deep_ep() -> Any:
    """Return the module `deep_ep`. Raises DeepEpUnavailableError where it is missing, broken or too old."""
    needed = f"{NEEDED_VERSION} or newer is needed"
    if "deep_ep" not in sys.modules and find_spec("deep_ep") is None:
        raise DeepEpUnavailableError(f"deep_ep is not installed, {needed}")
    try:
        import deep_ep
    except Exception as error:  # assertions about NCCL and CUDA_HOME, undefined symbols, no GPU
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise DeepEpUnavailableError(
            f"import deep_ep failed ({installed_version()} is installed, {needed}): {said[0]}"
        ) from error
    buffer = getattr(deep_ep, "Buffer", None)
    lacking = [
        f"Buffer.{method}({parameter})"
        for method, parameter in NEEDED.items()
        if parameter not in _parameters(getattr(buffer, method, None))
    ]
    if lacking:
        raise DeepEpUnavailableError(
            f"deep_ep {installed_version()} is installed, {needed}: it has no {', '.join(lacking)}"
        )
    return deep_ep


@functools.cache
def deep_ep_unavailable() -> str | None:
    """Return why the package cannot be used, or None."""
    try:
        load_deep_ep()
    except DeepEpUnavailableError as error:
        return str(error)
    return None


def peers_are_here(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Return whether all ranks call this within CLOSE_TIMEOUT_S. DeepEP would wait 100 s for a dead rank."""
    try:
        work = dist.all_reduce(torch.zeros(1, device=device), group=group, async_op=True)
        deadline = time.monotonic() + CLOSE_TIMEOUT_S
        while not work.is_completed():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        work.wait()  # raises if a peer failed
    except RuntimeError:
        return False
    return True


def _parameters(function: Any) -> tuple[str, ...]:
    return () if function is None else tuple(inspect.signature(function).parameters)


def installed_version() -> str:
    """Return the version of the installed distribution of deep_ep."""
    for distribution in DISTRIBUTIONS:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return str(getattr(sys.modules.get("deep_ep"), "__version__", "an unknown version"))


def nvshmem_unavailable() -> str | None:
    """Return that the package was built without NVSHMEM, or None. Only 1.2.1 can be, and names NVSHMEM nowhere else."""
    extension = getattr(sys.modules.get("deep_ep_cpp"), "__file__", None)
    if extension is None or b"NVSHMEM is disabled" not in Path(extension).read_bytes():
        return None
    return f"deep_ep {installed_version()} was built without NVSHMEM, which it needs"
