"""The routing policy: least outstanding tokens, ties in turn."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.router import Router


def test_equal_ranks_take_turns():
    router = Router(3)
    assert [router.pick(10) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    assert router.outstanding == (20, 20, 20)


def test_idle_ranks_take_turns_when_each_request_ends_at_once():
    router = Router(3)
    picks = []
    for _ in range(6):
        rank = router.pick(5)
        picks.append(rank)
        router.release(rank, 5)
    assert picks == [0, 1, 2, 0, 1, 2]


def test_long_request_sends_the_next_elsewhere():
    router = Router(2)
    assert router.pick(1000) == 0
    assert [router.pick(10) for _ in range(5)] == [1] * 5
    router.release(0, 1000)
    assert router.pick(10) == 0


def test_partial_release_counts():
    router = Router(2)
    router.pick(100)
    router.pick(60)
    router.release(0, 50)
    assert router.pick(1) == 0


def test_more_released_than_picked_is_our_bug():
    router = Router(2)
    router.pick(10)
    with pytest.raises(AssertionError, match="rank 0"):
        router.release(0, 11)


def test_needs_a_rank():
    with pytest.raises(ValueError, match="num_ranks"):
        Router(0)


@given(st.integers(1, 8), st.lists(st.integers(1, 500), max_size=200), st.randoms())
def test_always_a_least_loaded_rank_and_spread_is_bounded(num_ranks, sizes, rnd):
    router = Router(num_ranks)
    open_requests = []
    for size in sizes:
        before = router.outstanding
        rank = router.pick(size)
        assert before[rank] == min(before)
        open_requests.append((rank, size))
        if rnd.random() < 0.5:
            router.release(*open_requests.pop(rnd.randrange(len(open_requests))))
    for request in open_requests:
        router.release(*request)
    assert router.outstanding == (0,) * num_ranks
