"""The grouped GEMM with weights in four bits against float32, for each format and tile."""

import pytest
import torch
from torch.nn import functional as F

from kernels.activation import Activation
from kernels.all2all.base import ExpertInput
from kernels.four_bit import FourBitWeights, quantise_four_bit
from kernels.four_bit_format import FourBitFormat
from kernels.gated_activation import gated_activation
from kernels.grouped_gemm.triton_four_bit import TritonFourBit
from kernels.routing.device_routing import route_on_device
from kernels.triton.expand_four_bit import expand_four_bit
from tests.closeness import calc_diff
from tests.in_turn import in_turn
from tests.triton.device import DEVICE, compiled_only

# The interpreter's of what lies at places that are nobody's.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

EXPERTS, TOP_K = 6, 2
TOLERANCE = {torch.float32: 1e-11, torch.bfloat16: 3e-5, torch.float16: 1e-6}
FORMATS = [
    FourBitFormat("mxfp4", 32),
    *(FourBitFormat("int4", group) for group in (32, 64, 128)),
    *(FourBitFormat("int4", group, zeros=True) for group in (32, 128)),
    FourBitFormat("int4", 64, zeros=True, ordered=True),
]
# The interpreter takes the bits of bfloat16 for integers.
DTYPES_AND_ROWS = [
    (torch.float32, 1),
    (torch.float16, 30),
    *compiled_only(*((torch.bfloat16, rows) for rows in (1, 20, 50, 100, 200, 400, 3000))),
]


@pytest.mark.parametrize(
    ("form", "dtype", "num_rows", "in_order"),
    in_turn(2, FORMATS, DTYPES_AND_ROWS, [False, True]),
)
@torch.inference_mode()
def test_equals_float32(form: FourBitFormat, dtype: torch.dtype, num_rows: int, in_order: bool):
    check(form, num_rows, dtype, in_order, "silu")


@pytest.mark.parametrize("dtype", [torch.float16, *compiled_only(torch.bfloat16)])
@pytest.mark.parametrize("form", [FORMATS[0], FORMATS[3]], ids=str)
@torch.inference_mode()
def test_biases_and_clamped_activation(form: FourBitFormat, dtype: torch.dtype):
    check(form, 20, dtype, False, "clamped_swiglu", bias=True)


@pytest.mark.parametrize("form", FORMATS, ids=str)
@torch.inference_mode()
def test_expanded_to_memory(form: FourBitFormat):
    """Exact but for the rounding of the values' dtype, columns in the order of the input."""
    matrix = quantise_four_bit(torch.randn(128, 256) / 16, form)
    if matrix.order is not None:
        matrix.order.copy_(torch.randperm(256))
    weights = FourBitWeights.empty(form, 128, 256, device=DEVICE, tiled=True)
    weights.set(matrix)
    found = expand_four_bit(weights, torch.float32)
    assert torch.equal(found.cpu(), matrix.dequantise())


@torch.inference_mode()
def test_every_code_and_many_scales():
    """Each of the 16 codes in each place of a tile, with exponents from the smallest to the largest."""
    form = FORMATS[0]
    codes = torch.arange(64 * 64).view(64, 64)
    matrix = quantise_four_bit(torch.zeros(64, 64), form)
    exponents = torch.tensor([0, 1, 100, 120, 127, 128], dtype=torch.uint8)
    scales = exponents.repeat(22)[:128].view(64, 2)
    dtype = compiled_only(torch.bfloat16) or [torch.float32]
    weights = FourBitWeights.empty(form, 1, 64, 64, device=DEVICE, tiled=True)
    for shift in range(16):
        given = type(matrix)(form, ((codes + shift + codes // 64) % 16).to(torch.uint8), scales)
        weights[0].set(given)
        found = multiply(weights, torch.eye(64).to(DEVICE, dtype[0])).t().float().cpu()
        # Of the smallest exponent even the largest code is below the smallest normal number.
        assert torch.allclose(found, given.dequantise(), rtol=0, atol=2e-38)


@pytest.mark.parametrize(
    ("dtype", "activation", "bias"),
    [
        (torch.float16, "silu", True),
        *compiled_only((torch.bfloat16, None, False), (torch.bfloat16, "clamped_swiglu", True)),
    ],
)
@torch.inference_mode()
def test_programs_share_the_depth_of_a_tile(
    dtype: torch.dtype, activation: Activation | None, bias: bool
):
    """Of 13 blocks, which are no multiple of the parts; twice, as the counters of tiles must be 0 again."""
    from kernels.triton.four_bit_tiles import FourBitTile
    from kernels.triton.grouped_gemm_four_bit import grouped_gemm_four_bit
    from kernels.triton.split_depth import new_counters

    form, rows, depth = FourBitFormat("mxfp4", 32), 128, 13 * 64
    generator = torch.Generator().manual_seed(0)
    weights = FourBitWeights.empty(form, 2, rows, depth, device=DEVICE, tiled=True)
    wide = []
    for expert in range(2):
        drawn = torch.randn(rows, depth, generator=generator) / depth**0.5
        matrix = quantise_four_bit(drawn.to(DEVICE), form)
        weights[expert].set(matrix)
        wide.append(matrix.dequantise())
    x_RD = torch.randn(5, depth, generator=generator).to(DEVICE, dtype)
    added = torch.randn(2, rows, generator=generator).to(DEVICE, dtype) * bias
    tile, counters = FourBitTile(16, 64, 4, 2, 4, unroll=2, splits=3), new_counters(DEVICE)
    assert tile.parts(2 if activation else 4, depth, num_sms=8) == 3
    bounds = torch.tensor([[0, 2], [2, 5]], dtype=torch.int32, device=DEVICE)
    first, second = (
        grouped_gemm_four_bit(
            *(x_RD, None, weights, *bounds, len(x_RD)),
            activation=activation,
            tile=tile,
            num_sms=8,
            bias=added if bias else None,
            counters=counters,
        )
        for _ in range(2)
    )
    assert torch.equal(first, second) and not counters.any()
    for expert, (start, end) in enumerate(bounds.t().tolist()):
        expected = F.linear(x_RD[start:end].float(), wide[expert], added[expert].float())
        if activation:
            expected = gated_activation(expected, activation)
        assert calc_diff(first[start:end], expected) < TOLERANCE[dtype]


def multiply(weights: FourBitWeights, x_RD: torch.Tensor) -> torch.Tensor:
    """Return x @ weights.T of one expert."""
    from kernels.triton.four_bit_tiles import FourBitTile
    from kernels.triton.grouped_gemm_four_bit import grouped_gemm_four_bit

    bounds = torch.tensor([0, len(x_RD)], dtype=torch.int32, device=DEVICE)
    tile = FourBitTile(16, 64, 4, 2, 1)
    return grouped_gemm_four_bit(
        *(x_RD, None, weights, bounds[:1], bounds[1:], len(x_RD)),
        activation=None,
        tile=tile,
        num_sms=2,
    )


def check(
    form: FourBitFormat,
    num_rows: int,
    dtype: torch.dtype,
    in_order: bool,
    activation: Activation,
    *,
    bias: bool = False,
) -> None:
    """Compare both products with float32 products of what the codes stand for; one expert has no rows."""
    hidden, width, local = 192 if form.group < 128 else 256, 128, EXPERTS - 2
    generator = torch.Generator().manual_seed(num_rows)
    x_ND = torch.randn(num_rows, hidden, generator=generator).to(DEVICE, dtype)
    gemm = TritonFourBit(form, num_sms=3, device=DEVICE)
    packed, wide = [], []
    for rows, columns in ((2 * width, hidden), (hidden, width)):
        weights = gemm.empty_weights(local, rows, columns, device=DEVICE, dtype=dtype)
        for expert in range(local):
            drawn = torch.randn(rows, columns, generator=generator) / columns**0.5
            matrix = quantise_four_bit(drawn.to(DEVICE), form)
            if matrix.order is not None:
                matrix.order.copy_(torch.randperm(columns, generator=generator))
            weights[expert].set(matrix)
            wide.append(matrix.dequantise())
        packed.append(weights)
    b13 = torch.randn(local, 2 * width, generator=generator).to(DEVICE, dtype) * bias
    b2 = torch.randn(local, hidden, generator=generator).to(DEVICE, dtype) * bias
    scores = torch.rand(num_rows, EXPERTS, generator=generator)
    scores[:, 3] = -1  # nobody's
    ids_NK = scores.topk(TOP_K).indices.to(DEVICE)
    experts = range(1, EXPERTS - 1)
    routing = route_on_device(ids_NK, experts, num_experts=EXPERTS)
    routed = ExpertInput(x_ND, routing.offs_e, None, routing)
    if in_order:
        num_routed = int(routing.offs_e[-1])
        routed = ExpertInput(routed.permuted_rows()[:num_routed].contiguous(), routing.offs_e, None)
    y_RD = gemm(routed, *packed, activation, (b13, b2) if bias else None)
    for place, (start, end) in enumerate(zip(routing.starts_e, routing.ends_e, strict=True)):
        x_RD = x_ND[routing.row_R[start:end].long()].float()
        assert len(x_RD) == int((ids_NK == experts[place]).sum())
        h_R2I = F.linear(x_RD, wide[place], b13[place].float())
        h_RI = gated_activation(h_R2I, activation)
        expected_RD = F.linear(h_RI, wide[local + place], b2[place].float())
        if len(x_RD):
            assert calc_diff(y_RD[start:end], expected_RD) < TOLERANCE[dtype]
