"""K and V into their slots, and block tables into one list of pages."""

import numpy as np
import pytest
import torch

from kernels.triton.paged import list_pages, store_kv
from tests.triton.device import DEVICE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 16), (3, 40), (8, 192)])
def test_store_kv(heads: int, head_dim: int, dtype: torch.dtype):
    """Rows of -1 and those behind the slots go nowhere, and other slots stay."""
    generator = torch.Generator().manual_seed(2)
    qkv = torch.randn(6, 5 * heads, head_dim, generator=generator).to(DEVICE, dtype)
    k, v = qkv[:, heads : 2 * heads], qkv[:, 3 * heads : 4 * heads]
    slots = torch.tensor([9, -1, 0, 3], device=DEVICE)
    caches = [torch.full((3, 4, heads, head_dim), 7, dtype=dtype, device=DEVICE) for _ in "kv"]
    expected = [cache.clone() for cache in caches]
    for cache, rows in zip(expected, (k, v), strict=True):
        cache.view(-1, heads, head_dim)[slots[[0, 2, 3]]] = rows[[0, 2, 3]]
    store_kv(k, v, slots, *caches)
    for cache, wanted in zip(caches, expected, strict=True):
        assert torch.equal(cache, wanted)


@pytest.mark.parametrize("padded", [False, True])
def test_list_pages(padded: bool):
    """One row of 300 blocks takes two rounds; rows behind the table's have no pages.

    If asked, all rows get slots, of which there may be more than rows of the table, and -1 behind the last.
    """
    counts = [3, 0, 300, 1]
    table = torch.arange(4 * 320, device=DEVICE).view(4, 320)
    starts = torch.tensor([0, *counts, 0, 0], dtype=torch.int32, device=DEVICE).cumsum(0)
    pages = torch.full((400,), -5, dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([8, 2, -1, 4, 9], device=DEVICE)
    padded_slots = torch.full((6,), 77, device=DEVICE)
    list_pages(table, starts.int(), pages, *((slots, padded_slots) if padded else ()))
    expected = [block for row, count in zip(table, counts, strict=True) for block in row[:count]]
    assert pages[: sum(counts)].tolist() == torch.stack(expected).tolist()
    assert (pages[sum(counts) :] == -5).all()
    assert padded_slots.tolist() == ([8, 2, -1, 4, 9, -1] if padded else [77] * 6)


def test_a_rank_without_sequences_lists_no_pages():
    """The rows of a table that NumPy picks have strides of 0 where there are none."""
    table = torch.from_numpy(np.zeros((4, 9), dtype=np.int64)[np.arange(0), :2])
    assert table.shape == (0, 2) and table.stride() == (0, 0)
    starts = torch.zeros(4, dtype=torch.int32, device=DEVICE)
    pages = torch.full((5,), -5, dtype=torch.int32, device=DEVICE)
    padded_slots = torch.full((3,), 77, device=DEVICE)
    list_pages(table.to(DEVICE), starts, pages, starts[:0].long(), padded_slots)
    assert (pages == -5).all() and padded_slots.tolist() == [-1] * 3
