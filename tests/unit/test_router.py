"""The routing policy: least outstanding tokens, turns among equals, leads for prefixes, news of other ingresses."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.client.router import CHUNK
from cluster.config.serve_section import PREFIX_LEAD as LEAD
from tests.unit.numbered_router import Router

ROOM = 1_000_000  # tokens: nothing is forgotten


def prompt(*chunks: int) -> list[int]:
    """A prompt of whole chunks; equal numbers make equal chunks."""
    return [token for chunk in chunks for token in [chunk] * CHUNK]


def test_equal_ranks_take_turns():
    router = Router([3])
    assert [router.pick([0] * 4, 6) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    assert router.outstanding == (20, 20, 20)
    assert Router([3], start=5).pick([0], 1) == 2


def test_idle_ranks_take_turns_when_each_request_ends_at_once():
    router = Router([3])
    picks = []
    for _ in range(6):
        rank = router.pick([0], 4)
        picks.append(rank)
        router.release(rank, 5)
    assert picks == [0, 1, 2, 0, 1, 2]


def test_long_request_sends_the_next_elsewhere():
    router = Router([2])
    assert router.pick([0] * 500, 500) == 0
    assert [router.pick([0], 9) for _ in range(5)] == [1] * 5
    router.release(0, 1000)
    assert router.pick([0], 9) == 0


def test_partial_release_counts():
    router = Router([2])
    router.pick([0], 99)
    router.pick([0], 59)
    router.release(0, 50)
    assert router.pick([0], 0) == 0


def test_a_pinned_request_goes_where_it_is_told_and_counts():
    router = Router([2])
    assert [router.pick([0], 9, pinned=1) for _ in range(3)] == [1, 1, 1]
    assert router.outstanding == (0, 30)
    assert [router.pick([0], 9) for _ in range(3)] == [0, 0, 0]


def test_more_released_than_picked_is_our_bug():
    router = Router([2])
    router.pick([0], 9)
    with pytest.raises(AssertionError, match=r"rank \(0, 0\)"):
        router.release(0, 11)


def test_ranks_of_all_groups_are_numbered_one_after_another():
    router = Router([2, 3])
    assert [router.place(number) for number in range(5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)]
    assert [router.number(router.place(number)) for number in range(5)] == list(range(5))
    assert router.place(5) is None and router.num_ranks == 5
    assert sorted(router.pick([0], 1) for _ in range(5)) == list(range(5))


def test_needs_a_rank():
    with pytest.raises(ValueError, match="at least 1 rank"):
        Router([0])


@given(st.integers(1, 8), st.lists(st.integers(1, 500), max_size=200), st.randoms())
def test_always_a_least_loaded_rank_and_spread_is_bounded(num_ranks, sizes, rnd):
    router = Router([num_ranks])
    open_requests = []
    for size in sizes:
        before = router.outstanding
        rank = router.pick([0] * size, 0)
        assert before[rank] == min(before)
        open_requests.append((rank, size))
        if rnd.random() < 0.5:
            router.release(*open_requests.pop(rnd.randrange(len(open_requests))))
    for request in open_requests:
        router.release(*request)
    assert router.outstanding == (0,) * num_ranks


def test_a_conversation_returns_to_its_rank():
    router = Router([4], cache_tokens=ROOM)
    for turn in range(1, 5):
        for chat in range(8):
            history = prompt(*(100 * chat + part for part in range(turn)))
            rank = router.pick(history, 20)
            router.release(rank, len(history) + 20)
            assert rank == chat % 4


def test_the_lead_of_a_rank_is_bounded_and_in_proportion_to_what_it_holds():
    for known, rest in ((4, 0), (2, 2)):
        router = Router([2], cache_tokens=ROOM)
        router.pick(prompt(*range(known)), 0, pinned=0)
        router.release(0, known * CHUNK)
        ahead = 0
        while router.pick(prompt(*range(known), *[900 + ahead] * rest), 100) == 0:
            ahead += 1
        lead = LEAD * known / (known + rest)
        assert lead <= ahead <= lead + 1


def test_other_salts_and_other_beginnings_have_no_lead():
    router = Router([2], cache_tokens=ROOM)
    router.pick(prompt(1, 2, 3), 10, cache_salt="a", pinned=0)
    assert router.pick(prompt(1, 2, 3), 10, cache_salt="b") == 1
    router.pick([], 200, pinned=1)
    router.release(0, 3 * CHUNK + 10)
    assert router.pick(prompt(1, 2, 3), 10, cache_salt="a", pinned=None) == 0
    fresh = Router([2], cache_tokens=ROOM)
    fresh.pick(prompt(1, 2, 3), 10, pinned=0)
    assert fresh.pick(prompt(2, 3), 10) == 1


def test_only_what_a_rank_has_room_for_is_remembered_and_longest_unused_goes_first():
    router = Router([2], cache_tokens=4 * CHUNK)
    for name in (1, 2, 3):
        router.pick(prompt(name, 10 + name), 0, pinned=0)
        router.release(0, 2 * CHUNK)
    router.pick([], 10, pinned=0)
    assert router.pick(prompt(1, 11), 0) == 1  # forgotten
    router.release(1, 2 * CHUNK)
    assert router.pick(prompt(3, 13), 0) == 0


@pytest.mark.parametrize(("chunks", "held"), [((1, 11), 2), ((2, 12), 1), ((4, 14), 0)])
def test_of_a_forgotten_prompt_the_end_goes_first_and_use_keeps_it(chunks, held):
    for load in (0.5, 1.5):  # in chunks' worth of lead: more than 0 or 1 would allow
        router = Router([2], cache_tokens=4 * CHUNK)
        for used in (prompt(1, 11), prompt(2, 12), prompt(1, 11), prompt(3)):
            router.pick(used, 0, pinned=0)
            router.release(0, len(used))
        router.pick([], int(LEAD * load * CHUNK), pinned=0)
        assert router.pick(prompt(*chunks), 0) == (0 if held > load else 1)


def test_without_a_cache_there_is_no_lead():
    without = Router([2], cache_tokens=0)
    assert [without.pick(prompt(1), 0) for _ in range(4)] == [0, 1, 0, 1]


def test_news_of_others_counts_and_is_replaced():
    router = Router([2], num_replicas=2)
    router.report(0, 1000)
    assert [router.pick([0], 9) for _ in range(3)] == [1, 1, 1]
    router.report(0, 0)
    assert [router.pick([0], 9) for _ in range(3)] == [0, 0, 0]


def test_a_prompt_that_waits_counts_more_than_tokens_that_are_computed():
    router = Router([2])
    router.pick([0] * 1000, 2000, pinned=0)
    router.pick([0] * 2000, 0, pinned=1)
    router.loads[1].begin_prefill(router.picked_prefill)
    assert [load.prefill for load in router.loads] == [0, 2000]
    assert router.pick([0], 9) == 0, "rank 1 has fewer tokens, but a prompt in front of this one"
    router.loads[1].end_prefill(2000)
    assert router.pick([0], 9) == 1
    with pytest.raises(AssertionError, match=r"rank \(0, 1\) has 0 prompt tokens"):
        router.loads[1].end_prefill(1)


def test_what_a_rank_may_hold_of_a_prompt_is_not_to_be_computed():
    router = Router([2], cache_tokens=ROOM)
    router.pick(prompt(1, 2), 0, pinned=0)
    assert router.picked_prefill == 2 * CHUNK
    router.pick([*prompt(1, 2, 3), 7], 0, pinned=0)
    assert router.picked_prefill == CHUNK + 1
    router.pick(prompt(1, 2, 3), 0, pinned=1)
    assert router.picked_prefill == 3 * CHUNK


def waits_of_prompts(counts_prompts: bool, seed: int) -> list[int]:
    """Ticks to the first token: 4 ranks compute 1,000 prompt tokens a tick, and one prompt in eight is long."""
    chance = random.Random(seed)
    router = Router([4])
    queues: list[list[list[int]]] = [[] for _ in range(4)]  # tokens that are left, arrival, prompt
    decoding: list[tuple[int, int, int]] = []  # end, rank, tokens
    waits = []
    for tick in range(1500):
        for _ in range(chance.choice([0, 1, 2, 3])):
            length = 8000 if chance.random() < 0.125 else chance.randint(50, 600)
            rank = router.pick([0] * length, 200)
            if counts_prompts:
                router.loads[rank].begin_prefill(router.picked_prefill)
            queues[rank].append([length, tick, length])
        for rank, queue in enumerate(queues):
            budget = 1000
            while queue and budget:
                done = min(budget, queue[0][0])
                queue[0][0] -= done
                budget -= done
                if not queue[0][0]:
                    _, arrival, length = queue.pop(0)
                    waits.append(tick - arrival)
                    decoding.append((tick + chance.randint(20, 120), rank, length + 200))
                    if counts_prompts:
                        router.loads[rank].end_prefill(length)
        for ended in [entry for entry in decoding if entry[0] <= tick]:
            decoding.remove(ended)
            router.release(ended[1], ended[2])
    return waits


@pytest.mark.parametrize("seed", range(3))
def test_prompts_of_uneven_lengths_wait_less_where_waiting_prompts_count(seed):
    counted, uncounted = (sorted(waits_of_prompts(counts, seed)) for counts in (True, False))
    assert sum(counted) < 0.8 * sum(uncounted)
    assert counted[len(counted) * 95 // 100] <= uncounted[len(uncounted) * 95 // 100]


class Cluster:
    """Ranks without a model behind several ingresses. Ranks tell their load every `news_every` requests, one late."""

    def __init__(self, num_ranks: int, num_replicas: int, seed: int, news_every: int = 12):
        self.chance = random.Random(seed)
        self.routers = [
            Router(
                [num_ranks],
                num_replicas=num_replicas,
                start=self.chance.randrange(num_ranks),
                cache_tokens=ROOM,
            )
            for _ in range(num_replicas)
        ]
        self.num_ranks = num_ranks
        self.requests = [0] * num_ranks
        self.hits = 0
        self.open: list[tuple[int, int, int]] = []  # ingress, rank, tokens
        self._cached: set[tuple[int, object]] = set()
        self._news_every = news_every
        self._news: list[tuple[int, int, int]] = []

    def send(self, token_ids: list[int], max_tokens: int, prefix: object = None) -> int:
        ingress = self.chance.randrange(len(self.routers))
        rank = self.routers[ingress].pick(token_ids, max_tokens)
        self.requests[rank] += 1
        self.hits += (rank, prefix) in self._cached
        self._cached.add((rank, prefix))
        self.open.append((ingress, rank, len(token_ids) + max_tokens))
        if sum(self.requests) % self._news_every == 0:
            self._tell()
        return rank

    def finish(self, index: int) -> None:
        ingress, rank, tokens = self.open.pop(index)
        self.routers[ingress].release(rank, tokens)

    def tokens(self) -> list[int]:
        load = Counter(dict.fromkeys(range(self.num_ranks), 0))
        for _, rank, tokens in self.open:
            load[rank] += tokens
        return [load[rank] for rank in range(self.num_ranks)]

    def _tell(self) -> None:
        for ingress, rank, others in self._news:
            self.routers[ingress].report(rank, others)
        own = Counter()
        for ingress, rank, tokens in self.open:
            own[ingress, rank] += tokens
        total = self.tokens()
        self._news = [
            (ingress, rank, total[rank] - own[ingress, rank])
            for ingress in range(len(self.routers))
            for rank in range(self.num_ranks)
        ]


def assert_even(counts: list[int], within: float = 0.1) -> None:
    even = sum(counts) / len(counts)
    assert all(abs(count - even) <= within * even for count in counts), counts


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("warm", [False, True])
def test_a_burst_of_equal_requests_is_split_evenly(num_replicas, seed, warm):
    """The same prompt 200 times; also when one rank alone has it in its cache."""
    cluster = Cluster(4, num_replicas, seed)
    same = prompt(*range(8))
    if warm:
        for router in cluster.routers:
            router.pick(same, 64, pinned=2)
            router.release(2, len(same) + 64)
    for _ in range(200):
        cluster.send(same, 64)
    assert_even(cluster.requests)


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_a_burst_of_different_requests_is_split_evenly(num_replicas):
    cluster = Cluster(4, num_replicas, seed=1)
    for index in range(200):
        cluster.send(prompt(*range(index, index + 4)), 64)
    assert_even(cluster.requests)


# Chunks of a shared prefix, of the rest, and tokens of the answer.
SHAPES = [(16, 1, 16), (16, 1, 512), (4, 1, 1024), (4, 4, 64), (32, 0, 8)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("in_flight", [24, 400])
def test_shared_prefixes_are_found_and_ranks_stay_even(shape, in_flight):
    """20 prefixes, 400 requests: best possible is one miss a prefix. As one burst, and 24 at a time."""
    num_shared, num_own, max_tokens = shape
    cluster = Cluster(4, 1, seed=3)
    for index in range(400):
        name = cluster.chance.randrange(20)
        own = range(1000 + 10 * index, 1000 + 10 * index + num_own)
        shared = (100 * name + part for part in range(num_shared))
        cluster.send(prompt(*shared, *own), max_tokens, prefix=name)
        if len(cluster.open) > in_flight:
            cluster.finish(cluster.chance.randrange(len(cluster.open)))
    assert cluster.hits >= 0.9 * 380
    assert_even(cluster.requests, within=0.1 if in_flight == 400 else 0.25)


def test_three_ingresses_find_shared_prefixes_too():
    """Each learns for itself: three times the misses, no more."""
    cluster = Cluster(4, 3, seed=4)
    for index in range(1200):
        name = cluster.chance.randrange(20)
        cluster.send(prompt(*range(100 * name, 100 * name + 8), 10_000 + index), 64, prefix=name)
    assert cluster.hits >= 0.9 * 1180
    assert_even(cluster.requests)


@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize(("in_flight", "within"), [(16, 0.4), (300, 0.1)])
def test_one_hot_prefix_does_not_put_everything_on_one_rank(num_replicas, in_flight, within):
    """Its first rank is ahead for a while; the others get it too as soon as that is too much."""
    cluster = Cluster(4, num_replicas, seed=5)
    for index in range(300):
        cluster.send(prompt(*range(16), 1000 + index), 32, prefix="hot")
        if len(cluster.open) > in_flight:
            cluster.finish(cluster.chance.randrange(len(cluster.open)))
        if num_replicas == 1:
            largest = max(tokens for _, _, tokens in cluster.open)
            assert max(cluster.tokens()) - min(cluster.tokens()) <= (LEAD + 5) * largest
    assert_even(cluster.requests, within)


def test_late_news_does_not_make_ingresses_herd():
    """A rank loses all its requests at once; every ingress sees the gap, long after it was filled."""

    def worst_spread(num_replicas: int) -> float:
        cluster = Cluster(4, num_replicas, seed=6, news_every=40)
        spreads = []
        for index in range(2000):
            cluster.send([0] * 10, cluster.chance.choice([90, 190, 1490]))
            if len(cluster.open) > 100:
                if index % 50 == 0:
                    rank = cluster.chance.randrange(4)
                    for other in reversed(range(len(cluster.open))):
                        if cluster.open[other][1] == rank:
                            cluster.finish(other)
                else:
                    cluster.finish(cluster.chance.randrange(len(cluster.open)))
            if index > 100:
                tokens = cluster.tokens()
                spreads.append((max(tokens) - min(tokens)) / (sum(tokens) / 4))
        return sum(spreads) / len(spreads)

    alone = worst_spread(1)
    assert worst_spread(3) < 1.6 * alone and worst_spread(8) < 2 * alone


def test_uneven_ingresses_make_room_for_each_other():
    """One ingress has pinned much to rank 0; with news the others go elsewhere."""
    cluster = Cluster(4, 2, seed=7, news_every=1)
    cluster.routers[0].pick([], 4000, pinned=0)
    cluster.open.append((0, 0, 4000))
    for _ in range(120):
        cluster.send([0] * 10, 90)
    tokens = cluster.tokens()
    assert tokens[0] - 4000 < 0.5 * min(tokens[1:]), tokens
