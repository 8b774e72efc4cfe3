"""Plans of where experts live: properties over random loads and maps, and examples of each rule."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.routing.balance import EVEN, is_valid, plan_layer, rank_loads


@st.composite
def cases(draw: st.DrawFn):
    """Loads, offsets of slots, a map of before, hosts and groups. Maps of before may be incomplete."""
    hosts = draw(st.sampled_from([1, 1, 2, 3]))
    num_ranks = hosts * draw(st.integers(1, 4))
    num_experts = draw(st.integers(1, 6)) * num_ranks
    groups = draw(st.sampled_from([1, hosts, num_ranks]))
    share = num_experts // num_ranks
    sizes = [share + draw(st.integers(0, min(3, num_experts - share)))] * num_ranks
    if draw(st.booleans()):  # ranks with unequal numbers of slots
        sizes = [min(size + draw(st.integers(0, 1)), num_experts) for size in sizes]
    starts = [0, *np.cumsum(sizes).tolist()]
    heavy = st.one_of(st.integers(0, 3), st.integers(0, 1000))
    loads = np.array(draw(st.lists(heavy, min_size=num_experts, max_size=num_experts)))
    expert = st.integers(-1, num_experts - 1)
    present = np.array(draw(st.lists(expert, min_size=starts[-1], max_size=starts[-1])))
    if draw(st.booleans()):
        present = plan_layer(loads[::-1], starts, present, hosts=hosts, groups=groups)
    return loads, starts, present, hosts, groups


@given(cases())
def test_a_plan_holds_every_expert_and_none_twice_on_a_rank(case):
    loads, starts, present, hosts, groups = case
    planned = plan_layer(loads, starts, present, hosts=hosts, groups=groups)
    assert is_valid(planned, starts, len(loads)) and len(planned) == starts[-1]


@given(cases())
def test_plans_depend_on_their_arguments_alone(case):
    loads, starts, present, hosts, groups = case
    before = loads.copy(), present.copy()
    first = plan_layer(loads, starts, present, hosts=hosts, groups=groups)
    second = plan_layer(loads, starts, present, hosts=hosts, groups=groups)
    assert first.tolist() == second.tolist()
    assert (loads.tolist(), present.tolist()) == (before[0].tolist(), before[1].tolist())


@given(cases())
def test_a_plan_is_never_worse_than_the_map_that_it_replaces(case):
    loads, starts, present, hosts, groups = case
    planned = plan_layer(loads, starts, present, hosts=hosts, groups=groups)
    again = plan_layer(loads, starts, planned, hosts=hosts, groups=groups)
    worst, worst_again = (rank_loads(loads, m, starts).max() for m in (planned, again))
    assert worst_again <= worst * (1 + 1e-9)
    if is_valid(present, starts, len(loads)):
        assert worst <= rank_loads(loads, present, starts).max() * (1 + 1e-9)
        if worst >= rank_loads(loads, present, starts).max():
            assert planned.tolist() == present.tolist(), "nothing is gained, so nothing moves"


@given(cases())
def test_experts_that_stay_on_their_rank_keep_their_slots(case):
    loads, starts, present, hosts, groups = case
    planned = plan_layer(loads, starts, present, hosts=hosts, groups=groups)
    for begin, end in pairwise(starts):
        was, now = present[begin:end].tolist(), planned[begin:end].tolist()
        for expert in set(was) & set(now):
            if was.count(expert) == 1:
                assert was.index(expert) == now.index(expert)


@given(st.integers(2, 3), st.integers(0, 1), st.integers(0, 1000))
def test_expert_groups_stay_on_one_host(hosts, spare, seed):
    generator = np.random.default_rng(seed)
    groups, group_size, per_host = 2 * hosts, 3, 2
    loads = generator.integers(0, 100, groups * group_size)
    starts = (np.arange(hosts * per_host + 1) * (group_size + spare)).tolist()
    present = generator.integers(-1, len(loads), starts[-1])
    planned = plan_layer(loads, starts, present, hosts=hosts, groups=groups)
    found = [set((own // group_size).tolist()) for own in planned.reshape(hosts, -1)]
    assert sorted(group for own in found for group in own) == list(range(groups))


def test_the_expert_with_most_load_gets_the_spare_slots():
    loads = np.array([60, 10, 10, 10, 5, 5])
    starts, present = [0, 4, 8], np.array([0, 1, 2, 3, 3, 4, 5, 2])
    planned = plan_layer(loads, starts, present)
    assert np.bincount(planned).tolist()[0] == 2
    assert rank_loads(loads, planned, starts).max() <= 51


def test_an_even_map_stays():
    present = np.array([3, 1, 0, 2])
    assert plan_layer(np.array([10, 10, 10, 10]), [0, 2, 4], present).tolist() == [3, 1, 0, 2]
    assert plan_layer(np.zeros(4), [0, 2, 4], present).tolist() == [3, 1, 0, 2]


def test_one_swap_is_all_that_moves():
    loads = np.array([8, 7, 4, 3, 1, 1, 1, 1])
    present = np.array([0, 1, 4, 5, 2, 3, 6, 7])
    planned = plan_layer(loads, [0, 4, 8], present)
    assert (planned != present).sum() == 2
    assert rank_loads(loads, planned, [0, 4, 8]).tolist() in ([13, 13], [14, 12], [12, 14])


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.5])
@pytest.mark.parametrize(("num_ranks", "spare"), [(4, 0), (8, 1), (16, 1), (32, 1)])
def test_popular_experts_are_spread(exponent, num_ranks, spare):
    num_experts, top_k = 128, 8
    generator = np.random.default_rng(num_ranks)
    popular = -exponent * np.log(np.arange(1, num_experts + 1))
    draws = generator.gumbel(size=(2000, num_experts)) + generator.permutation(popular)
    chosen = np.argpartition(-draws, top_k, axis=1)[:, :top_k]
    loads = np.bincount(chosen.ravel(), minlength=num_experts)
    per_rank = num_experts // num_ranks
    starts = np.arange(num_ranks + 1) * (per_rank + spare)
    present = np.concatenate(
        [(np.arange(per_rank + spare) + per_rank * rank) % num_experts for rank in range(num_ranks)]
    )
    planned = plan_layer(loads, starts, present)
    assert loads.sum() / num_ranks >= 0.97 * EVEN * rank_loads(loads, planned, starts).max()


def test_too_few_slots_are_refused():
    with pytest.raises(AssertionError, match="every expert needs a slot"):
        plan_layer(np.ones(5), [0, 2, 4], np.arange(4))
    with pytest.raises(AssertionError, match="more slots than there are experts"):
        plan_layer(np.ones(2), [0, 3, 6], np.zeros(6, dtype=np.int64))
