"""The products of LoRA adapters by the Triton kernels against torch's operators."""

import pytest
import torch

from kernels.lora.experts import ExpertLora, ExpertRows
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
        out_TN[:, :240].clone().float(), x_TK.float(), AdapterRows.of(slots_T)
    )

    found = out_TN.clone().to(DEVICE)
    tiles = torch.tensor(tiles_of(blocks), dtype=torch.int32, device=DEVICE)
    h_ZTQ = lora_shrink(x_TK.to(DEVICE), a_SQK.to(DEVICE), slots_T.to(DEVICE), rank)
    lora_expand(found[:, :240], h_ZTQ, b_SNr.to(DEVICE), slots_T.to(DEVICE), tiles)

    found = found.cpu()
    assert_near(found[:, :240], expected, TOLERANCES)
    without = slots_T == 0
    assert torch.equal(found[without], out_TN[without]), "rows without an adapter are not written"
    assert torch.equal(found[:, 240:], out_TN[:, 240:])


@pytest.mark.parametrize("dtype", [torch.float32, *compiled_only(torch.bfloat16)])
@pytest.mark.parametrize("num_rows", [1, 45])
def test_of_experts_equals_torch(dtype: torch.dtype, num_rows: int) -> None:
    """Experts with rows of several slots, with none, and with more rows than a program has; 5 of 7 are local."""
    rank, depth, width = 6, 80, 150
    blocks = ((0, 75, 0), (75, 150, 1))
    places_e = torch.tensor([4, 0, 6, 1, 5], dtype=torch.int32)
    a_SEQK = draw(SLOTS, 7, 2 * rank, depth, dtype=dtype)
    b_SENr = draw(SLOTS, 7, width, rank, dtype=dtype)
    x_RK = draw(num_rows, depth, dtype=dtype) / depth**0.5
    out_RN, slots_R = draw(num_rows, width, dtype=dtype), slots_of("in turn", num_rows)
    bounds = torch.tensor([0, 0, num_rows - num_rows // 8, num_rows, num_rows])
    rows = ExpertRows.in_order(slots_R, bounds)
    expected = out_RN.clone().float()
    lora = ExpertLora(a_SEQK.float(), b_SENr.float(), blocks, places_e)
    lora.add_to(expected, x_RK.float(), rows)
    for slot, expert, row in zip(
        slots_R.tolist(), rows.expert_R.tolist(), range(num_rows), strict=True
    ):
        if slot:  # the reference itself, one row at a time
            at = slot - 1, int(places_e[expert])
            h_Q = a_SEQK[at].float() @ x_RK[row].float()
            delta = [b_SENr[at][f:e].float() @ h_Q[p * rank :][:rank] for f, e, p in blocks]
            torch.testing.assert_close(
                expected[row], out_RN[row] + torch.cat(delta), atol=1e-4, rtol=1e-4
            )

    found, slots = out_RN.clone().to(DEVICE), slots_R.to(DEVICE)
    of_rows = rows.expert_R.to(DEVICE), places_e.to(DEVICE)
    tiles = torch.tensor(tiles_of(blocks), dtype=torch.int32, device=DEVICE)
    h_ZRQ = lora_shrink(x_RK.to(DEVICE), a_SEQK.to(DEVICE), slots, rank, of_rows)
    lora_expand(found, h_ZRQ, b_SENr.to(DEVICE), slots, tiles, of_rows)
    assert_near(found.cpu(), expected, TOLERANCES)


def test_rows_in_the_permuted_order_of_a_gpu() -> None:
    """Experts begin at multiples of 4; rows between them and behind them are unused, and name any gathered row."""
    row_R = torch.tensor([2, 0, 99, -7, 1, 3, 0, 55, -1], dtype=torch.int32)
    starts, ends = torch.tensor([0, 4, 4, 8]), torch.tensor([2, 4, 7, 8])
    slots_N = torch.tensor([5, 0, 7, 1], dtype=torch.int32)
    rows = ExpertRows.on_device(slots_N, row_R, starts, ends)
    assert rows.slots_R.tolist() == [7, 5, 0, 0, 0, 1, 5, 0, 0]
    assert rows.expert_R[[0, 1, 4, 5, 6]].tolist() == [0, 0, 2, 2, 2]
