"""The shape that a rank's backends are chosen for, warnings about the choice, and forced routing. Builds nothing."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch

from kernels.backends.select import Selection
from kernels.interface.backend import BackendShape
from kernels.interface.config import KernelsConfig
from kernels.interface.registry import ATTENTION, GROUPED_GEMM, backend_class
from kernels.routing.forced_routing import ForcedRouting
from workers.adapters.layout import EXPERTS
from workers.config import ModelSection, RankConfig, not_for_answers
from workers.specs.expert_layout import ExpertLayout
from workers.specs.model import ModelConfig, weight_map
from workers.weights.tensors import (
    experts_with_row_scales,
    four_bit_experts,
    four_bit_parameters,
    fp8_not_kept,
    stores_fp8_experts,
)

SLOWER_THAN_FLASHINFER = "Steps will be slower than with it"
SLOWER = {
    "sdpa": "A layer's attention takes 2 to 13 times as long as with it (docs/results/gpu-attention.md, one H200), and "
    "there are no CUDA graphs"
}
"""Backend of attention that `auto` falls back to, to what that costs. Measured where a number stands."""


def backend_shape(config: RankConfig, model: ModelConfig) -> BackendShape:
    """Return the shape that the backends of these ranks and this model are chosen for and sized by."""
    return BackendShape(
        device=config.device,
        dtype=getattr(torch, str(config.model.dtype)),
        num_ranks=config.num_ranks,
        num_nodes=config.num_nodes,
        hidden_size=model.hidden_size,
        moe_intermediate_size=model.moe.intermediate_size,
        num_experts=model.num_experts + config.experts.redundant_slots * config.num_ranks,
        top_k=model.top_k,
        max_num_tokens=config.scheduler.max_num_batched_tokens,
        max_num_seqs=config.scheduler.max_num_seqs,
        attention_specs=config.cache.cached(model.attention_specs),
        linear_specs=config.cache.cached_states(model.linear_specs, config.speculation.most_drafts),
        fp8_checkpoint=stores_fp8_experts(model),
        four_bit=four_bit_experts(model),
        expert_bias=model.moe.bias,
        expert_adapters=bool(config.lora.max_loras) and EXPERTS in config.lora.targets,
    )


def fp8_is_not_kept(model: ModelConfig, selection: Selection) -> Iterator[str]:
    """Yield a warning where no product computes with the checkpoint's FP8 weights as they are."""
    names = fp8_not_kept(model) if selection.fp8_dense else []
    if names:
        yield (
            f"{len(names)} projections that the checkpoint has in FP8 become model.dtype, such as {names[0]}: "
            "products in FP8 take blocks of 128 x 128, in all tensors that one product joins"
        )
    if not experts_with_row_scales(model):
        return
    name = selection.grouped_gemm.name
    found = (
        "the checkpoint's experts are in FP8 with one scale a row, with which no backend computes"
    )
    if selection.fp8_experts:
        yield f"{found}: kernels.grouped_gemm {name} rounds them once more, to one scale for 128 x 128"
    else:
        yield (
            f"{found}: kernels.grouped_gemm {name} holds them in model.dtype, in twice the memory or more; "
            "deepgemm_fp8 keeps them in FP8, but rounds them once more"
        )


def four_bits_are_widened(
    model: ModelConfig,
    selection: Selection,
    unavailable: Mapping[str, str],
    shape: BackendShape,
) -> Iterator[str]:
    """Yield a warning where weights that the checkpoint packs in four bits take model.dtype, with the reason."""
    packed = [entry for entry in weight_map(model) if entry.four_bit is not None]
    if selection.four_bit_experts:
        kept = four_bit_parameters(model)
        wide = {e.name: None for e in packed if e.expert is None and e.parameter not in kept}
        if wide:
            yield (
                f"{len(wide)} projections that the checkpoint has in four bits become model.dtype, such as "
                f"{next(iter(wide))}: products in four bits take one format and multiples of 64 rows and columns, "
                "in all tensors that one product joins"
            )
        return
    if all(entry.expert is None for entry in packed):
        return
    name, reasons = selection.grouped_gemm.name, []
    for other in GROUPED_GEMM:
        backend = backend_class("grouped_gemm", other)
        if backend.four_bit and shape.device in backend.devices:
            why = unavailable.get(f"grouped_gemm.{other}") or backend.unsupported_reason(shape)
            reasons.append(f"{other} cannot run here: {why}" if why else f"{other} does not")
    yield (
        f"the checkpoint's experts are in four bits ({shape.four_bit or 'several formats'}), and "
        f"kernels.grouped_gemm {name} widens them to model.dtype; {'; '.join(reasons)}"
    )


def slow_attention(
    config: KernelsConfig,
    selection: Selection,
    unavailable: Mapping[str, str],
    shape: BackendShape,
) -> Iterator[str]:
    """Yield a warning where `auto` takes slow attention on GPUs because this machine lacks what flashinfer needs."""
    if shape.device != "cuda" or config.attention != "auto":
        return
    lacking = unavailable.get("attention.flashinfer")
    for name in ATTENTION:
        if name == selection.attention.name:
            return
        backend = backend_class("attention", name)
        wanted = backend.auto_reason(shape) and not backend.unsupported_reason(shape)
        if wanted and lacking and unavailable.get(f"attention.{name}") == lacking:
            yield (
                f"SLOW ATTENTION: kernels.attention is {selection.attention.name}, because {name} cannot run here: "
                f"{lacking}. {SLOWER.get(selection.attention.name, SLOWER_THAN_FLASHINFER)}"
            )
            return


def forced_routing(
    config: RankConfig, model: ModelConfig, rank: int, device: torch.device
) -> Callable[..., ForcedRouting] | None:
    """Return a factory of each layer's forced routing; None where the router chooses."""
    routing = config.model.routing
    if routing.kind == "model":
        return None
    return partial(
        ForcedRouting,
        routing.kind,
        routing.s,
        num_experts=model.num_experts,
        top_k=model.top_k,
        rank=rank,
        num_ranks=config.num_ranks,
        device=device,
    )


def shared_settings(
    config: RankConfig, selection: Selection, layout: ExpertLayout | None
) -> dict[str, object]:
    """Return all settings that must be equal on all ranks, flat, with dotted names."""
    flat: dict[str, object] = {"torch": torch.__version__}
    sections = "model scheduler cache kernels overlap speculation experts lora"
    for section in sections.split():
        values = getattr(config, section).model_dump()
        flat.update({f"{section}.{key}": value for key, value in values.items()})
    flat.update({f"backend.{key}": name for key, name in selection.names().items()})
    flat.update(num_ranks=config.num_ranks, device=config.device)
    flat["experts"] = None if layout is None else layout.digest
    return flat


def warnings_of_answers(section: ModelSection, model: ModelConfig) -> Iterator[str]:
    """Yield a warning for each setting that makes answers meaningless, and for each part that is left out."""
    yield from not_for_answers(section)
    for part in model.skipped_parts:
        yield f"{part} of the checkpoint is not loaded: only text is served"
