"""Which sequences share leading blocks, for which of them a shared pass pays, and its tiles."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention.batch import AttentionBatch
from kernels.attention.decode_chunks import cut_rows, max_chunks
from kernels.attention.shared_chunks import TILES, TileShape, cut_shared, most_integers, tile_shape
from kernels.attention.shared_prefixes import (
    FLASHINFER_MIB,
    MAX_GROUPS,
    SharedPrefixes,
    SharingCost,
    find_shared,
)
from kernels.interface.kv_layout import PagedFp8Heads, PagedHeads
from workers.kv_cache.shared_prefixes import FIRST_COLUMNS, PrefixGroups, group_prefixes

# Nested beginnings: a sequence takes a path in a tree of blocks, then blocks of its own.
TREES = st.lists(
    st.tuples(st.lists(st.integers(0, 1), max_size=5), st.integers(0, 3), st.integers(1, 40)),
    min_size=1,
    max_size=12,
)


def table_of(trees: list[tuple[list[int], int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Block table and blocks of each sequence; blocks behind them are those that others hold there."""
    rows, width = [], 5 * 40 + 3
    for number, (path, own, length) in enumerate(trees):
        row = [
            hash((*path[: level + 1], at)) % 10**9
            for level in range(len(path))
            for at in range(length)
        ]
        rows.append(row + [10**9 + 100 * number + block for block in range(own)])
    limits = np.array([len(row) for row in rows])
    longest = max(rows, key=len)
    return np.array([row + (longest + [0] * width)[len(row) : width] for row in rows]), limits


def common(table: np.ndarray, limits: np.ndarray, one: int, other: int) -> int:
    most = min(limits[one], limits[other])
    differ = np.flatnonzero(table[one, :most] != table[other, :most])
    return int(differ[0]) if len(differ) else int(most)


def best(table: np.ndarray, limits: np.ndarray, rows: list[int], depth: int) -> int:
    """Most reads of blocks that one group for each row can save, by trying each depth."""
    if len(rows) < 2:
        return 0
    end = min(common(table, limits, *pair) for pair in combinations(rows, 2))
    parts: dict[int, list[int]] = {}
    for row in rows:
        if limits[row] > end:
            parts.setdefault(int(table[row, end]), []).append(row)
    split = sum(best(table, limits, part, end) for part in parts.values())
    return max((len(rows) - 1) * end, split)


@settings(deadline=None)
@given(TREES)
def test_groups_share_what_they_claim_and_save_the_most(trees):
    table, limits = table_of(trees)
    groups, blocks = group_prefixes(table, limits)
    saved = 0
    for group in set(groups[groups >= 0].tolist()):
        rows = np.flatnonzero(groups == group).tolist()
        assert len(rows) > 1 and len(set(blocks[rows].tolist())) == 1
        assert all(
            common(table, limits, *pair) >= blocks[rows[0]] > 0 for pair in combinations(rows, 2)
        )
        saved += (len(rows) - 1) * int(blocks[rows[0]])
    assert not blocks[groups < 0].any()
    assert saved == best(table, limits, list(range(len(table))), 0)


@pytest.mark.parametrize("num_shared", [1, FIRST_COLUMNS, FIRST_COLUMNS + 1, 1000])
def test_long_prefixes(num_shared: int):
    """Compared in parts; stale entries behind a sequence are not taken for its blocks."""
    table = np.arange(4 * 1100).reshape(4, 1100)
    table[:, :num_shared] = table[0, :num_shared]
    table[3] = table[0]
    groups, blocks = group_prefixes(table, np.array([1100, num_shared + 1, 1100, num_shared]))
    assert groups.tolist() == [0] * 4 and blocks.tolist() == [num_shared] * 4
    groups, blocks = group_prefixes(table, np.array([1100, 1100, 1100, 0]))
    assert groups.tolist() == [0, 0, 0, -1] and blocks.tolist() == [num_shared] * 3 + [0]


def test_a_comb_of_many_prefixes_needs_no_deep_stack():
    rows = 1500
    table = np.tril(np.full((rows, rows), 7), -1) + np.diag(np.arange(rows) + 10)
    table = np.maximum(table, np.triu(np.arange(rows)[:, None] * rows + np.arange(rows) + 10**6, 1))
    groups, blocks = group_prefixes(table, np.full(rows, rows))
    depth = max(
        range(rows), key=lambda it: (rows - 1 - it) * it
    )  # rows from there on share so many
    assert (groups[depth:] == depth).all() and (groups[:depth] == -1).all()
    assert (blocks[depth:] == depth).all()


def test_groups_change_only_with_sequences_that_share():
    table = np.array([[1, 2, 3], [9, 9, 9], [1, 2, 4], [5, 6, 7]])
    groups = PrefixGroups(table)
    groups.started(0)
    assert not groups.changed
    groups.started(2)
    assert groups.changed
    groups.update(np.array([0, 2, 3]), np.array([3, 3, 3]))
    assert not groups.changed
    found, blocks = groups.of(np.array([3, 2, 0, 1]))
    assert found[1] == found[2] >= 0 and found[0] == found[3] == -1
    assert blocks.tolist() == [0, 2, 2, 0]
    groups.ended(3)
    assert not groups.changed
    groups.ended(2)
    assert groups.changed
    groups.update(np.array([0]), np.array([3]))
    assert groups.of(np.array([0, 2]))[0].tolist() == [-1, -1]
    groups.ended(0)
    groups.update(np.array([], np.int64), np.array([], np.int64))


def batch_of(
    groups: list[int], blocks: list[int], lens: list[int], prompts: int = 0
) -> AttentionBatch:
    """Decodes, then prompts of two rows."""
    count = len(lens)
    return replace(
        AttentionBatch.dummy_decodes(count, torch.device("cpu")),
        num_single_rows=count - prompts,
        seq_lens_cpu=np.array(lens, np.int32),
        prefix_groups_cpu=np.array(groups, np.int32),
        prefix_blocks_cpu=np.array(blocks, np.int32),
    )


ANY = SharingCost(1, 1)


def test_only_decodes_of_one_forward_share():
    lens = [40, 50, 40, 60, 70]
    batch = batch_of([2, 7, 2, 7, 2], [2, 3, 2, 3, 2], lens, prompts=1)
    shared = find_shared(batch, 16, ANY)
    assert shared is not None
    assert shared.rows.tolist() == [0, 2, 1, 3] and shared.starts.tolist() == [0, 2, 4]
    assert shared.tokens.tolist() == [32, 48] and shared.saved_tokens == 80
    assert shared.tokens_of_rows(6).tolist() == [32, 48, 32, 48, 0, 0]
    part = find_shared(batch.ubatch(1, 4), 16, ANY)  # of a ubatch: rows 1 to 3
    assert part is not None and part.rows.tolist() == [0, 2] and part.tokens.tolist() == [48]
    assert find_shared(batch.ubatch(0, 2), 16, ANY) is None
    assert find_shared(replace(batch, prefix_groups_cpu=None), 16, ANY) is None
    assert find_shared(batch_of([-1, -1], [0, 0], [5, 5]), 16, ANY) is None


HEADS, FP8_HEADS = PagedHeads(4, 128), PagedFp8Heads(4, 128)
FLASHINFER = SharingCost.on_gpu(HEADS, FLASHINFER_MIB)
TRITON, TRITON_FP8 = (SharingCost.of_triton(layout) for layout in (HEADS, FP8_HEADS))


@pytest.mark.parametrize(
    ("cost", "rows", "tokens", "pays"),
    [
        (FLASHINFER, 8, 8192, False),  # 0.86 times as fast on an H200
        (FLASHINFER, 32, 8192, True),  # 1.69
        (FLASHINFER, 128, 256, False),  # 0.69
        (FLASHINFER, 128, 1024, True),  # 1.01
        (FLASHINFER, 128, 2048, True),  # 1.35
        (TRITON, 8, 8192, True),  # 1.20
        (TRITON, 128, 256, False),  # 0.69
        (TRITON, 128, 1024, True),  # 1.24
        (TRITON_FP8, 8, 8192, True),  # 1.08
        (TRITON_FP8, 8, 4096, False),
        (TRITON_FP8, 128, 256, False),
        (TRITON_FP8, 128, 1024, True),  # 1.25
    ],
)
def test_gpus_share_where_that_was_faster(
    cost: SharingCost, rows: int, tokens: int, pays: bool
) -> None:
    batch = batch_of([3] * rows, [tokens // 16] * rows, [tokens + 256] * rows)
    assert (find_shared(batch, 16, cost) is not None) is pays


def test_what_does_not_pay_is_not_shared():
    batch = batch_of([2, 7, 2, 7], [2, 9, 2, 9], [160] * 4)
    large = find_shared(batch, 16, SharingCost(group_tokens=33, saved_tokens=1))
    assert large is not None and large.rows.tolist() == [1, 3]
    assert find_shared(batch, 16, SharingCost(1, 176)) is not None
    assert find_shared(batch, 16, SharingCost(1, 177)) is None
    assert find_shared(batch, 16, SharingCost(33, 145)) is None
    count = MAX_GROUPS + 2
    many = batch_of([*range(count)] * 2, [*range(1, count + 1)] * 2, [16 * count + 1] * 2 * count)
    most = find_shared(many, 16, ANY)
    assert most is not None and sorted(most.tokens // 16) == list(range(3, count + 1))


@st.composite
def shared_prefixes(draw: st.DrawFn) -> tuple[SharedPrefixes, int]:
    sizes = draw(st.lists(st.integers(2, 40), min_size=1, max_size=8))
    tokens = [16 * draw(st.integers(1, 900)) for _ in sizes]
    num_rows = sum(sizes) + draw(st.integers(0, 9))
    order = np.array(draw(st.permutations(range(num_rows))), np.int32)
    starts = np.cumsum([0, *sizes]).astype(np.int32)
    return SharedPrefixes(order[: sum(sizes)], starts, np.array(tokens, np.int32)), num_rows


@settings(deadline=None, max_examples=60)
@given(shared_prefixes(), st.sampled_from([1, 4, 5, 8, 16, 128]), st.sampled_from([1, 2, 8]))
def test_tiles_cover_each_shared_key_of_each_row_once(case, group_size, kv_heads):
    shared, num_rows = case
    shape = tile_shape(num_rows, group_size, kv_heads, 132)
    found = cut_shared(shared, num_rows, shape)
    empty = cut_shared(None, num_rows, shape)
    assert [it.shape for it in found.arrays] == [it.shape for it in empty.arrays]
    assert all(it.dtype == np.int32 for it in found.arrays)
    assert not empty.counts.any() and not empty.num_parts.any()
    assert sum(map(len, found.arrays)) <= most_integers(num_rows, group_size, kv_heads, 132)
    keys: dict[tuple[int, int], tuple[int, int]] = {}  # of a row and a part
    for tile in np.flatnonzero(found.counts):
        assert found.counts[tile] <= shape.decodes
        first = found.firsts[tile]
        for member, row in enumerate(found.rows[first : first + found.counts[tile]]):
            part = tile * shape.decodes + member
            keys[int(row), int(part)] = int(found.begins[tile]), int(found.ends[tile])
    tokens, wanted = shared.tokens_of_rows(num_rows), set()
    for row in range(num_rows):
        parts = [int(found.parts[row]) + n * shape.decodes for n in range(found.num_parts[row])]
        wanted |= {(row, part) for part in parts}
        bounds = [keys[row, part] for part in parts]
        begins, ends = [begin for begin, _ in bounds], [end for _, end in bounds]
        assert [*begins, tokens[row]] == [0, *ends]
    assert wanted == keys.keys()


def test_one_long_prefix_fills_the_gpu():
    """128 decodes of 8192 shared tokens on 132 SMs, as in Qwen3-30B-A3B: tiles of equal length on nearly all SMs."""
    shape = tile_shape(128, 8, 4, 132)
    assert shape == TileShape(TILES[1][0] // 8, 33)
    shared = SharedPrefixes(np.arange(128, dtype=np.int32), np.array([0, 128]), np.array([8192]))
    found = cut_shared(shared, 128, shape)
    used = found.counts > 0
    assert used.sum() == 32 and set(found.ends[used] - found.begins[used]) == {2048}
    few = cut_shared(
        replace(shared, starts=np.array([0, 9]), rows=shared.rows[:9]), 9, tile_shape(9, 8, 4, 132)
    )
    lengths = (few.ends - few.begins)[few.counts > 0]
    assert len(lengths) > 50 and lengths.max() <= 320


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 2000)), max_size=20))
def test_chunks_of_own_keys_begin_behind_shared_ones(rows):
    tokens = np.array([one for one, _ in rows], np.int32)
    lens = np.array([sum(both) for both in rows], np.int32)
    num_rows = len(rows) + 2
    shared = np.zeros(num_rows, np.int32)
    shared[: len(rows)] = tokens
    chunks = cut_rows(lens, None, num_rows, max_chunks(num_rows, 132), shared)
    for row, (first, own) in enumerate(rows):
        part = slice(chunks.starts[row], chunks.starts[row + 1])
        assert chunks.firsts[part][0] == first and chunks.ends[part][-1] == first + own
        assert (chunks.ends[part] - chunks.firsts[part]).sum() == own
