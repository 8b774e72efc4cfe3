"""What each all-to-all needs, in which order `auto` tries them, what they keep, and how they are built.

Used by `kernels.backends.select` alone.
"""

import os
import platform
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from kernels.all2all import deepep_choice
from kernels.all2all.allgather import AllGatherAllToAll
from kernels.all2all.base import AllToAll
from kernels.all2all.copy_engine import CopyEngineAllToAll
from kernels.all2all.deepep_limits import ExchangeShape
from kernels.all2all.local import LocalAllToAll
from kernels.all2all.payload import RowFormat
from kernels.all2all.peer_memory import HEADER_BYTES, peer_memory_missing
from kernels.all2all.shm import ShmAllToAll, slot_bytes
from kernels.all2all.symm import SymmAllToAll, peer_bytes
from kernels.all2all.torch_dist import TorchDistAllToAll
from kernels.backends.missing import Missing
from kernels.grouped_gemm.base import GroupedGemm
from kernels.grouped_gemm.choice import triton_missing
from kernels.host.shm import SHM_FOLDER, segment_bytes
from kernels.routing.permute import Permutation

if TYPE_CHECKING:
    from kernels.backends.select import BackendContext

PEER_MEMORY: dict[str, type[SymmAllToAll]] = {
    "copy_engine": CopyEngineAllToAll,
    "symm": SymmAllToAll,
}
EXCHANGES: dict[str, type[AllToAll]] = {
    "local": LocalAllToAll,
    "shm": ShmAllToAll,
    "torch_dist": TorchDistAllToAll,
    "allgather": AllGatherAllToAll,
    **PEER_MEMORY,
    **deepep_choice.EXCHANGES,
}


def missing(device: torch.device) -> Missing:
    """Backend name to why it cannot run on this machine at all."""
    found: dict[str, str] = {}
    later: dict[str, Callable[[], str | None]] = {}
    if not dist.is_available():
        found["torch_dist"] = found["allgather"] = "torch was built without distributed"
    elif device.type == "cuda" and not dist.is_nccl_available():
        found["torch_dist"] = found["allgather"] = "torch was built without NCCL"
    if device.type != "cpu":
        found["shm"] = "it exchanges CPU tensors only"
        later = {
            name: lambda name=name: deepep_choice.missing(device).get(name)
            for name in deepep_choice.NAMES
        }
        if reason := peer_memory_missing():
            found |= dict.fromkeys(PEER_MEMORY, reason)
        if reason := triton_missing():
            reason = f"rows are sorted by expert in Triton: {reason}"
            needs_triton = ("local", "torch_dist", "allgather", "deepep", *PEER_MEMORY)
            found |= dict.fromkeys(needs_triton, reason)
    elif platform.machine() not in ("x86_64", "AMD64"):
        found["shm"] = f"it relies on x86's order of stores, this is {platform.machine()}"
    elif not os.access(SHM_FOLDER, os.W_OK):
        found["shm"] = f"{SHM_FOLDER} is not writable"
    return Missing(found, later)


def order(device: str, num_ranks: int) -> dict[str, str]:
    """What `auto` tries, best first, and why."""
    if num_ranks == 1:
        return {"local": "one rank holds all experts"}
    if device == "cuda":
        return {
            "copy_engine": "GPUs of a host share memory: one kernel each way, beside other slices' compute no SM",
            "allgather": "no counts to read on the host before the experts",
            "torch_dist": "moves each row only to the ranks of its experts",
        }
    return {
        "shm": "all ranks share a host: rows go through shared memory without a copy into sockets",
        "torch_dist": "moves each row only to the ranks of its experts",
        "allgather": "equal shapes on all ranks",
    }


def unsupported_reason(
    name: str, device: str, absent: Mapping[str, str], shape: ExchangeShape
) -> str | None:
    """Why this all-to-all cannot run, or None. `absent` is what `missing` found."""
    num_ranks, num_nodes = shape.num_ranks, shape.num_nodes
    if name in absent:
        return absent[name]
    if name == "local" and num_ranks > 1:
        return f"it serves one rank, cluster.ranks is {num_ranks}"
    if name != "local" and num_ranks == 1:
        return "there is only one rank, so there is nothing to exchange"
    if name in deepep_choice.NAMES:
        return deepep_choice.unsupported_reason(name, device, shape)
    if name in PEER_MEMORY and device != "cuda":
        return "it runs on GPUs only"
    if name in ("shm", *PEER_MEMORY) and num_nodes > 1:
        return f"its ranks must share a host, cluster.nodes is {num_nodes}"
    return None


def kept_bytes(
    name: str, row_format: RowFormat, *, num_ranks: int, max_num_tokens: int, num_experts: int
) -> int:
    """Bytes that one rank's exchange of up to so many tokens holds from its start to its end."""
    if name == "shm":
        slots = slot_bytes(num_ranks, row_format, max_num_tokens)
        return segment_bytes(num_ranks, slots) // num_ranks
    if name in PEER_MEMORY:
        return HEADER_BYTES + sum(peer_bytes(num_ranks, row_format, max_num_tokens))
    if name in deepep_choice.NAMES:
        return deepep_choice.kept_bytes(
            name,
            num_ranks=num_ranks,
            hidden_size=row_format.hidden_size,
            max_num_tokens=max_num_tokens,
            num_experts=num_experts,
        )
    return 0


def step_bytes(name: str, row_format: RowFormat, *, num_ranks: int, max_num_tokens: int) -> int:
    """Bytes of the rows and sums that are allocated for one exchange of so many tokens of each rank."""
    x_bytes = row_format.hidden_size * row_format.dtype.itemsize
    both, gathered = row_format.row_bytes + x_bytes, num_ranks * max_num_tokens
    return {
        "torch_dist": 2 * min(num_ranks, row_format.top_k) * max_num_tokens * both,
        "allgather": (gathered + max_num_tokens) * both,
        "copy_engine": gathered * x_bytes,
        deepep_choice.NORMAL: (gathered + max_num_tokens) * both,
    }.get(name, 0)


def build(name: str, context: "BackendContext", grouped_gemm: GroupedGemm) -> AllToAll:
    """The exchange of one rank; collective, except for `local`."""
    placement, max_num_tokens = context.placement, context.max_num_tokens
    experts = placement.local_experts(context.rank)
    expert_order = Permutation(
        experts,
        num_experts=placement.num_experts,
        device=context.device,
        dtype=torch.int64 if name == "local" else torch.int32,
        alignment=grouped_gemm.row_alignment,
    )
    if name == "local":
        return LocalAllToAll(expert_order)
    if name in deepep_choice.NAMES:
        return deepep_choice.build(
            name,
            context.group,
            placement,
            grouped_gemm,
            device=context.device,
            hidden_size=context.hidden_size,
            max_num_tokens=max_num_tokens,
        )
    row_format = RowFormat(context.hidden_size, context.top_k, context.dtype)
    if name == "shm":
        assert context.shared_memory is not None, "shm needs a SharedMemoryGroup"
        return ShmAllToAll(context.shared_memory, experts, row_format, max_num_tokens)
    assert context.group is not None, f"{name} needs a process group"
    if name == "allgather":
        return AllGatherAllToAll(context.group, expert_order, row_format)
    kind = PEER_MEMORY.get(name, TorchDistAllToAll)
    return kind(context.group, placement, expert_order, row_format, context.device, max_num_tokens)
