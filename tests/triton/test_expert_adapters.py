"""Adapters beside experts in the model's dtype, in FP8 and in four bits, against float32 of what these hold."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from kernels.all2all.base import ExpertInput
from kernels.block_fp8 import Fp8Rows, dequantise, quantise_blocks, quantise_groups, widen_rows
from kernels.four_bit import quantise_four_bit
from kernels.four_bit_format import FourBitFormat
from kernels.grouped_gemm import deepgemm
from kernels.grouped_gemm.base import GroupedGemm
from kernels.grouped_gemm.reference import ReferenceGroupedGemm
from kernels.grouped_gemm.triton_four_bit import TritonFourBit
from kernels.grouped_gemm.triton_grouped import TritonGroupedGemm
from kernels.lora.experts import ExpertAdapters, ExpertLora
from kernels.routing.device_routing import route_on_device
from tests.closeness import calc_diff
from tests.triton.device import COMPILED, DEVICE, FOR_HOPPER

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

LOCAL, TOP_K, SLOTS, RANK = 4, 2, 3, 8
HIDDEN, WIDTH = 256, 128
FORM = FourBitFormat("int4", 64, zeros=True)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def adapters(dtype: torch.dtype, device: str) -> ExpertAdapters:
    """Of seven experts, of which four are local; what they add is as large as the products of the weights."""
    places_e = torch.tensor([5, 0, 6, 2], dtype=torch.int32, device=device)
    made = []
    for parts, rows, columns in ((2, 2 * WIDTH, HIDDEN), (1, HIDDEN, WIDTH)):
        a = draw(SLOTS, 7, parts * RANK, columns, seed=1) / columns**0.5
        b = draw(SLOTS, 7, rows, RANK, seed=2) / RANK**0.5
        height = rows // parts
        blocks = tuple((part * height, (part + 1) * height, part) for part in range(parts))
        made.append(ExpertLora(a.to(device, dtype), b.to(device, dtype), blocks, places_e))
    return ExpertAdapters(*made)


class FakeDeepGemm:
    """The product of rows and weights in FP8 that the real one computes, by float32 products."""

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        return 8

    def m_grouped_fp8_gemm_nt_contiguous(
        self, x: Any, weights: Any, out: torch.Tensor, ends_e: torch.Tensor, use_psum_layout: bool
    ) -> None:
        assert use_psum_layout and x[1].stride(0) == 1, "scales lie group by group"
        start, wide_RK = 0, widen_rows(Fp8Rows(*x)).float()
        for expert, end in enumerate(ends_e.tolist()):
            wide_NK = dequantise(weights[0][expert], weights[1][expert])
            out[start:end] = F.linear(wide_RK[start:end], wide_NK)
            start = -(-end // 8) * 8


def fp8(monkeypatch: pytest.MonkeyPatch, *, skinny: bool) -> GroupedGemm:
    monkeypatch.setattr(deepgemm, "load_deep_gemm", FakeDeepGemm)
    if not COMPILED:
        properties = SimpleNamespace(multi_processor_count=4)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    gemm = deepgemm.DeepGemmFp8()
    monkeypatch.setattr(gemm._skinny, "takes", lambda _: skinny)
    return gemm


def held(name: str, wide: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Weights as the product has them, and the float32 values that they hold."""
    if name == "four_bit":
        gemm = TritonFourBit(FORM, num_sms=3, device=DEVICE)
        packed = gemm.empty_weights(*wide.shape, device=DEVICE, dtype=wide.dtype)
        matrices = [quantise_four_bit(one, FORM) for one in wide]
        for place, matrix in enumerate(matrices):
            packed[place].set(matrix)
        return packed, torch.stack([matrix.dequantise() for matrix in matrices])
    if name == "plain":
        return wide.to(torch.bfloat16 if COMPILED else torch.float32), wide
    rounded = quantise_blocks(wide)
    pairs = zip(rounded.values, rounded.scales, strict=True)
    return rounded, torch.stack([dequantise(*pair) for pair in pairs])


@pytest.mark.parametrize(
    ("name", "in_fp8", "num_rows"),
    [
        ("plain", False, 30),
        ("four_bit", False, 5),
        ("skinny_fp8", False, 20),
        ("skinny_fp8", True, 5),
        ("fp8", False, 30),
        ("fp8", True, 30),
    ],
)
@torch.inference_mode()
def test_rows_of_three_adapters_and_of_none(
    monkeypatch: pytest.MonkeyPatch, name: str, in_fp8: bool, num_rows: int
) -> None:
    gemm: GroupedGemm
    if name.endswith("fp8"):
        gemm, alignment = fp8(monkeypatch, skinny=name == "skinny_fp8"), 8 if name == "fp8" else 1
    elif name == "plain":
        gemm, alignment = TritonGroupedGemm(num_sms=3, hopper=FOR_HOPPER), 1
    else:
        gemm, alignment = TritonFourBit(FORM, num_sms=3, device=DEVICE), 1
    check(gemm, name, in_fp8, num_rows, alignment)


def check(gemm: GroupedGemm, name: str, in_fp8: bool, num_rows: int, alignment: int) -> None:
    """Compare routed rows of four local experts of six with float32; rows arrive in FP8 where `in_fp8`."""
    # The interpreter takes the bits of bfloat16 for integers.
    dtype = torch.bfloat16 if COMPILED or name.endswith("fp8") else torch.float32
    shapes = ((LOCAL, 2 * WIDTH, HIDDEN), (LOCAL, HIDDEN, WIDTH))
    both = [held(name, (draw(*shape) / shape[2] ** 0.5).to(DEVICE)) for shape in shapes]
    weights, wide = [pair[0] for pair in both], [pair[1].cpu() for pair in both]
    x_ND = draw(num_rows, HIDDEN).to(DEVICE, dtype)
    scores = torch.rand(num_rows, 6, generator=torch.Generator().manual_seed(num_rows))
    scores[:, 3] = -1  # nobody's
    ids_NK = scores.topk(TOP_K).indices.to(DEVICE)
    routing = route_on_device(ids_NK, range(1, 5), num_experts=6, alignment=alignment)
    slots_N = (torch.arange(num_rows) % (SLOTS + 1)).to(DEVICE)
    rows = quantise_groups(x_ND) if in_fp8 else Fp8Rows(x_ND, None)
    routed = ExpertInput(rows.values, routing.offs_e, None, routing, rows.scales, slots_N)
    if in_fp8:
        x_ND = widen_rows(rows)

    found = gemm(routed, *weights, "silu", None, adapters(dtype, DEVICE)).float().cpu()

    ends, used = routing.ends_e.tolist(), []
    for start, end in zip(routing.starts_e.tolist(), ends, strict=True):
        used += range(start, end)
    of_used = routing.row_R[used].long().cpu()
    in_order = ExpertInput(
        x_ND.cpu().float()[of_used], routing.offs_e.cpu(), None, slots_N=slots_N.cpu()[of_used]
    )
    of_all = adapters(torch.float32, "cpu")
    expected = ReferenceGroupedGemm()(in_order, *wide, "silu", None, of_all)
    without = ReferenceGroupedGemm()(in_order, *wide, "silu")
    assert calc_diff(expected, without) > 0.1, "the adapters change the rows"
    tolerance = 1e-4 if COMPILED else 1e-9
    if name.endswith("fp8"):  # of rounding rows to e4m3, where the interpreter loses carries
        tolerance = 4e-3 if COMPILED else 3e-2
    assert calc_diff(found[used], expected) < tolerance
    plain = in_order.slots_N == 0
    assert calc_diff(found[used][plain], without[plain]) < tolerance
