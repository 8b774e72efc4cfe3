"""A start that runs out of memory says for what, how much was asked for, and what to lower, whatever library failed."""

import sys
from types import SimpleNamespace

import pytest
import torch

from kernels.all2all import peer_memory
from kernels.all2all.peer_memory import (
    HEADER_BYTES,
    PeerMemory,
    PeerMemoryError,
    peer_memory_unavailable,
)
from workers.rank import device_memory
from workers.rank.device_memory import REMEDIES, OutOfDeviceMemoryError, memory_for

NCCL = """NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO), NCCL version 2.28.9
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 2 'out of memory'"""
ASYNCHRONOUS = "CUDA error: out of memory\nCUDA kernel errors might be reported at some other call."


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a"),
            "2.50 GiB",
        ),
        (torch.AcceleratorError(ASYNCHRONOUS), ": CUDA error: out of memory. "),
        (torch.distributed.DistBackendError(NCCL), ": Cuda failure 2 'out of memory'. "),
        (
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
            "cublasCreate",
        ),
        (RuntimeError("cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"), "cuMemCreate: "),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "Triton Error"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_all_of_a_gpus_libraries_are_understood(error: Exception, says: str) -> None:
    with pytest.raises(OutOfDeviceMemoryError) as caught, memory_for("a step", 1_500_000_000):
        raise error
    said = str(caught.value)
    assert said.startswith("the GPU has no room for a step (1.5 GB): ") and says in said
    assert said.endswith(REMEDIES["a step"]) and caught.value.__cause__ is error


def test_torch_on_a_cpu() -> None:
    with (
        pytest.raises(
            OutOfDeviceMemoryError, match=r"^this machine .*: torch tried to allocate 4\d+ "
        ),
        memory_for("the weights"),
    ):
        torch.empty(2**62, dtype=torch.uint8)


@pytest.mark.parametrize(
    "error", [RuntimeError("CUDA error: an illegal memory access"), ValueError("out of memory")]
)
def test_other_errors_stay_what_they_are(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, memory_for("a step"):
        raise error
    assert caught.value is error


def test_who_holds_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = SimpleNamespace(
        mem_get_info=lambda: (10 * 10**9, 140 * 10**9),
        memory_allocated=lambda: 90 * 10**9,
        memory_reserved=lambda: 100 * 10**9,
    )
    monkeypatch.setattr(device_memory.torch, "cuda", cuda)
    with pytest.raises(OutOfDeviceMemoryError) as caught, memory_for("the KV cache", 20 * 10**9):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512.00 MiB.")
    assert str(caught.value).startswith(
        "the GPU has no room for the KV cache (20.0 GB): torch tried to allocate 512.00 MiB; of 140.0 GB this rank "
        "holds 90.0 GB already, other programs and CUDA 30.0 GB. Lower cache.num_blocks"
    )


def shared(monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> None:
    """Ask for memory that ranks share, where that ends so."""
    from torch.distributed import _symmetric_memory as symm_mem

    def empty_strided_p2p(*args: object) -> torch.Tensor:
        raise error

    monkeypatch.setenv(peer_memory.NO_MULTICAST, "1")
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    fake = SimpleNamespace(empty_strided_p2p=empty_strided_p2p)
    monkeypatch.setattr(symm_mem, "_SymmetricMemory", fake)
    group = SimpleNamespace(rank=lambda: 1, size=lambda: 2)
    PeerMemory(group, torch.device("cuda", 1), 5_000_000)  # type: ignore[arg-type]


def test_memory_that_ranks_share_and_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    full = RuntimeError("CUDA driver error: out of memory")
    asked = f"rank 1 cannot share {HEADER_BYTES + 5_000_000} bytes of cuda:1"
    with pytest.raises(PeerMemoryError, match=f"^{asked} .*: out of memory") as caught:
        shared(monkeypatch, full)
    assert "scheduler.max_num_batched_tokens" in str(caught.value)
    assert "allgather" not in str(caught.value), "it would need as much"
    with pytest.raises(OutOfDeviceMemoryError) as told, memory_for("the all-to-all's buffers"):
        shared(monkeypatch, full)
    assert asked in str(told.value)
    assert str(told.value).endswith(
        "Lower scheduler.max_num_batched_tokens or scheduler.max_num_seqs"
    )


def test_memory_that_ranks_cannot_share(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeerMemoryError, match="allgather needs no shared memory"):
        shared(monkeypatch, RuntimeError("CUDA driver error: operation not supported"))


def test_a_torch_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed._symmetric_memory", None)
    says = str(peer_memory_unavailable())
    assert says.startswith(
        f"torch {torch.__version__} has no symmetric memory, 2.11 or newer is needed"
    )
