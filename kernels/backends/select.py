"""The one place where backends are chosen: `probe` examines the machine, `select` decides, `build` constructs.

`select` is pure and needs neither a GPU nor torch.distributed, so `phalanx check` can call it anywhere. The conditions
of a backend stand on its class. Knows nothing of YAML files, Ray or requests.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from kernels.all2all.base import AllToAll, SlotColumn
from kernels.all2all.unbound import UnboundAllToAll
from kernels.attention.base import Attention
from kernels.attention.dummy import DummyAttention
from kernels.grouped_gemm.base import GroupedGemm
from kernels.interface.backend import Backend, BackendShape
from kernels.interface.config import KernelsConfig
from kernels.interface.context import BackendContext
from kernels.interface.registry import SEAMS, backend_class
from kernels.interface.unavailable import Unavailable
from kernels.linear_attention.base import LinearAttention
from kernels.routing.expert_load import ExpertLoad


class BackendChoiceError(ValueError):
    """A backend named in the YAML cannot run here."""

    def __init__(self, seam: str, name: str, reason: str, instead: list[str]):
        super().__init__(seam, name, reason, instead)  # pickling restores the error from these
        self.key, self.value, self.reason = f"kernels.{seam}", name, reason
        self.instead = instead

    def __str__(self) -> str:
        *first, last = ["auto", *self.instead]
        works = f"What works: {', '.join(first)} or {last}" if first else "Nothing works"
        return f"{self.key}: {self.value!r} cannot run here: {self.reason}. {works}"


@dataclass(frozen=True)
class Choice:
    """A backend's name and why it was taken."""

    name: str
    reason: str


@dataclass(frozen=True)
class Selection:
    """One backend of each seam; of linear attention only for models that have it."""

    all2all: Choice
    grouped_gemm: Choice
    attention: Choice
    linear_attention: Choice | None = None

    @property
    def all2all_class(self) -> type[AllToAll]:
        return backend_class("all2all", self.all2all.name)

    @property
    def grouped_gemm_class(self) -> type[GroupedGemm]:
        return backend_class("grouped_gemm", self.grouped_gemm.name)

    @property
    def attention_class(self) -> type[Attention]:
        return backend_class("attention", self.attention.name)

    @property
    def linear_attention_class(self) -> type[LinearAttention] | None:
        if self.linear_attention is None:
            return None
        return backend_class("linear_attention", self.linear_attention.name)

    @property
    def choices(self) -> dict[str, Choice]:
        """Seam to choice, without the seams that the model does not use."""
        chosen = {seam: getattr(self, seam) for seam in SEAMS}
        return {seam: choice for seam, choice in chosen.items() if choice is not None}

    @property
    def fp8_experts(self) -> bool:
        """Whether the experts' weights are held in FP8."""
        return self.grouped_gemm_class.fp8_weights

    @property
    def fp8_dense(self) -> bool:
        """Whether weights of dense products that the checkpoint stores in FP8 are held in FP8."""
        return self.grouped_gemm_class.fp8_dense

    @property
    def four_bit_experts(self) -> bool:
        """Whether the experts' weights are held in four bits."""
        return self.grouped_gemm_class.four_bit

    @property
    def fp8_rows(self) -> bool:
        """Whether rows travel to the experts in FP8."""
        return self.all2all_class.fp8_rows and self.grouped_gemm_class.fp8_rows

    @property
    def graph_unsupported_reason(self) -> str | None:
        """Why CUDA graphs cannot hold a step of these backends, or None."""
        chosen: dict[str, type[Backend] | None] = {
            "attention": self.attention_class,
            "all2all": self.all2all_class,
            "grouped_gemm": self.grouped_gemm_class,
            "linear_attention": self.linear_attention_class,
        }
        for seam, backend in chosen.items():
            if backend is not None and not backend.graph:
                return f"kernels.{seam} is {backend.name}, and its steps cannot be captured"
        return None

    def names(self) -> dict[str, str]:
        """Seam to backend name."""
        return {seam: choice.name for seam, choice in self.choices.items()}

    def reasons(self) -> dict[str, str]:
        """Seam to why."""
        return {seam: choice.reason for seam, choice in self.choices.items()}


@dataclass(frozen=True)
class Backends:
    """The backends of one rank. `stream`, if set, is the stream that a ubatch computes on in a CUDA graph."""

    all2all: AllToAll
    grouped_gemm: GroupedGemm
    attention: Attention
    linear_attention: LinearAttention | None = None
    expert_load: ExpertLoad = field(default_factory=ExpertLoad)
    stream: torch.cuda.Stream | None = None


def probe(device: torch.device | str) -> Unavailable:
    """Return the backends that cannot run here on a device ("cpu", "cuda" or one GPU), each probed at first look-up."""
    device = torch.device(device)
    return Unavailable(
        {
            f"{seam}.{name}": partial(_probe, seam, name, device)
            for seam, names in SEAMS.items()
            for name in names
        }
    )


def _probe(seam: str, name: str, device: torch.device) -> str | None:
    backend: type[Backend] = backend_class(seam, name)
    return _wrong_device(backend, device.type) or backend.unavailable(device)


def _wrong_device(backend: type[Backend], device: str) -> str | None:
    if device in backend.devices:
        return None
    return "it runs on GPUs only" if backend.devices == ("cuda",) else "it runs on CPU only"


def select(config: KernelsConfig, unavailable: Mapping[str, str], shape: BackendShape) -> Selection:
    """Decide each seam's backend, with the reason. `unavailable` is from `probe`.

    Raises BackendChoiceError when a backend named in `config` cannot run.
    """

    def refusal(seam: str, name: str) -> str | None:
        backend: type[Backend] = backend_class(seam, name)
        return (
            _wrong_device(backend, shape.device)
            or unavailable.get(f"{seam}.{name}")
            or backend.unsupported_reason(shape)
        )

    def choose(
        seam: str, wanted: str, refusal_of: Callable[[str], str | None] | None = None
    ) -> Choice:
        return _choose(seam, wanted, shape, refusal_of or partial(refusal, seam))

    all2all = choose("all2all", config.all2all)
    brought = backend_class("all2all", all2all.name).layouts

    def gemm_refusal(name: str) -> str | None:
        layouts = backend_class("grouped_gemm", name).layouts
        wrong_layout = None
        for layout in brought:
            if layout not in layouts:
                wrong_layout = f"{all2all.name} brings rows in the {layout} layout, it takes {' and '.join(layouts)}"
        return refusal("grouped_gemm", name) or wrong_layout

    grouped_gemm = choose("grouped_gemm", config.grouped_gemm, gemm_refusal)
    attention = choose("attention", config.attention)
    linear = choose("linear_attention", config.linear_attention) if shape.linear_specs else None
    return Selection(all2all, grouped_gemm, attention, linear)


def _choose(
    seam: str, wanted: str, shape: BackendShape, refusal: Callable[[str], str | None]
) -> Choice:
    """Return the wanted backend, or for `auto` the first of the registry that it takes and that can run.

    refusal   returns why a backend cannot run, or None
    """
    auto: dict[str, str] = {}
    for name in SEAMS[seam]:
        reason = backend_class(seam, name).auto_reason(shape)
        if reason is not None:
            auto[name] = reason
    if wanted != "auto":
        why = refusal(wanted)
        if why is None:
            return Choice(wanted, "named in the configuration")
        names = dict.fromkeys((*auto, *SEAMS[seam]))
        raise BackendChoiceError(seam, wanted, why, [x for x in names if refusal(x) is None])
    refused: dict[str, list[str]] = {}
    for name, reason in auto.items():
        why = refusal(name)
        if why is None:
            return Choice(name, f"auto: {reason}")
        refused.setdefault(why, []).append(name)
    reasons = "; ".join(f"{', '.join(names)}: {why}" for why, names in refused.items())
    raise BackendChoiceError(seam, wanted, reasons, [])


def build(selection: Selection, context: BackendContext) -> Backends:
    """Construct the chosen backends of one rank; collective unless the all-to-all is that of one rank."""
    grouped_gemm = selection.grouped_gemm_class.build(context.shape)
    all2all = selection.all2all_class.build(
        replace(
            context,
            shape=replace(context.shape, fp8_rows=selection.fp8_rows),
            row_alignment=grouped_gemm.row_alignment,
            unaligned_rows=grouped_gemm.unaligned_rows,
            masked_fp8=grouped_gemm.masked_fp8,
        )
    )
    assert set(all2all.layouts) <= set(grouped_gemm.layouts), selection.names()
    if context.shape.expert_adapters and all2all.moves_rows:
        all2all.slot_column = SlotColumn(context.shape.max_num_tokens, context.device)
    return Backends(
        all2all,
        grouped_gemm,
        build_attention(selection, context),
        build_linear_attention(selection, context),
    )


def build_attention(selection: Selection, context: BackendContext) -> Attention:
    """Construct the chosen attention, without caches."""
    attention = selection.attention_class(context.shape.attention_specs, context.block_size)
    if attention.cascade_refusal(attention.specs) is None:
        attention.shared_reads = context.shared_reads
    return attention


def build_linear_attention(selection: Selection, context: BackendContext) -> LinearAttention | None:
    """Construct the chosen linear attention, without states; None for models without it."""
    chosen = selection.linear_attention_class
    return None if chosen is None else chosen(context.shape.linear_specs)


def unbound(backends: Backends) -> Backends:
    """Return the backends without an epoch's all-to-all and caches: weights have the memory order of the others."""
    attention = DummyAttention(backends.attention)
    return replace(backends, all2all=UnboundAllToAll(), attention=attention)


def build_unbound(selection: Selection, context: BackendContext) -> Backends:
    """Build the backends of a process that belongs to no group."""
    attention = DummyAttention(build_attention(selection, context))
    linear = build_linear_attention(selection, context)
    gemm = selection.grouped_gemm_class.build(context.shape)
    return Backends(UnboundAllToAll(), gemm, attention, linear)
