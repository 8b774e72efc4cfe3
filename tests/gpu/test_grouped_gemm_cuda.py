"""Every grouped GEMM of a GPU against float32, through the exchange of one rank: eager, without waiting, as a graph."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from kernels.activation import Activation
from kernels.all2all.base import MaskedInput
from kernels.all2all.local import LocalAllToAll
from kernels.backends.select import probe
from kernels.block_fp8 import quantise_blocks
from kernels.four_bit import quantise_four_bit
from kernels.four_bit_format import FourBitFormat
from kernels.gated_activation import gated_activation
from kernels.grouped_gemm.base import GroupedGemm
from kernels.grouped_gemm.deepgemm import DeepGemm
from kernels.interface.registry import backend_class
from kernels.routing.permute import Permutation
from tests.closeness import calc_diff

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

FORMATS = {
    "mxfp4": FourBitFormat("mxfp4", 32),
    "int4-32": FourBitFormat("int4", 32),
    "int4-128": FourBitFormat("int4", 128),
    "int4-64-zeros": FourBitFormat("int4", 64, zeros=True),
    "int4-32-ordered": FourBitFormat("int4", 32, zeros=True, ordered=True),
}
FOUR_BITS = [f"triton_four_bit {name}" for name in FORMATS]
GEMMS = ["torch_grouped", "triton", "deepgemm", "deepgemm_fp8", *FOUR_BITS]
# Largest difference from the float32 product of the same bfloat16 values: two roundings to 8 bits, or to 4 bits
# of rows and weights before each of two products (0.037 rms each, as DeepGEMM's own tests have it).
MAX_DIFF = {"deepgemm_fp8": 3e-3}


@dataclass(frozen=True)
class Experts:
    """Weights of some experts, in float32 and as the product wants them, and how rows are routed to them."""

    num_rows: int
    top_k: int = 8
    num_experts: int = 128
    local: range = range(32, 64)
    hidden: int = 2048
    width: int = 768
    routing: str = "random"


CASES = {
    "one_row": Experts(1),
    "few_rows": Experts(13),
    # fewer tiles than SMs: programs of `triton_four_bit` share their depth
    "rows_for_few_experts": Experts(3, local=range(128)),
    "decode": Experts(256),
    "prefill": Experts(3000),
    # more than 768 rows an expert, for which `triton` takes its kernel for Hopper
    "many_rows": Experts(2000, num_experts=16, local=range(4, 8), hidden=512, width=256),
    "one_expert": Experts(400, routing="one"),
    "nobody": Experts(40, routing="nobody"),
    "one_rank": Experts(33, top_k=4, num_experts=16, local=range(16), hidden=256, width=128),
    "one_local_expert": Experts(
        9, top_k=2, num_experts=4, local=range(1, 2), hidden=128, width=256
    ),
    "no_local_experts": Experts(
        9, top_k=2, num_experts=4, local=range(4, 4), hidden=128, width=256
    ),
    "no_rows": Experts(0, hidden=128, width=128),
}


def build(name: str) -> GroupedGemm:
    name, _, form = name.partition(" ")
    reason = probe("cuda").get(f"grouped_gemm.{name}")
    if reason:
        pytest.skip(reason)
    backend = backend_class("grouped_gemm", name)
    gemm: GroupedGemm = backend(FORMATS[form]) if form else backend()
    return gemm


def prepare(gemm: GroupedGemm, weights: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Weights as the product wants them, and the weights to compare with: in four bits what the codes stand for."""
    if gemm.fp8_weights:
        return quantise_blocks(weights), weights
    if not gemm.four_bit:
        return weights, weights
    packed: Any = gemm.empty_weights(*weights.shape, device="cuda", dtype=weights.dtype)
    exact = weights.float()
    for expert, matrix in enumerate(weights):
        rounded = quantise_four_bit(matrix, packed.format)
        if rounded.order is not None:
            rounded.order.copy_(torch.randperm(matrix.shape[1], device="cuda"))
        packed[expert].set(rounded)
        exact[expert] = rounded.dequantise()
    return packed, exact


class Layer:
    """One MoE layer of one rank whose other ranks' experts answer nothing."""

    def __init__(
        self,
        gemm: GroupedGemm,
        case: Experts,
        dtype: torch.dtype = torch.bfloat16,
        activation: Activation = "silu",
    ):
        self.case, self.gemm, self.dtype, self.activation = case, gemm, dtype, activation
        num_local, hidden, width = len(case.local), case.hidden, case.width
        generator = torch.Generator("cuda").manual_seed(5)
        new = {"generator": generator, "device": "cuda"}
        self.w13 = (torch.randn(num_local, 2 * width, hidden, **new) / hidden**0.5).to(dtype)
        self.w2 = (torch.randn(num_local, hidden, width, **new) / width**0.5).to(dtype)
        prepared13, self.w13 = prepare(gemm, self.w13)
        prepared2, self.w2 = prepare(gemm, self.w2)
        self.prepared = [prepared13, prepared2]
        self.all2all = self.exchange(gemm.unaligned_rows)

    def exchange(self, unaligned_rows: float) -> LocalAllToAll:
        """Aligns rows of experts that have more rows on average."""
        order = Permutation(
            self.case.local,
            num_experts=self.case.num_experts,
            device="cuda",
            dtype=torch.int64,
            alignment=self.gemm.row_alignment,
            unaligned_rows=unaligned_rows,
        )
        return LocalAllToAll(order)

    def draw(self, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x, topk_idx, topk_weights."""
        case = self.case
        new = {"generator": torch.Generator("cuda").manual_seed(seed), "device": "cuda"}
        x_ND = torch.randn(case.num_rows, case.hidden, **new).to(self.dtype)
        scores = torch.rand(case.num_rows, case.num_experts, **new)
        topk_idx_NK = scores.topk(case.top_k, dim=-1).indices
        topk_idx_NK[case.num_rows // 2 : case.num_rows // 2 + 1] = -1 if case.num_rows > 1 else 40
        if case.routing != "random":
            topk_idx_NK.fill_(-1)
        if case.routing == "one":
            topk_idx_NK[:, 3] = case.local.start + 5
        return x_ND, topk_idx_NK, torch.rand(case.num_rows, case.top_k, **new)

    def __call__(self, x_ND, topk_idx_NK, weights_NK) -> torch.Tensor:
        routed = self.all2all.dispatch(x_ND, topk_idx_NK, weights_NK).wait()
        y_RD = self.gemm(routed, *self.prepared, self.activation)
        return self.all2all.combine(y_RD, routed.handle).wait()

    def expected(self, x_ND, topk_idx_NK, weights_NK) -> torch.Tensor:
        """Expert by expert in float32."""
        out_ND = torch.zeros(x_ND.shape, device="cuda")
        for local, expert in enumerate(self.case.local):
            row, k = (topk_idx_NK == expert).nonzero(as_tuple=True)
            weights = self.w13[local].float(), self.w2[local].float()
            y_RD = mlp(x_ND[row].float(), *weights, self.activation)
            out_ND.index_add_(0, row, y_RD * weights_NK[row, k].unsqueeze(1))
        return out_ND


def mlp(
    x_RD: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor, activation: Activation = "silu"
) -> torch.Tensor:
    return F.linear(gated_activation(F.linear(x_RD, w13), activation), w2)


@pytest.mark.parametrize("label", CASES)
@pytest.mark.parametrize("name", GEMMS)
@torch.inference_mode()
def test_equals_float32(name: str, label: str):
    layer = Layer(build(name), CASES[label])
    inputs = layer.draw(1)
    assert calc_diff(layer(*inputs), layer.expected(*inputs)) < MAX_DIFF.get(name, 2e-5)


@pytest.mark.parametrize("label", ["decode", "many_rows"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("name", GEMMS)
@torch.inference_mode()
def test_other_activations_equal_float32(name: str, activation: Activation, label: str):
    layer = Layer(build(name), CASES[label], activation=activation)
    inputs = layer.draw(1)
    assert calc_diff(layer(*inputs), layer.expected(*inputs)) < MAX_DIFF.get(name, 2e-5)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-11), (torch.float16, 1e-6)], ids=str
)
@pytest.mark.parametrize("shape", [(2048, 768), (32, 24), (72, 40)], ids=str)
@pytest.mark.parametrize("num_rows", [3, 600])
@torch.inference_mode()
def test_triton_takes_other_floats_and_odd_widths(num_rows, shape, dtype, tolerance):
    hidden, width = shape
    case = Experts(num_rows, num_experts=16, local=range(3, 10), hidden=hidden, width=width)
    layer = Layer(build("triton"), case, dtype)
    inputs = layer.draw(1)
    assert calc_diff(layer(*inputs), layer.expected(*inputs)) < tolerance


@pytest.mark.parametrize("label", ["rows_for_few_experts", "few_rows", "decode", "prefill"])
@pytest.mark.parametrize("name", GEMMS)
@torch.inference_mode()
def test_captures_into_a_graph_and_never_waits(name: str, label: str):
    layer = Layer(build(name), CASES[label])
    buffers = layer.draw(1)
    layer(*buffers)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(*buffers)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_ND = layer(*buffers)
    for seed in (1, 2, 3):
        drawn = layer.draw(seed)
        if seed == 3:
            drawn[1].fill_(-1)[:, 0] = CASES[label].local.stop - 1
        for buffer, value in zip(buffers, drawn, strict=True):
            buffer.copy_(value)
        out_ND.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out_ND, layer(*drawn)), seed


@pytest.mark.parametrize("name", ["triton", "deepgemm", "triton_four_bit mxfp4"])
@torch.inference_mode()
def test_num_sms(name: str):
    gemm = build(name)
    layer = Layer(gemm, CASES["decode"])
    inputs, all_sms = layer.draw(1), torch.cuda.get_device_properties().multi_processor_count
    expected = layer.expected(*inputs)
    try:
        for num_sms in (8, 24, 112):
            gemm.set_num_sms(num_sms)
            assert calc_diff(layer(*inputs), expected) < 2e-5
    finally:
        gemm.set_num_sms(all_sms)


@pytest.mark.parametrize("name", ["deepgemm", "deepgemm_fp8"])
@torch.inference_mode()
def test_masked(name: str):
    gemm, case = build(name), Experts(0, num_experts=6, local=range(6), hidden=512, width=256)
    layer, room = Layer(gemm, case), 192
    counts = [0, 1, 192, 17, 130, 64]
    generator = torch.Generator("cuda").manual_seed(2)
    x_eMD = torch.randn(6, room, 512, generator=generator, device="cuda").bfloat16()
    x, scale_eMS = x_eMD, None
    if name == "deepgemm_fp8":
        from kernels.triton.scatter_fp8 import scatter_fp8

        in_place = torch.arange(6 * room, dtype=torch.int32, device="cuda").unsqueeze(1)
        x, scale_RS = scatter_fp8(x_eMD.view(-1, 512), in_place, 6 * room)
        x = x.view(6, room, 512)
        scale_eMS = scale_RS.t().reshape(-1, 6, room).transpose(0, 1).contiguous().transpose(1, 2)
    counts_e = torch.tensor(counts, dtype=torch.int32, device="cuda")
    y_eMD = gemm.call_masked(MaskedInput(x, scale_eMS, counts_e, 64, None), *layer.prepared)
    assert y_eMD.dtype == torch.bfloat16
    for expert, count in enumerate(counts):
        weights = layer.w13[expert].float(), layer.w2[expert].float()
        expected = mlp(x_eMD[expert, :count].float(), *weights)
        assert calc_diff(y_eMD[expert, :count], expected) < MAX_DIFF.get(name, 2e-5), expert


@torch.inference_mode()
def test_fp8_equals_the_product_of_rounded_values():
    """Against float32 on what FP8 holds of rows and weights, little is left but the sums' order."""
    layer = Layer(build("deepgemm_fp8"), CASES["one_rank"])
    inputs = layer.draw(1)
    out_ND = layer(*inputs)
    for weights, prepared in zip((layer.w13, layer.w2), layer.prepared, strict=True):
        scales = prepared.scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
        assert calc_diff(prepared.values.float() * scales, weights.float()) < 7e-4
    x_ND, topk_idx_NK, weights_NK = inputs
    expected_ND = torch.zeros(x_ND.shape, device="cuda")
    w13, w2 = (
        (w.values.float() * w.scales.repeat_interleave(128, 1).repeat_interleave(128, 2))
        for w in layer.prepared
    )
    for expert in layer.case.local:
        row, k = (topk_idx_NK == expert).nonzero(as_tuple=True)
        gate_RI, up_RI = F.linear(rounded(x_ND[row].float()), w13[expert]).bfloat16().chunk(2, -1)
        hidden_RI = rounded(F.silu(gate_RI.float()) * up_RI.float())
        y_RD = F.linear(hidden_RI, w2[expert])
        expected_ND.index_add_(0, row, y_RD * weights_NK[row, k].unsqueeze(1))
    assert calc_diff(out_ND, expected_ND) < 1e-4


@pytest.mark.parametrize("label", ["one_row", "few_rows", "decode", "prefill", "one_rank"])
@torch.inference_mode()
def test_rows_that_arrive_in_fp8_give_equal_results(label: str):
    """Few rows of an expert and many: rounded by the sender or here, the values are equal."""
    from kernels.triton.quantise_rows import quantise_rows

    layer = Layer(build("deepgemm_fp8"), CASES[label])
    x_ND, topk_idx_NK, weights_NK = layer.draw(1)
    routed = layer.all2all.dispatch(x_ND, topk_idx_NK, weights_NK).wait()
    values, scales = quantise_rows(x_ND)
    arrived = replace(routed, x_RD=values, scale_RS=scales.contiguous())
    outs = [
        layer.all2all.combine(layer.gemm(rows, *layer.prepared), routed.handle).wait()
        for rows in (routed, arrived)
    ]
    assert torch.equal(*outs)


@pytest.mark.parametrize("mean", [1, 8, 16, 32, 48, 64])
@torch.inference_mode()
def test_few_rows_of_each_expert_equal_deepgemms(mean: int):
    """Both products of FP8 on each side of the number of rows at which the other is taken."""
    gemm = build("deepgemm_fp8")
    layer = Layer(gemm, Experts(mean * 16))
    drawn, found = layer.draw(1), []
    for unaligned, product in (
        (gemm.unaligned_rows, partial(gemm._skinny, num_sms=132)),
        (0.0, partial(DeepGemm.__call__, gemm)),
    ):
        exchange = layer.exchange(unaligned)
        routed = exchange.dispatch(*drawn).wait()
        y_RD = product(routed, *layer.prepared)
        found.append(exchange.combine(y_RD, routed.handle).wait())
    assert calc_diff(*found) < 2e-4


def rounded(x_RD: torch.Tensor) -> torch.Tensor:
    """What e4m3 with a scale per 128 values keeps of float32 rows."""
    groups = x_RD.unflatten(1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True).clamp(1e-4) / 448
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).flatten(1)
