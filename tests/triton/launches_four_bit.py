"""Launches of the kernel for weights in four bits: see launches.py."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from kernels.all2all.base import ExpertInput
from kernels.four_bit import FourBitWeights
from kernels.four_bit_format import FourBitFormat
from kernels.grouped_gemm.triton_four_bit import TritonFourBit
from kernels.routing.device_routing import DeviceRouting, route_on_device
from tests.triton.device import DEVICE
from tests.triton.launch_inputs import EXPERTS, WIDTH, Inputs

MXFP4, INT4 = FourBitFormat("mxfp4", 32), FourBitFormat("int4", 128)
ORDERED = FourBitFormat("int4", 64, zeros=True, ordered=True)


def _in_order(*weights: FourBitWeights) -> None:
    """Fill in the columns' order of new weights, because kernels on a GPU read and write by it."""
    for it in weights:
        if it.order is not None:
            it.order.copy_(torch.arange(it.order.shape[-1], device=it.order.device))


def _products(at: Inputs, form: FourBitFormat, *, biases: bool = False) -> None:
    """`EXPERTS` rows, whatever their number, as the choice of tiles goes by."""
    routing = route_on_device(at.ids(), range(EXPERTS), num_experts=EXPERTS)
    routing = replace(routing, expected=EXPERTS)
    gemm = TritonFourBit(form, num_sms=4, device=DEVICE)
    new = {"device": at.device, "dtype": torch.bfloat16}
    width = 2 * WIDTH
    weights = (
        gemm.empty_weights(EXPERTS, 2 * width, width, **new),
        gemm.empty_weights(EXPERTS, width, width, **new),
    )
    _in_order(*weights)
    bias = torch.zeros(EXPERTS, 2 * width, **new)
    added = (bias, bias[:, :width].contiguous()) if biases else None
    rows = ExpertInput(at.rows(width), routing.offs_e, None, routing)
    gemm(rows, *weights, "clamped_swiglu" if biases else "silu", added)


def _expanded(at: Inputs, form: FourBitFormat) -> None:
    from kernels.triton.expand_four_bit import expand_four_bit

    weights = FourBitWeights.empty(form, 2 * WIDTH, WIDTH, device=at.device, tiled=True)
    _in_order(weights)
    expand_four_bit(weights, torch.bfloat16)


def _tiles(rows_per_expert: float, form: FourBitFormat) -> list[int]:
    """Launch the products of Qwen3-30B-A3B's experts of one rank of four; how many programs an SM shall hold."""
    expected = int(EXPERTS * rows_per_expert)
    none = torch.zeros(max(expected, EXPERTS), dtype=torch.int32, device=DEVICE)
    routing = DeviceRouting(none.view(-1, 1), none, *(none[:EXPERTS],) * 3, 1, expected)
    new = {"dtype": torch.bfloat16, "device": DEVICE}
    x, gemm = torch.empty(expected, 2048, **new), TritonFourBit(form, num_sms=132, device=DEVICE)
    weights = (
        gemm.empty_weights(EXPERTS, 1536, 2048, **new),
        gemm.empty_weights(EXPERTS, 2048, 768, **new),
    )
    gemm(ExpertInput(x, routing.offs_e, None, routing), *weights)
    tiles = gemm.tiles(routing.mean_rows, x.dtype, 2048, 768)
    return [tile.programs_per_sm for tile in tiles]


CASES: dict[str, Callable[[Inputs], None]] = {
    "grouped_gemm_mxfp4": partial(_products, form=MXFP4, biases=True),
    "grouped_gemm_int4": partial(_products, form=INT4),
    "grouped_gemm_int4_ordered": partial(_products, form=ORDERED),
    "expand_mxfp4": partial(_expanded, form=MXFP4),
    "expand_int4": partial(_expanded, form=INT4),
    "expand_int4_ordered": partial(_expanded, form=ORDERED),
}
LAUNCHES: dict[str, Callable[[], list[int]]] = {
    **{
        f"{rows}_rows_an_expert_mxfp4": partial(_tiles, rows, MXFP4)
        for rows in (0.25, 8, 32, 64, 128)
    },
    **{f"{rows}_rows_an_expert_int4": partial(_tiles, rows, INT4) for rows in (8, 64, 128)},
    "32_rows_an_expert_int4_zeros": partial(_tiles, 32, FourBitFormat("int4", 32, zeros=True)),
}
