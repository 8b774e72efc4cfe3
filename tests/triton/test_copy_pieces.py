"""KV blocks and states as rows, by the kernel of GPUs: the bytes that torch copies."""

import pytest
import torch

from kernels.interface.kv_layout import KVGroup, KVLayout, PagedFp8Heads, PagedHeads, PagedLatents
from tests.triton.device import DEVICE
from workers.kv_transfer.contents import Rows, block_pieces, check_values, copy_on_device

PLACES = [4, 0, 9]


@pytest.mark.parametrize(
    ("layout", "block_size"),
    [
        (PagedHeads(2, 8), 4),
        (PagedHeads(4, 128), 16),  # a piece has more words than a program copies
        (PagedFp8Heads(3, 24), 4),  # exponents are not a whole number of large words
        (PagedFp8Heads(1, 8), 1),
        (PagedLatents(36), 2),
    ],
    ids=str,
)
def test_rows_there_and_back(layout: KVLayout, block_size: int) -> None:
    torch.manual_seed(1)
    shape, dtype = layout.shape(10, block_size), torch.bfloat16
    caches = [
        torch.randint(0, 255, shape, dtype=torch.uint8)
        if layout.in_bytes
        else torch.randn(shape, dtype=dtype)
        for _ in range(2)
    ]
    group = KVGroup(layout, (0, 1))
    rows = Rows(block_pieces([group], caches, 10, block_size, 2))
    expected = torch.zeros(len(PLACES), rows.row_bytes, dtype=torch.uint8)
    checks = rows.pack(PLACES, expected)
    assert torch.equal(checks, check_values(expected))

    device_caches = [cache.to(DEVICE) for cache in caches]
    pieces = block_pieces([group], device_caches, 10, block_size, 2)
    copy = copy_on_device(pieces)
    found = torch.zeros_like(expected).to(DEVICE)
    packed = copy(torch.tensor(PLACES, device=DEVICE), found, to_rows=True)
    assert torch.equal(found.cpu(), expected) and torch.equal(packed.cpu(), checks)

    before = [cache.clone() for cache in device_caches]
    found[1, 3] ^= 8
    expected[1, 3] ^= 8
    unpacked = copy(torch.tensor([1, 2, 3], device=DEVICE), found, to_rows=False)
    assert torch.equal(rows.unpack(expected, [1, 2, 3]), unpacked.cpu())
    assert (unpacked.cpu() == checks).tolist() == [True, False, True]
    assert all(torch.equal(a.cpu(), b) for a, b in zip(device_caches, caches, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(device_caches, before, strict=True))


def test_no_rows() -> None:
    pieces = [torch.zeros(4, 16, dtype=torch.uint8, device=DEVICE)]
    none = torch.zeros(0, 64, dtype=torch.uint8, device=DEVICE)
    copy = copy_on_device(pieces)
    assert copy(torch.zeros(0, dtype=torch.int64), none, to_rows=True).tolist() == []


@pytest.mark.parametrize("word", [0, 3, 500])
def test_a_check_value_changes_with_any_word(word: int) -> None:
    row = torch.arange(8 * 600, dtype=torch.int64).to(torch.uint8).view(1, -1)
    other = row.clone()
    other[0, 8 * word] ^= 1
    swapped = row.clone()
    swapped[0, :8], swapped[0, 16:24] = row[0, 16:24], row[0, :8]
    values = {int(check_values(it)[0]) for it in (row, other, swapped, torch.zeros_like(row))}
    assert len(values) == 4
