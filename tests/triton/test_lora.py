"""The products of LoRA adapters by the Triton kernels against torch's operators."""

import pytest
import torch

from kernels.lora.product import LoraWeights, tiles_of
from kernels.lora.rows import AdapterRows
from kernels.triton.lora_expand import lora_expand
from kernels.triton.lora_shrink import lora_shrink
from tests.closeness import assert_near
from tests.triton.device import DEVICE, compiled_only

SLOTS = 3
TOLERANCES = {torch.bfloat16: 5e-2, torch.float16: 2e-2, torch.float32: 1e-4}


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def slots_of(mix: str, num_rows: int) -> torch.Tensor:
    """int64 [T]."""
    rows = torch.arange(num_rows)
    return {"none": 0 * rows, "one": 0 * rows + 2, "in turn": rows % (SLOTS + 1)}[mix]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, *compiled_only(torch.bfloat16)])
@pytest.mark.parametrize("mix", ["none", "one", "in turn"])
@pytest.mark.parametrize(("num_rows", "rank", "depth"), [(1, 8, 64), (5, 4, 1100), (70, 24, 96)])
def test_equals_torch(dtype: torch.dtype, mix: str, num_rows: int, rank: int, depth: int) -> None:
    """Three parts, of which one has rows in two places, as a query and its gate; more columns than a tile has."""
    blocks = ((0, 40, 0), (40, 190, 1), (190, 200, 2), (200, 240, 0))
    pool = draw(SLOTS, 3 * rank * depth + 240 * rank, dtype=dtype)
    a_SQK = pool[:, : 3 * rank * depth].view(SLOTS, 3 * rank, depth)
    b_SNr = pool[:, 3 * rank * depth :].view(SLOTS, 240, rank)
    x_TK = (draw(num_rows, depth + 8, dtype=dtype) / depth**0.5)[:, :depth]  # rows are strided
    out_TN = draw(num_rows, 250, dtype=dtype)
    slots_T = slots_of(mix, num_rows)
    expected = LoraWeights(a_SQK.float(), b_SNr.float(), blocks).add_to(
        out_TN[:, :240].float(), x_TK.float(), AdapterRows.of(slots_T)
    )

    found = out_TN.to(DEVICE)
    tiles = torch.tensor(tiles_of(blocks), dtype=torch.int32, device=DEVICE)
    h_ZTQ = lora_shrink(x_TK.to(DEVICE), a_SQK.to(DEVICE), slots_T.to(DEVICE), rank)
    lora_expand(found[:, :240], h_ZTQ, b_SNr.to(DEVICE), slots_T.to(DEVICE), tiles)

    found = found.cpu()
    assert_near(found[:, :240], expected, TOLERANCES)
    without = slots_T == 0
    assert torch.equal(found[without], out_TN[without]), "rows without an adapter are not written"
    assert torch.equal(found[:, 240:], out_TN[:, 240:])
