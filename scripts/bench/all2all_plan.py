"""What all2all.py measures of each backend, and what a backend refuses, with the reason. Needs no GPU."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass

from kernels.backends import select
from kernels.interface.attention_spec import AttentionSpec
from kernels.interface.backend import BackendShape
from kernels.interface.config import KernelsConfig

BACKENDS = ("symm", "copy_engine", "allgather", "deepep", "deepep_low_latency", "torch_dist")
FP8_ROWS = ("symm", "copy_engine")
SM_LIMITED = ("symm", "deepep")
COMM_SMS, SMS_TOKENS = (4, 8, 16, 20, 24, 32), 4096
SWEPT_SMS = (16, 24)  # these over all numbers of tokens, the others at SMS_TOKENS


@dataclass(frozen=True)
class Variant:
    """One way to use a backend. num_sms: of the exchange, the experts beside it get the rest; None: no limit.

    copies  copy_engine as it is beside other work, whatever the number of rows
    gemm    whose rows the exchange brings, None for any: FP8 to the FP8 one
    """

    name: str
    backend: str
    num_sms: int | None = None
    sms_only: bool = False
    copies: bool = False
    gemm: str | None = None


@dataclass(frozen=True)
class Part:
    """A variant, the tokens of a rank that it is measured with, and how it is built."""

    variant: Variant
    tokens: list[int]
    selection: select.Selection


def variants(backend: str) -> list[Variant]:
    """All ways to use a backend."""
    if backend == "deepep_low_latency":
        fp8 = Variant(f"{backend} fp8", backend, gemm="deepgemm_fp8")
        return [Variant(backend, backend, gemm="deepgemm"), fp8]
    found = [Variant(backend, backend)]
    if backend == "copy_engine":
        found.append(Variant("copies", backend, copies=True))
        found.append(Variant("copies fp8", backend, copies=True, gemm="deepgemm_fp8"))
    if backend in FP8_ROWS:
        found.append(Variant(f"{backend} fp8", backend, gemm="deepgemm_fp8"))
    if backend in SM_LIMITED:
        for sms in COMM_SMS:
            found.append(Variant(f"{backend} {sms} SMs", backend, sms, sms not in SWEPT_SMS))
    return found


def plan(
    args: argparse.Namespace, unavailable: Mapping[str, str], backend: str
) -> tuple[list[Part], dict[str, str]]:
    """The parts that can run; and what cannot, to why."""
    parts: list[Part] = []
    refused: dict[str, str] = {}
    for variant in variants(backend):
        sizes, no, reason, selection = [], [], "", None
        for tokens in [args.sms_tokens] if variant.sms_only else args.tokens:
            try:
                selection = _select(args, unavailable, variant, tokens)
                sizes.append(tokens)
            except select.BackendChoiceError as error:
                no.append(tokens)
                reason = reason or error.reason
        if no and selection is not None:
            refused[f"{variant.name} with {', '.join(f'{n:,}' for n in no)} tokens"] = reason
        elif no:
            refused[variant.name] = reason
        if selection is not None:
            parts.append(Part(variant, sizes, selection))
    if not parts and len(set(refused.values())) == 1:
        refused = {backend: next(iter(refused.values()))}
    return parts, refused


def shape_of(args: argparse.Namespace, tokens: int) -> BackendShape:
    """What the backends are chosen for: steps of up to `tokens` rows of a rank."""
    return BackendShape(
        device=args.device,
        dtype=args.dtype,
        num_ranks=args.ranks,
        hidden_size=args.hidden,
        moe_intermediate_size=args.width,
        num_experts=args.experts,
        top_k=args.top_k,
        max_num_tokens=tokens,
        attention_specs=(AttentionSpec(1, 1, 64, 1.0),),
    )


def _select(
    args: argparse.Namespace, unavailable: Mapping[str, str], variant: Variant, tokens: int
) -> select.Selection:
    """Raises BackendChoiceError where the backend cannot carry `tokens` rows of a rank."""
    config = KernelsConfig(
        all2all=variant.backend, grouped_gemm=variant.gemm or args.gemm, attention="sdpa"
    )
    return select.select(
        config,
        unavailable,
        shape_of(args, tokens),
    )
