"""The pool compiles the kernels that a rank's calls need: afterwards no call compiles."""

import os
from pathlib import Path

import pytest
import torch

from kernels import dense_fp8
from kernels.backends.select import probe
from kernels.block_fp8 import BlockWeights, Fp8Rows
from kernels.grouped_gemm.deepgemm import DeepGemmFp8
from kernels.grouped_gemm.deepgemm_kernels import compile_products, products_of
from kernels.interface.backend import BackendShape
from kernels.triton.quantise_rows import empty_scales

MISSING = (
    probe("cuda").get("grouped_gemm.deepgemm_fp8") if torch.cuda.is_available() else "needs a GPU"
)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

SHAPE = BackendShape(
    device="cuda",
    dtype=torch.bfloat16,
    num_ranks=1,
    hidden_size=512,
    moe_intermediate_size=256,
    num_experts=8,
    top_k=2,
    max_num_tokens=1024,
)
DENSE = (1024, 512)


def kernels() -> set[Path]:
    return set(Path(os.environ["DG_JIT_CACHE_DIR"]).rglob("kernel.cubin"))


def test_calls_find_what_the_pool_has_compiled() -> None:
    gemm = DeepGemmFp8()
    products = products_of(
        SHAPE,
        [DENSE],
        (1024, 64),
        fp8=True,
        alignment=gemm.row_alignment,
        fewest=gemm.unaligned_rows,
    )
    assert {product.num_groups for product in products} == {0, 8}
    compile_products(products)
    found = kernels()
    assert found
    for groups, width, depth, num_rows, _ in products:
        if not groups:
            x = dense_fp8.quantise(
                torch.zeros(num_rows, depth, dtype=torch.bfloat16, device="cuda")
            )
            dense_fp8.multiply(x, BlockWeights.empty(width, depth, device="cuda"))
            continue
        values = torch.zeros(num_rows, depth, device="cuda").to(torch.float8_e4m3fn)
        rows = Fp8Rows(values, empty_scales(num_rows, depth // 128, values.device))
        weights = BlockWeights.empty(groups, width, depth, device="cuda")
        ends = torch.zeros(groups, dtype=torch.int32, device="cuda")
        gemm._contiguous(rows, weights, ends)
    torch.cuda.synchronize()
    assert kernels() == found
    assert compile_products(products) == 0
