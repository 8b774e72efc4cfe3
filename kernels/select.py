"""The one place where kernel backends are chosen: `probe` looks, `select` decides, `build` constructs.

`select` is pure and needs neither a GPU nor torch.distributed, so `phalanx check` can call it anywhere.
Knows nothing of YAML files, Ray or requests.
"""

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from kernels.all2all import deepep_choice
from kernels.all2all.allgather import AllGatherAllToAll
from kernels.all2all.base import AllToAll, Layout
from kernels.all2all.deepep_limits import ExchangeShape
from kernels.all2all.local import LocalAllToAll
from kernels.all2all.payload import RowFormat
from kernels.all2all.shm import ShmAllToAll, slot_bytes
from kernels.all2all.torch_dist import TorchDistAllToAll
from kernels.attention.base import Attention, AttentionSpec
from kernels.attention.flashinfer import FlashInferAttention, flashinfer_missing
from kernels.attention.flashinfer import shape_obstacle as flashinfer_obstacle
from kernels.attention.native import NativeAttention
from kernels.attention.sdpa import SdpaAttention
from kernels.config import KernelsConfig
from kernels.expert_load import ExpertLoad
from kernels.grouped_gemm import choice as gemms
from kernels.grouped_gemm.base import GroupedGemm
from kernels.native.library import NativeUnavailableError, load
from kernels.permute import ExpertOrder
from kernels.placement import ExpertPlacement
from kernels.shm import SHM_FOLDER, SharedMemoryGroup, segment_bytes


class KernelChoiceError(ValueError):
    """A backend named in the YAML cannot run here."""

    def __init__(self, family: str, name: str, reason: str, instead: list[str]):
        self.key = f"kernels.{family}"
        works = f"What works: {' or '.join(['auto', *instead])}" if instead else "Nothing works"
        self.value = name
        super().__init__(f"{self.key}: {name!r} cannot run here: {reason}. {works}")


@dataclass(frozen=True)
class Capabilities:
    """What a machine offers. `missing` maps a backend's name to why it cannot run at all."""

    device: str
    missing: Mapping[str, str]


@dataclass(frozen=True)
class Choice:
    """A backend's name and why it was taken."""

    name: str
    reason: str


@dataclass(frozen=True)
class Selection:
    """One backend of each family."""

    all2all: Choice
    grouped_gemm: Choice
    attention: Choice

    @property
    def fp8_experts(self) -> bool:
        """Whether the experts' weights are held in FP8."""
        return gemms.GEMMS[self.grouped_gemm.name].fp8_weights

    def names(self) -> dict[str, str]:
        """Family to backend name."""
        return {
            "all2all": self.all2all.name,
            "grouped_gemm": self.grouped_gemm.name,
            "attention": self.attention.name,
        }

    def reasons(self) -> dict[str, str]:
        """Family to why."""
        return {
            "all2all": self.all2all.reason,
            "grouped_gemm": self.grouped_gemm.reason,
            "attention": self.attention.reason,
        }


@dataclass(frozen=True, kw_only=True)
class KernelContext:
    """What the backends of one rank are built from.

    max_num_tokens bounds a rank's rows of one dispatch. group and shared_memory may be None where the
    chosen all-to-all needs none; shared_memory has the channels of `shared_memory_slots`.
    """

    device: torch.device
    dtype: torch.dtype
    rank: int
    num_ranks: int
    group: dist.ProcessGroup | None
    shared_memory: SharedMemoryGroup | None
    placement: ExpertPlacement
    hidden_size: int
    top_k: int
    max_num_tokens: int
    attention: AttentionSpec


@dataclass(frozen=True)
class Kernels:
    """The backends of one rank."""

    all2all: AllToAll
    grouped_gemm: GroupedGemm
    attention: Attention
    expert_load: ExpertLoad = field(default_factory=ExpertLoad)


def probe(device: torch.device | str) -> Capabilities:
    """Look at this machine for a device type ("cpu" or "cuda")."""
    device = torch.device(device)
    missing = gemms.missing(device)
    if not dist.is_available():
        missing["torch_dist"] = missing["allgather"] = "torch was built without distributed"
    elif device.type == "cuda" and not dist.is_nccl_available():
        missing["torch_dist"] = missing["allgather"] = "torch was built without NCCL"
    if device.type != "cpu":
        missing["shm"] = "it exchanges CPU tensors only"
        missing |= deepep_choice.missing(device)
        if reason := gemms.triton_missing():
            reason = f"rows are sorted by expert in Triton: {reason}"
            missing |= dict.fromkeys(("local", "torch_dist", "allgather", "deepep"), reason)
    elif platform.machine() not in ("x86_64", "AMD64"):
        missing["shm"] = f"it relies on x86's order of stores, this is {platform.machine()}"
    elif not os.access(SHM_FOLDER, os.W_OK):
        missing["shm"] = f"{SHM_FOLDER} is not writable"
    if device.type == "cpu":
        try:
            load()
        except NativeUnavailableError as error:
            missing["native"] = str(error)
    else:
        obstacle = flashinfer_missing(device)
        if obstacle is not None:
            missing["flashinfer"] = obstacle
    return Capabilities(device.type, missing)


def select(
    config: KernelsConfig,
    capabilities: Capabilities,
    *,
    num_ranks: int,
    num_nodes: int = 1,
    dtype: torch.dtype,
    hidden_size: int,
    expert_width: int,
    head_dim: int | None = None,
    fp8_checkpoint: bool = False,
    num_experts: int | None = None,
    top_k: int | None = None,
    max_num_tokens: int | None = None,
) -> Selection:
    """Decide each family's backend, with the reason.

    hidden_size and expert_width are the experts' D and I; num_nodes the hosts the ranks are spread over; head_dim is
    attention's, None for one that every backend takes; max_num_tokens bounds a rank's rows of a step;
    fp8_checkpoint says that the experts are stored in FP8. What is None
    counts as something that every backend takes.
    Raises KernelChoiceError when a backend named in `config` cannot run.
    """
    shape = ExchangeShape(
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        dtype=dtype,
        hidden_size=hidden_size,
        num_experts=num_experts,
        top_k=top_k,
        max_num_tokens=max_num_tokens,
    )
    all2all = _choose(
        "all2all",
        config.all2all,
        _all2all_order(capabilities.device, num_ranks),
        lambda name: _all2all_obstacle(name, capabilities, shape),
    )
    grouped_gemm = _choose(
        "grouped_gemm",
        config.grouped_gemm,
        gemms.order(capabilities.device, fp8_checkpoint=fp8_checkpoint),
        lambda name: (
            _grouped_gemm_obstacle(name, capabilities, dtype, hidden_size, expert_width)
            or _layout_obstacle(name, all2all.name)
        ),
    )
    attention = _choose(
        "attention",
        config.attention,
        {
            "flashinfer": "reads the pages where they lie, planned once a step",
            "native": "compiled C reads the pages of decodes where they lie",
            "sdpa": "gathers pages for torch's own attention, runs everywhere",
        },
        lambda name: _attention_obstacle(name, capabilities, dtype, head_dim),
    )
    return Selection(all2all, grouped_gemm, attention)


def build(selection: Selection, context: KernelContext) -> Kernels:
    """Construct the chosen backends of one rank."""
    attentions: dict[str, type[Attention]] = {
        "sdpa": SdpaAttention,
        "native": NativeAttention,
        "flashinfer": FlashInferAttention,
    }
    grouped_gemm = gemms.build(selection.grouped_gemm.name)
    all2all = _build_all2all(selection.all2all.name, context, grouped_gemm)
    assert all2all.layout in grouped_gemm.layouts, selection.names()
    return Kernels(all2all, grouped_gemm, attentions[selection.attention.name](context.attention))


def shared_memory_slots(
    *, num_ranks: int, dtype: torch.dtype, hidden_size: int, top_k: int, max_num_tokens: int
) -> tuple[int, ...]:
    """The `slot_bytes` of the SharedMemoryGroup that the `shm` all-to-all is built on."""
    return slot_bytes(num_ranks, RowFormat(hidden_size, top_k, dtype), max_num_tokens)


def buffer_bytes(
    selection: Selection,
    *,
    num_ranks: int,
    dtype: torch.dtype,
    hidden_size: int,
    expert_width: int,
    top_k: int,
    max_num_tokens: int,
    num_experts: int = 0,
) -> int:
    """Bytes of one rank's exchange buffers and expert activations in a full step; num_experts for DeepEP alone.

    Balanced routing, except for GPUs' own products: their shapes are those of the most rows there can be.
    """
    row_format = RowFormat(hidden_size, top_k, dtype)
    row_bytes, x_bytes = row_format.row_bytes, hidden_size * dtype.itemsize
    gathered = num_ranks * max_num_tokens
    exchange = {
        "local": 0,
        "shm": segment_bytes(num_ranks, slot_bytes(num_ranks, row_format, max_num_tokens))
        // num_ranks,
        "torch_dist": 2 * min(num_ranks, top_k) * max_num_tokens * (row_bytes + x_bytes),
        "allgather": (gathered + max_num_tokens) * (row_bytes + x_bytes),
        **deepep_choice.buffer_bytes(
            num_ranks=num_ranks,
            hidden_size=hidden_size,
            row_bytes=row_bytes,
            max_num_tokens=max_num_tokens,
            num_experts=num_experts,
        ),
    }[selection.all2all.name]
    routed_rows, widths = max_num_tokens * top_k, 2 * hidden_size + 3 * expert_width
    if selection.grouped_gemm.name in gemms.ON_DEVICE:
        routed_rows *= num_ranks
        if selection.grouped_gemm.name == "triton":  # neither copies rows nor stores gate and up
            widths = hidden_size + expert_width
    if selection.all2all.name == deepep_choice.LOW_LATENCY:
        routed_rows = num_experts * deepep_choice.low_latency_rows(max_num_tokens)
    activations = routed_rows * widths * dtype.itemsize
    return exchange + activations


def _build_all2all(name: str, context: KernelContext, grouped_gemm: GroupedGemm) -> AllToAll:
    placement, max_num_tokens = context.placement, context.max_num_tokens
    experts = placement.local_experts(context.rank)
    order = ExpertOrder(
        experts,
        num_experts=placement.num_experts,
        device=context.device,
        dtype=torch.int64 if name == "local" else torch.int32,
        alignment=grouped_gemm.row_alignment,
    )
    if name == "local":
        return LocalAllToAll(order)
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
        return AllGatherAllToAll(context.group, order, row_format)
    return TorchDistAllToAll(
        context.group, placement, order, row_format, context.device, max_num_tokens
    )


def _choose(
    family: str,
    wanted: str,
    order: Mapping[str, str],
    obstacle: Callable[[str], str | None],
) -> Choice:
    """The wanted backend, or for `auto` the first of `order` (name to reason) that can run."""
    if wanted == "auto":
        for name, reason in order.items():
            found = obstacle(name)
            if found is None:
                return Choice(name, f"auto: {reason}")
        reasons = "; ".join(f"{name}: {obstacle(name)}" for name in order)
        raise KernelChoiceError(family, wanted, reasons, [])
    found = obstacle(wanted)
    if found is not None:
        raise KernelChoiceError(family, wanted, found, [x for x in order if obstacle(x) is None])
    return Choice(wanted, "named in the configuration")


def _all2all_order(device: str, num_ranks: int) -> dict[str, str]:
    """What `auto` tries, best first."""
    if num_ranks == 1:
        return {"local": "one rank holds all experts"}
    if device == "cuda":
        return {
            "allgather": "no counts to read on the host before the experts",
            "torch_dist": "moves each row only to the ranks of its experts",
        }
    return {
        "shm": "all ranks share a host: rows go through shared memory without a copy into sockets",
        "torch_dist": "moves each row only to the ranks of its experts",
        "allgather": "equal shapes on all ranks",
    }


def _all2all_obstacle(name: str, capabilities: Capabilities, shape: ExchangeShape) -> str | None:
    """Why this all-to-all cannot run, or None."""
    num_ranks, num_nodes = shape.num_ranks, shape.num_nodes
    if name in capabilities.missing:
        return capabilities.missing[name]
    if name == "local" and num_ranks > 1:
        return f"it serves one rank, cluster.ranks is {num_ranks}"
    if name != "local" and num_ranks == 1:
        return "there is only one rank, so there is nothing to exchange"
    if name in deepep_choice.NAMES:
        return deepep_choice.obstacle(name, capabilities.device, shape)
    if name == "shm" and num_nodes > 1:
        return f"its ranks must share a host, cluster.nodes is {num_nodes}"
    return None


def _native_obstacle(name: str, capabilities: Capabilities, dtype: torch.dtype) -> str | None:
    """Why a family's `native` backend cannot run, or None; None for other names that are there."""
    if name in capabilities.missing:
        return capabilities.missing[name]
    if name == "native" and capabilities.device != "cpu":
        return "it runs on CPU only"
    if name == "native" and dtype != torch.float32:
        return f"it computes in float32, model.dtype is {str(dtype)[6:]}"
    return None


def _attention_obstacle(
    name: str, capabilities: Capabilities, dtype: torch.dtype, head_dim: int | None
) -> str | None:
    """Why this attention cannot run, or None."""
    obstacle = _native_obstacle(name, capabilities, dtype)
    if obstacle is not None or name != "flashinfer":
        return obstacle
    if capabilities.device != "cuda":
        return "it runs on GPUs only"
    return flashinfer_obstacle(dtype, head_dim)


def _layout_obstacle(name: str, all2all: str) -> str | None:
    """Why this grouped GEMM cannot take what the all-to-all brings, or None."""
    layout: Layout = "masked" if all2all == deepep_choice.LOW_LATENCY else "contiguous"
    takes = gemms.GEMMS[name].layouts
    if layout not in takes:
        return f"{all2all} brings rows in the {layout} layout, it takes {' and '.join(takes)}"
    return None


def _grouped_gemm_obstacle(
    name: str,
    capabilities: Capabilities,
    dtype: torch.dtype,
    hidden_size: int,
    expert_width: int,
) -> str | None:
    """Why this grouped GEMM cannot run, or None."""
    obstacle = _native_obstacle(name, capabilities, dtype)
    if obstacle is not None:
        return obstacle
    return gemms.shape_obstacle(name, capabilities.device, dtype, hidden_size, expert_width)
