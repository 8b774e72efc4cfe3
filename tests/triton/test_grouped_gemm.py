"""The grouped GEMM against float32, for each tile shape, with rows through an index and rows in order."""

import pytest
import torch
from torch.nn import functional as F

from kernels.activation import Activation
from kernels.all2all.base import ExpertInput
from kernels.gated_activation import gated_activation
from kernels.grouped_gemm.triton_grouped import TritonGroupedGemm
from kernels.routing.device_routing import route_on_device
from tests.closeness import calc_diff
from tests.in_turn import in_turn
from tests.triton.device import DEVICE, compiled_only

# The interpreter's of what lies at places that are nobody's.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

EXPERTS, TOP_K = 6, 2
TOLERANCE = {torch.float32: 1e-11, torch.bfloat16: 2e-5, torch.float16: 1e-6}
ROWS = [1, 20, 100, 200, 400, *compiled_only(3000)]
# float32 has one tile shape. The interpreter takes the bits of bfloat16 for integers.
DTYPES_AND_ROWS = [
    *((torch.float32, num_rows) for num_rows in (1, 50)),
    *((torch.float16, num_rows) for num_rows in ROWS),
    *compiled_only(*((torch.bfloat16, num_rows) for num_rows in ROWS)),
]


@pytest.mark.parametrize(
    ("hidden", "width", "dtype", "num_rows", "in_order"),
    in_turn(2, [(128, 64), (72, 40)], DTYPES_AND_ROWS, [False, True]),
)
@torch.inference_mode()
def test_equals_float32(hidden, width, num_rows, dtype, in_order):
    """As many rows an expert as each tile shape is for, one expert without any."""
    check(hidden, width, num_rows, dtype, in_order, "silu")


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "clamped_swiglu"])
@torch.inference_mode()
def test_other_activations_equal_float32(activation: Activation):
    check(72, 40, 20, torch.float32, False, activation)


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize(("hidden", "width", "num_rows"), [(72, 40, 20), (128, 64, 400)])
@torch.inference_mode()
def test_biases_are_added(hidden: int, width: int, num_rows: int, in_order: bool):
    """Widths of whole tiles and of parts."""
    check(hidden, width, num_rows, torch.float16, in_order, "clamped_swiglu", bias=True)


def check(
    hidden: int,
    width: int,
    num_rows: int,
    dtype: torch.dtype,
    in_order: bool,
    activation: Activation,
    *,
    bias: bool = False,
) -> None:
    """Compare the kernel with a float32 product of each expert's rows."""
    generator = torch.Generator().manual_seed(num_rows)
    x_ND = torch.randn(num_rows, hidden, generator=generator).to(DEVICE, dtype)
    w13 = torch.randn(EXPERTS - 2, 2 * width, hidden, generator=generator) / hidden**0.5
    w2 = torch.randn(EXPERTS - 2, hidden, width, generator=generator) / width**0.5
    w13, w2 = w13.to(DEVICE, dtype), w2.to(DEVICE, dtype)
    b13 = torch.randn(EXPERTS - 2, 2 * width, generator=generator).to(DEVICE, dtype)
    b2 = torch.randn(EXPERTS - 2, hidden, generator=generator).to(DEVICE, dtype)
    if not bias:
        b13, b2 = torch.zeros_like(b13), torch.zeros_like(b2)
    scores = torch.rand(num_rows, EXPERTS, generator=generator)
    scores[:, 3] = -1  # nobody's
    ids_NK = scores.topk(TOP_K).indices.to(DEVICE)
    experts = range(1, EXPERTS - 1)
    routing = route_on_device(ids_NK, experts, num_experts=EXPERTS)
    routed = ExpertInput(x_ND, routing.offs_e, None, routing)
    if in_order:
        num_routed = int(routing.offs_e[-1])
        routed = ExpertInput(routed.permuted_rows()[:num_routed].contiguous(), routing.offs_e, None)
    y_RD = TritonGroupedGemm(num_sms=3)(routed, w13, w2, activation, (b13, b2) if bias else None)
    for local, (start, end) in enumerate(zip(routing.starts_e, routing.ends_e, strict=True)):
        x_RD = x_ND[routing.row_R[start:end].long()].float()
        assert len(x_RD) == int((ids_NK == experts[local]).sum())
        h_R2I = F.linear(x_RD, w13[local].float(), b13[local].float())
        expected_RD = F.linear(
            gated_activation(h_R2I, activation), w2[local].float(), b2[local].float()
        )
        if len(x_RD):
            assert calc_diff(y_RD[start:end], expected_RD) < TOLERANCE[dtype]
