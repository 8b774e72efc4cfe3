"""Launches of the kernels for FP8: see launches.py.

N rows, E experts.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from kernels.all2all.base import ExpertInput
from kernels.block_fp8 import BlockWeights
from kernels.grouped_gemm.skinny_fp8 import SkinnyFp8
from kernels.lora.experts import ExpertAdapters, ExpertLora
from kernels.routing.device_routing import DeviceRouting, route_on_device
from tests.triton.device import DEVICE, FOR_HOPPER
from tests.triton.launch_inputs import EXPERTS, Inputs


def _dense_fp8(at: Inputs) -> None:
    """Rows and activated rows of a dense product in FP8."""
    from kernels.dense_fp8 import activate, quantise

    quantise(at.rows(256))
    activate(at.rows(512), "silu")


def _hopper_skinny_fp8(at: Inputs) -> None:
    """Of up to 16 rows, for which there is one tile; with and without parts."""
    from kernels.dense_fp8 import quantise
    from kernels.triton.hopper_skinny_fp8 import skinny_fp8

    rows, weights = (
        quantise(at.rows(512)[:16]),
        BlockWeights.empty(128, 512, device=at.device),
    )
    skinny_fp8(rows, weights)
    skinny_fp8(rows, weights, 2)


def _skinny_fp8(at: Inputs, *, adapters: bool = False) -> None:
    """Rows in FP8 of an expert's few; with adapters the first product is not gated."""
    routing = route_on_device(at.ids(), range(EXPERTS), num_experts=EXPERTS)
    if adapters:  # torch reads the bounds, which are undefined where nothing runs
        names = ("row_R", "starts_e", "ends_e")
        routing = replace(routing, **{it: torch.zeros_like(getattr(routing, it)) for it in names})
    weights = BlockWeights.empty(EXPERTS, 256, 128, device=at.device)
    down = BlockWeights.empty(EXPERTS, 128, 128, device=at.device)
    slots_N = torch.zeros(len(at.rows(128)), dtype=torch.int64, device=at.device)
    routed = ExpertInput(at.rows(128), routing.offs_e, None, routing, slots_N=slots_N)
    lora = _no_adapters(at) if adapters else None
    SkinnyFp8(hopper=FOR_HOPPER)(routed, weights, down, num_sms=4, adapters=lora)


def _no_adapters(at: Inputs) -> ExpertAdapters:
    """One slot of rank 16, for experts of 128 inputs and outputs."""
    new = partial(torch.zeros, device=at.device)
    bf16, places_e = torch.bfloat16, new(EXPERTS, dtype=torch.int32)
    blocks = (((0, 128, 0), (128, 256, 1)), ((0, 128, 0),))
    both = [
        ExpertLora(
            new(1, EXPERTS, len(its) * 16, 128, dtype=bf16),
            new(1, EXPERTS, len(its) * 128, 16, dtype=bf16),
            its,
            places_e,
        )
        for its in blocks
    ]
    return ExpertAdapters(*both)


def _fp8_tiles(rows_per_expert: float) -> list[int]:
    """As _tiles, of the products in FP8 of few rows."""
    expected = int(EXPERTS * rows_per_expert)
    none = torch.zeros(max(EXPERTS, expected), dtype=torch.int32, device=DEVICE)
    routing = DeviceRouting(none.view(-1, 1), none, *(none[:EXPERTS],) * 3, 1, expected)
    x = torch.zeros(expected, 2048, dtype=torch.bfloat16, device=DEVICE)
    weights = BlockWeights.empty(EXPERTS, 1536, 2048, device=DEVICE)
    down = BlockWeights.empty(EXPERTS, 2048, 768, device=DEVICE)
    gemm = SkinnyFp8(hopper=FOR_HOPPER)
    gemm(ExpertInput(x, routing.offs_e, None, routing), weights, down, num_sms=132)
    return [tile.programs_per_sm for tile in gemm.tiles(rows_per_expert)]


def _hopper_skinny_fp8_tiles(num_rows: int) -> list[int]:
    """Launch Qwen3-30B-A3B's products with FP8 weights outside the experts."""
    from kernels.dense_fp8 import quantise
    from kernels.triton.hopper_skinny_fp8 import skinny_fp8

    for width, depth, parts in ((5120, 2048, 1), (2048, 4096, 4)):
        x = torch.zeros(num_rows, depth, dtype=torch.bfloat16, device=DEVICE)
        skinny_fp8(quantise(x), BlockWeights.empty(width, depth, device=DEVICE), parts)
    return [1, 1]


CASES: dict[str, Callable[[Inputs], None]] = {
    "dense_fp8": _dense_fp8,
    **({"hopper_skinny_fp8": _hopper_skinny_fp8} if FOR_HOPPER else {}),
    "skinny_fp8": _skinny_fp8,
    "skinny_fp8_with_adapters": partial(_skinny_fp8, adapters=True),
}
LAUNCHES: dict[str, Callable[[], list[int]]] = {
    **{f"{rows}_rows_an_expert_fp8": partial(_fp8_tiles, rows) for rows in (0.25, 8, 16, 48)},
    **{
        f"{rows}_rows_fp8": partial(_hopper_skinny_fp8_tiles, rows)
        for rows in (16, 64)
        if FOR_HOPPER
    },
}
