"""The products of LoRA adapters by the Triton kernels against torch's operators."""

import pytest
import torch

from kernels.lora import experts, product
from kernels.lora.experts import ExpertLora, ExpertRows
from kernels.lora.product import LoraWeights, tiles_of
from kernels.lora.rows import AdapterRows
from kernels.triton.expert_lora_expand import expert_lora_expand
from kernels.triton.expert_lora_shrink import expert_lora_shrink
from kernels.triton.expert_lora_tiles import expert_lora_tiles, most_tiles
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
    tiles = torch.tensor(tiles_of(blocks, product.TILE_COLUMNS), dtype=torch.int32, device=DEVICE)
    h_ZTQ = lora_shrink(x_TK.to(DEVICE), a_SQK.to(DEVICE), slots_T.to(DEVICE), rank)
    lora_expand(found[:, :240], h_ZTQ, b_SNr.to(DEVICE), slots_T.to(DEVICE), tiles)

    found = found.cpu()
    assert_near(found[:, :240], expected, TOLERANCES)
    without = slots_T == 0
    assert torch.equal(found[without], out_TN[without]), "rows without an adapter are not written"
    assert torch.equal(found[:, 240:], out_TN[:, 240:])


def routed_rows(num_rows: int, num_gathered: int) -> ExpertRows:
    """Five experts whose rows begin at multiples of 4: none, `num_rows`, one, none, three; each of any gathered row.

    Rows between experts and behind the last are unused, and name rows that are not there.
    """
    counts = torch.tensor([0, num_rows, 1, 0, 3])
    padded = (counts + 3) // 4 * 4
    starts_e = padded.cumsum(0) - padded
    row_R = torch.full((int(padded.sum()) + 5,), 1 << 20)
    source = torch.Generator().manual_seed(num_rows)
    for start, count in zip(starts_e.tolist(), counts.tolist(), strict=True):
        gathered = torch.randint(num_gathered, (count,), generator=source)
        row_R[start : start + count] = gathered
    slots_N = slots_of("in turn", num_gathered)
    return ExpertRows(slots_N, row_R.int(), starts_e.int(), (starts_e + counts).int())


def used(rows: ExpertRows) -> list[tuple[int, int]]:
    """(permuted row, local expert) of all rows that an expert uses."""
    bounds = zip(rows.starts_e.tolist(), rows.ends_e.tolist(), strict=True)
    return [
        (row, expert) for expert, (start, end) in enumerate(bounds) for row in range(start, end)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, *compiled_only(torch.bfloat16)])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize(("num_rows", "depth"), [(1, 80), (7, 1100), (90, 80)])
def test_of_experts_equals_torch(
    dtype: torch.dtype, gathered: bool, num_rows: int, depth: int
) -> None:
    """Few rows and many, of several slots in one program; a depth in pieces; five of seven experts are local."""
    rank, width, num_gathered = 6, 150, 11
    blocks = ((0, 75, 0), (75, 150, 1))
    places_e = torch.tensor([4, 0, 6, 1, 5], dtype=torch.int32)
    a_SEQK = draw(SLOTS, 7, 2 * rank, depth, dtype=dtype)
    b_SENr = draw(SLOTS, 7, width, rank, dtype=dtype)
    rows = routed_rows(num_rows, num_gathered)
    x = draw(num_gathered if gathered else len(rows.row_R), depth + 8, dtype=dtype)[:, :depth]
    x = x / depth**0.5  # rows are strided
    out_RN = draw(len(rows.row_R), width, dtype=dtype)
    expected = out_RN.clone().float()
    for row, expert in used(rows):
        if slot := int(rows.slots_N[rows.row_R[row]]):
            at = slot - 1, int(places_e[expert])
            h_Q = a_SEQK[at].float() @ x[int(rows.row_R[row]) if gathered else row].float()
            delta = [b_SENr[at][f:e].float() @ h_Q[p * rank :][:rank] for f, e, p in blocks]
            expected[row] += torch.cat(delta)

    found = out_RN.clone().to(DEVICE)
    on_device = [it.to(DEVICE) for it in (rows.slots_N, rows.row_R, rows.starts_e, rows.ends_e)]
    tiles, places = expert_lora_tiles(*on_device), places_e.to(DEVICE)
    assert tiles.few == (num_rows < 90)
    wide = experts.tile_columns(rank, dtype)
    columns = torch.tensor(tiles_of(blocks, wide), dtype=torch.int32, device=DEVICE)
    h_ZRQ = expert_lora_shrink(
        x.to(DEVICE), a_SEQK.to(DEVICE), tiles, places, rank, gathered=gathered
    )
    assert len(h_ZRQ) == (4 if depth == 1100 else 1)
    expert_lora_expand(found, h_ZRQ, b_SENr.to(DEVICE), tiles, places, columns, wide)

    found = found.cpu()
    assert_near(found, expected, TOLERANCES)
    with_adapter = [row for row, _ in used(rows) if rows.slots_N[rows.row_R[row]]]
    others = torch.ones(len(found), dtype=torch.bool)
    others[with_adapter] = False
    assert torch.equal(found[others], out_RN[others]), "rows without an adapter are not written"


def test_of_experts_on_a_cpu() -> None:
    """Rows in expert order, by torch's operators, one row at a time."""
    rank, depth, num_rows = 6, 80, 45
    blocks = ((0, 75, 0), (75, 150, 1))
    places_e = torch.tensor([4, 0, 6, 1, 5], dtype=torch.int32)
    a_SEQK, b_SENr = (
        draw(SLOTS, 7, 12, depth, dtype=torch.float32),
        draw(SLOTS, 7, 150, rank, dtype=torch.float32),
    )
    x_RK, out_RN = (
        draw(num_rows, depth, dtype=torch.float32),
        draw(num_rows, 150, dtype=torch.float32),
    )
    slots_R = slots_of("in turn", num_rows)
    rows = ExpertRows.in_order(slots_R, torch.tensor([0, 0, 40, 45, 45], dtype=torch.int32))
    found = out_RN.clone()
    ExpertLora(a_SEQK, b_SENr, blocks, places_e).add_to(found, x_RK, rows, gathered=False)
    expected = out_RN.clone()
    for row, expert in used(rows):
        if slot := int(slots_R[row]):
            at = slot - 1, int(places_e[expert])
            h_Q = a_SEQK[at] @ x_RK[row]
            expected[row] += torch.cat(
                [b_SENr[at][f:e] @ h_Q[p * rank :][:rank] for f, e, p in blocks]
            )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("num_rows", "num_experts", "block"),
    [(8, 128, 16), (512, 128, 16), (512, 4, 32), (1000, 3, 32)],
)
def test_tiles_suffice_for_any_routing(num_rows: int, num_experts: int, block: int) -> None:
    """Also if every expert has one row more than whole tiles take."""
    taken, needed = 0, 0
    for _ in range(num_experts):
        count = min(num_rows - taken, 1)
        taken, needed = taken + count, needed + count
    needed += (num_rows - taken) // block
    assert needed <= most_tiles(num_rows, num_experts, block) <= num_rows
