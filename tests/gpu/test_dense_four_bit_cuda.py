"""Dense products with weights in four bits on a GPU, against float32, eager and as a graph."""

import pytest
import torch
from torch.nn import functional as F

from kernels import dense_four_bit
from kernels.backends.select import probe
from kernels.four_bit import FourBitWeights, quantise_four_bit
from kernels.four_bit_format import FourBitFormat
from kernels.triton.expand_four_bit import expand_four_bit
from tests.closeness import calc_diff
from workers.layers.linear import FourBitLinear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
# Qwen3-30B-A3B's q, k and v; its output; MLA's down-projection of DeepSeek-V3; one tile of rows
SHAPES = [(5120, 2048), (2048, 4096), (2112, 7168), (64, 128)]
ROWS = [0, 1, 3, 16, 17, 33, 64, 65, 300, 600, 4096]
FORMATS = [
    FourBitFormat("mxfp4", 32),
    FourBitFormat("int4", 128),
    FourBitFormat("int4", 32, zeros=True, ordered=True),
]


@pytest.fixture(autouse=True, scope="module")
def kernel() -> None:
    if reason := probe("cuda").get("grouped_gemm.triton_four_bit"):
        pytest.skip(reason)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, device="cuda")


def weights(form: FourBitFormat, *shape: int) -> tuple[FourBitWeights, torch.Tensor]:
    """Packed weights, and the float32 values that they stand for."""
    matrix = quantise_four_bit(draw(*shape, seed=1) / shape[1] ** 0.5, form)
    if matrix.order is not None:
        matrix.order.copy_(torch.randperm(shape[1], device="cuda"))
    packed = FourBitWeights.empty(form, *shape, device="cuda", tiled=True)
    packed.set(matrix)
    return packed, matrix.dequantise()


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.inference_mode()
def test_equals_float32(shape: tuple[int, int], form: FourBitFormat) -> None:
    """Any number of rows, contiguous and strided."""
    packed, w_NK = weights(form, *shape)
    for num_rows in ROWS:
        x_TK = draw(num_rows, shape[1]).bfloat16()
        wide = torch.cat((x_TK, x_TK), 1)[:, : shape[1]]
        expected = F.linear(x_TK.float(), w_NK)
        for rows in (x_TK, wide):
            found = dense_four_bit.multiply(rows, packed)
            assert found.shape == (num_rows, shape[0]) and found.dtype == torch.bfloat16
            assert calc_diff(found, expected) < 2e-5, num_rows


@torch.inference_mode()
def test_bias_and_residual() -> None:
    packed, w_NK = weights(FORMATS[1], 2048, 4096)
    x_TK, bias_N, start_TN = (
        draw(9, 4096).bfloat16(),
        draw(2048).bfloat16(),
        draw(9, 2048).bfloat16(),
    )
    expected = F.linear(x_TK.float(), w_NK)
    found = FourBitLinear(packed, bias_N)(x_TK)
    assert calc_diff(found, expected + bias_N.float()) < 2e-5
    found = FourBitLinear(packed)(x_TK, start_TN)
    assert calc_diff(found, expected + start_TN.float()) < 2e-5


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.inference_mode()
def test_expanded_values_are_rounded_once(shape: tuple[int, int], form: FourBitFormat) -> None:
    packed, w_NK = weights(form, *shape)
    found = expand_four_bit(packed, torch.bfloat16)
    assert torch.allclose(found.float(), w_NK, rtol=2**-7, atol=0)
    if form.kind == "mxfp4":
        assert torch.equal(found.float(), w_NK)


@pytest.mark.parametrize("num_rows", [1, 17, 33, 300, 600])
@torch.inference_mode()
def test_a_graph_equals_eager_and_never_waits(num_rows: int) -> None:
    packed, _ = weights(FORMATS[0], 5120, 2048)
    linear, x_TK = FourBitLinear(packed), draw(num_rows, 2048).bfloat16()
    linear(x_TK)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        linear(x_TK)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_TN = linear(x_TK)
    for seed in (1, 2):
        x_TK.copy_(draw(num_rows, 2048, seed=seed))
        graph.replay()
        assert torch.equal(out_TN, linear(x_TK)), seed
