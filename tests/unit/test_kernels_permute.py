"""Grouping by expert and summing back, for any routing."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.routing.permute import expert_bounds, route, sum_rows, weighted_sum

HIDDEN = 4


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, range]:
    """topk_idx_NK with -1 and foreign ids, and a range of local experts, perhaps empty."""
    num_experts = draw(st.integers(1, 9))
    start = draw(st.integers(0, num_experts))
    experts = range(start, draw(st.integers(start, num_experts)))
    num_rows, top_k = draw(st.integers(0, 12)), draw(st.integers(1, 4))
    ids = st.integers(-1, num_experts - 1)
    flat = draw(st.lists(ids, min_size=num_rows * top_k, max_size=num_rows * top_k))
    dtype = draw(st.sampled_from([torch.int64, torch.int32]))
    return torch.tensor(flat, dtype=dtype).view(num_rows, top_k), experts


@given(routings())
@settings(max_examples=200)
def test_route_lists_local_pairs_by_expert(drawn: tuple[torch.Tensor, range]):
    topk_idx_NK, experts = drawn
    routing = route(topk_idx_NK, expert_bounds(experts, "cpu", topk_idx_NK.dtype))
    flat, top_k = topk_idx_NK.reshape(-1).tolist(), topk_idx_NK.shape[1]
    pairs, ends = [], []
    for expert in experts:
        pairs += [pair for pair, chosen in enumerate(flat) if chosen == expert]
        ends.append(len(pairs))
    assert routing.pair_R.tolist() == pairs
    assert routing.row_R.tolist() == [pair // top_k for pair in pairs]
    assert routing.offs_e.tolist() == ends and routing.offs_e.dtype == torch.int32


@given(routings(), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=200)
def test_weighted_sum_equals_a_loop(drawn: tuple[torch.Tensor, range], dtype: torch.dtype):
    topk_idx_NK, experts = drawn
    routing = route(topk_idx_NK, expert_bounds(experts, "cpu", topk_idx_NK.dtype))
    generator = torch.Generator().manual_seed(len(routing.pair_R))
    y_RD = torch.randn(len(routing.pair_R), HIDDEN, generator=generator).to(dtype)
    weights_NK = torch.rand(topk_idx_NK.shape, generator=generator)
    expected_ND = torch.zeros(len(topk_idx_NK), HIDDEN)
    for position, pair in enumerate(routing.pair_R.tolist()):
        row = pair // topk_idx_NK.shape[1]
        expected_ND[row] += weights_NK.view(-1)[pair] * y_RD[position].float()
    out_ND = weighted_sum(y_RD, routing, weights_NK)
    assert out_ND.dtype == dtype
    torch.testing.assert_close(out_ND, expected_ND.to(dtype))


def test_sixteen_bit_sums_accumulate_in_float32():
    # 256 + 1 + 1 is 256 when each partial sum is rounded to bfloat16, 258 when only the last is.
    routing = route(torch.tensor([[0, 1, 2]]), expert_bounds(range(3), "cpu"))
    y_RD = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert weighted_sum(y_RD, routing, torch.ones(1, 3)).item() == 258
    assert sum_rows(y_RD, torch.zeros(3, dtype=torch.int64), 1).item() == 258


@given(st.lists(st.integers(0, 6), max_size=20))
@settings(max_examples=100)
def test_sum_rows_equals_index_add(rows: list[int]):
    row_N = torch.tensor(rows, dtype=torch.int64)
    y_ND = torch.arange(len(rows) * HIDDEN, dtype=torch.float32).view(-1, HIDDEN)
    expected = torch.zeros(7, HIDDEN).index_add_(0, row_N, y_ND)
    torch.testing.assert_close(sum_rows(y_ND, row_N, 7), expected)
