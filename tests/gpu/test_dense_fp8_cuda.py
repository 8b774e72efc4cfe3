"""Dense products in FP8 on a GPU: DeepGEMM's with rows quantised here, against float32, eager and as a graph."""

import pytest
import torch
from torch.nn import functional as F

from kernels import dense_fp8
from kernels.backends.select import probe
from kernels.block_fp8 import BlockWeights, Fp8Rows, dequantise, quantise_blocks
from kernels.gated_activation import gated_activation
from kernels.triton.norm import add_rms_norm, add_rms_norm_fp8
from tests.closeness import calc_diff

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
# Qwen3-30B-A3B's q, k and v; its output; MLA's down-projection of DeepSeek-V3; a width of one step of 64
SHAPES = [(5120, 2048), (2048, 4096), (2112, 7168), (192, 128)]
ROWS = [0, 1, 3, 16, 64, 65, 300, 4096]


@pytest.fixture(autouse=True, scope="module")
def deep_gemm() -> None:
    if reason := probe("cuda").get("grouped_gemm.deepgemm_fp8"):
        pytest.skip(reason)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    x = torch.randn(*shape, generator=generator, device="cuda")
    return (x * (1 + torch.arange(shape[-1], device="cuda") // 128 % 5)).bfloat16()


def exact(rows: Fp8Rows) -> torch.Tensor:
    return rows.values.float() * rows.scales.repeat_interleave(128, 1)


def weights(*shape: int) -> BlockWeights:
    return quantise_blocks(draw(*shape, seed=1).float() / shape[1] ** 0.5)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.inference_mode()
def test_equals_the_product_of_rounded_values(shape: tuple[int, int]) -> None:
    """Any number of rows; little but the order of sums is left, and the result's rounding."""
    held = weights(*shape)
    w_NK = dequantise(held.values, held.scales)
    for num_rows in ROWS:
        x_TK = draw(num_rows, shape[1])
        rows = dense_fp8.quantise(x_TK)
        found = dense_fp8.multiply(rows, held)
        assert found.shape == (num_rows, shape[0]) and found.dtype == torch.bfloat16
        assert calc_diff(found, F.linear(exact(rows), w_NK)) < 2e-5, num_rows
        assert calc_diff(found, F.linear(x_TK.float(), w_NK)) < 2e-3, num_rows


@pytest.mark.parametrize("num_rows", [1, 6, 300])
@torch.inference_mode()
def test_rows_are_quantised_by_the_kernel_before(num_rows: int) -> None:
    """The norm and the activation round as the kernel for rows alone does."""
    x, delta, weight = draw(num_rows, 2048), draw(num_rows, 2048, seed=2), draw(1, 2048)[0]
    plain_x = x.clone()
    expected = dense_fp8.quantise(add_rms_norm(plain_x, delta, weight, 1e-6))
    found = add_rms_norm_fp8(x, delta, weight, 1e-6)
    assert torch.equal(x, plain_x) and torch.equal(found.scales, expected.scales)
    assert torch.equal(found.values.float(), expected.values.float())
    h = draw(num_rows, 1536)
    activated = dense_fp8.activate(h, "silu")
    assert calc_diff(exact(activated), gated_activation(h.float(), "silu")) < 1e-3


@pytest.mark.parametrize("num_rows", [1, 64, 300])
@torch.inference_mode()
def test_captures_into_a_graph_and_never_waits(num_rows: int) -> None:
    held, x = weights(5120, 2048), draw(num_rows, 2048)
    dense_fp8.compile_products([held], [num_rows], 0, 1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        dense_fp8.multiply(dense_fp8.quantise(x), held)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dense_fp8.multiply(dense_fp8.quantise(x), held)
    for seed in (3, 4):
        x.copy_(draw(num_rows, 2048, seed=seed))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, dense_fp8.multiply(dense_fp8.quantise(x), held))
