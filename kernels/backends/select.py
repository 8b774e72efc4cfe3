"""The one place where kernel backends are chosen: `probe` looks, `select` decides, `build` constructs.

`select` is pure and needs neither a GPU nor torch.distributed, so `phalanx check` can call it anywhere.
Knows nothing of YAML files, Ray or requests.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import torch
import torch.distributed as dist

from kernels.all2all import choice as exchanges
from kernels.all2all.base import AllToAll
from kernels.all2all.deepep_limits import ExchangeShape
from kernels.all2all.payload import RowFormat
from kernels.all2all.shm import slot_bytes
from kernels.attention.base import Attention
from kernels.attention.flashinfer import FlashInferAttention
from kernels.attention.native import NativeAttention
from kernels.attention.sdpa import SdpaAttention
from kernels.attention.spec import AttentionSpec
from kernels.backends.config import KernelsConfig
from kernels.backends.missing import Missing
from kernels.grouped_gemm import choice as gemms
from kernels.grouped_gemm.base import GroupedGemm
from kernels.host.shm import SharedMemoryGroup
from kernels.routing.expert_load import ExpertLoad
from kernels.routing.placement import ExpertPlacement

# In the order in which `auto` prefers them.
ATTENTIONS: dict[str, type[Attention]] = {
    attention.name: attention for attention in (FlashInferAttention, NativeAttention, SdpaAttention)
}


class BackendChoiceError(ValueError):
    """A backend named in the YAML cannot run here."""

    def __init__(self, family: str, name: str, reason: str, instead: list[str]):
        super().__init__(family, name, reason, instead)  # as they are, or pickling would lose them
        self.key, self.value, self.reason = f"kernels.{family}", name, reason
        self.instead = instead

    def __str__(self) -> str:
        *others, last = ["auto", *self.instead]
        works = f"What works: {', '.join(others)} or {last}" if others else "Nothing works"
        return f"{self.key}: {self.value!r} cannot run here: {self.reason}. {works}"


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

    @property
    def attention_backend(self) -> type[Attention]:
        """The class of the chosen attention."""
        return ATTENTIONS[self.attention.name]

    @property
    def graph_unsupported_reason(self) -> str | None:
        """Why CUDA graphs cannot hold a step of these backends, or None."""
        for key, backend in (
            ("attention", self.attention_backend),
            ("all2all", exchanges.EXCHANGES[self.all2all.name]),
            ("grouped_gemm", gemms.GEMMS[self.grouped_gemm.name]),
        ):
            if not backend.graph:
                return f"kernels.{key} is {backend.name}, whose steps cannot be captured"
        return None

    @property
    def sm_choices(self) -> tuple[int, ...]:
        """Limits on the exchange's SMs worth trying beside compute, none where it takes no limit."""
        return exchanges.EXCHANGES[self.all2all.name].sm_choices

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
class BackendContext:
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
    attention: tuple[AttentionSpec, ...]  # one a layer
    block_size: int


@dataclass(frozen=True)
class Backends:
    """The backends of one rank. `stream`, where set, is what a slice computes on in a graph."""

    all2all: AllToAll
    grouped_gemm: GroupedGemm
    attention: Attention
    expert_load: ExpertLoad = field(default_factory=ExpertLoad)
    stream: torch.cuda.Stream | None = None


def probe(device: torch.device | str) -> Capabilities:
    """Look at this machine for a device type ("cpu" or "cuda")."""
    device = torch.device(device)
    missing = gemms.missing(device) | exchanges.missing(device)
    lacks = {name: attention.unavailable(device) for name, attention in ATTENTIONS.items()}
    missing |= Missing({name: reason for name, reason in lacks.items() if reason is not None})
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
    attention_specs: Sequence[AttentionSpec] = (),
    fp8_checkpoint: bool = False,
    num_experts: int | None = None,
    top_k: int | None = None,
    max_num_tokens: int | None = None,
) -> Selection:
    """Decide each family's backend, with the reason.

    hidden_size and expert_width are the experts' D and I; num_nodes the hosts the ranks are spread over;
    attention_specs has one entry a layer, none where every backend serves it;
    max_num_tokens bounds a rank's rows of a step; fp8_checkpoint says that the experts are stored in FP8. What is None
    counts as something that every backend takes.
    Raises BackendChoiceError when a backend named in `config` cannot run.
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
        exchanges.order(capabilities.device, num_ranks),
        lambda name: exchanges.unsupported_reason(
            name, capabilities.device, capabilities.missing, shape
        ),
    )
    grouped_gemm = _choose(
        "grouped_gemm",
        config.grouped_gemm,
        gemms.order(capabilities.device, fp8_checkpoint=fp8_checkpoint),
        lambda name: (
            _grouped_gemm_unsupported_reason(name, capabilities, dtype, hidden_size, expert_width)
            or _layout_unsupported_reason(name, all2all.name)
        ),
    )
    attention = _choose(
        "attention",
        config.attention,
        {name: backend.reason for name, backend in ATTENTIONS.items()},
        lambda name: (
            capabilities.missing.get(name)
            or ATTENTIONS[name].unsupported_reason(capabilities.device, dtype, attention_specs)
        ),
    )
    return Selection(all2all, grouped_gemm, attention)


def build(selection: Selection, context: BackendContext) -> Backends:
    """Construct the chosen backends of one rank."""
    grouped_gemm = gemms.build(selection.grouped_gemm.name)
    all2all = exchanges.build(selection.all2all.name, context, grouped_gemm)
    assert all2all.layout in grouped_gemm.layouts, selection.names()
    attention = selection.attention_backend(context.attention, context.block_size)
    return Backends(all2all, grouped_gemm, attention)


def shared_memory_slots(
    *, num_ranks: int, dtype: torch.dtype, hidden_size: int, top_k: int, max_num_tokens: int
) -> tuple[int, ...]:
    """The `slot_bytes` of the SharedMemoryGroup that the `shm` all-to-all is built on."""
    return slot_bytes(num_ranks, RowFormat(hidden_size, top_k, dtype), max_num_tokens)


def _choose(
    family: str,
    wanted: str,
    order: Mapping[str, str],
    unsupported_reason: Callable[[str], str | None],
) -> Choice:
    """The wanted backend, or for `auto` the first of `order` (name to reason) that can run."""
    if wanted == "auto":
        for name, reason in order.items():
            found = unsupported_reason(name)
            if found is None:
                return Choice(name, f"auto: {reason}")
        by_reason: dict[str | None, list[str]] = {}
        for name in order:
            by_reason.setdefault(unsupported_reason(name), []).append(name)
        reasons = "; ".join(f"{', '.join(names)}: {why}" for why, names in by_reason.items())
        raise BackendChoiceError(family, wanted, reasons, [])
    found = unsupported_reason(wanted)
    if found is not None:
        known = get_args(KernelsConfig.model_fields[family].annotation)
        names = dict.fromkeys((*order, *known[1:]))  # without auto, which comes first
        raise BackendChoiceError(
            family, wanted, found, [x for x in names if unsupported_reason(x) is None]
        )
    return Choice(wanted, "named in the configuration")


def _native_unsupported_reason(
    name: str, capabilities: Capabilities, dtype: torch.dtype
) -> str | None:
    """Why a family's `native` backend cannot run, or None; None for other names that are there."""
    if name in capabilities.missing:
        return capabilities.missing[name]
    if name == "native" and capabilities.device != "cpu":
        return "it runs on CPU only"
    if name == "native" and dtype != torch.float32:
        return f"it computes in float32, model.dtype is {str(dtype)[6:]}"
    return None


def _layout_unsupported_reason(name: str, all2all: str) -> str | None:
    """Why this grouped GEMM cannot take what the all-to-all brings, or None."""
    layout = exchanges.EXCHANGES[all2all].layout
    takes = gemms.GEMMS[name].layouts
    if layout not in takes:
        return f"{all2all} brings rows in the {layout} layout, it takes {' and '.join(takes)}"
    return None


def _grouped_gemm_unsupported_reason(
    name: str,
    capabilities: Capabilities,
    dtype: torch.dtype,
    hidden_size: int,
    expert_width: int,
) -> str | None:
    """Why this grouped GEMM cannot run, or None."""
    unsupported_reason = _native_unsupported_reason(name, capabilities, dtype)
    if unsupported_reason is not None:
        return unsupported_reason
    return gemms.shape_unsupported_reason(
        name, capabilities.device, dtype, hidden_size, expert_width
    )
