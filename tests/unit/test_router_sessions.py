"""Sessions stay with their ranks: leads and their limits, answers, and one home for several ingresses."""

from collections import Counter

from cluster.client.router import CHUNK
from tests.unit.numbered_router import Router
from tests.unit.test_router import ROOM, prompt


def test_ranks_that_hold_equally_much_share_a_lead():
    router = Router([3], cache_tokens=ROOM, lead=6)
    hot = prompt(1, 2)
    for rank in (0, 1):
        router.pick(hot, 0, pinned=rank)
        router.release(rank, len(hot))
    picks = [router.pick(hot, 0) for _ in range(7)]
    assert sorted(picks[:6]) == [0, 0, 0, 1, 1, 1]
    assert picks[6] == 2


def test_without_a_lead_load_alone_decides():
    router = Router([2], cache_tokens=ROOM, lead=0)
    assert [router.pick(prompt(1), 10) for _ in range(4)] == [0, 1, 0, 1]


def test_a_session_leaves_its_rank_when_the_rank_is_ahead_by_more_than_the_lead():
    router = Router([2], cache_tokens=ROOM, lead=2)
    turn = prompt(1, 2, 3, 4)
    router.pick(turn, 0, pinned=0)
    router.release(0, len(turn))
    router.pick([0] * (2 * len(turn) - 1), 0, pinned=0)
    assert router.pick(turn, 0) == 0
    assert router.pick(turn, 0) == 1, "ahead by more than two requests of this size"


def test_an_answer_is_held_behind_its_prompt():
    router = Router([2], cache_tokens=ROOM)
    asked, answer = [*prompt(1), 5], prompt(2)
    pick = router.picked(asked, len(answer), pinned=0)
    router.release(0, len(asked) + len(answer))
    router.keep(pick.load, pick.tail, answer)
    assert router.pick([*asked, *answer, 6], 0) == 0
    assert router.picked_prefill == 2, "the last token of the answer, and the new one"


def test_without_a_cache_no_answer_is_held():
    router = Router([2])
    pick = router.picked([5], 2 * CHUNK, pinned=0)
    router.keep(pick.load, pick.tail, prompt(2, 2))
    assert not pick.load.held


def test_ingresses_that_share_nothing_find_one_rank_for_a_session():
    for number in range(8):
        first, second = (
            Router([4], num_replicas=2, start=start, cache_tokens=ROOM) for start in (0, 2)
        )
        turn = prompt(*range(10 * number, 10 * number + 5))
        home = first.pick(turn, 10, session=f"s{number}")
        assert second.pick([*turn, *prompt(7)], 10, session=f"s{number}") == home


def test_sessions_of_several_ingresses_spread_over_the_ranks():
    homes = Counter()
    for number in range(400):
        router = Router([4], num_replicas=2, cache_tokens=ROOM)
        homes[router.pick(prompt(number), 10, session=f"s{number}")] += 1
    assert all(60 <= homes[rank] <= 140 for rank in range(4)), homes


def test_the_home_of_a_session_has_the_lead_of_a_prefix_and_not_more():
    router = Router([2], num_replicas=2, cache_tokens=ROOM, lead=2)
    home = router.pick(prompt(0), 0, session="s")
    router.release(home, CHUNK)
    ahead = 0
    while router.pick(prompt(100 + ahead), 0, session="s") == home:
        ahead += 1
    assert ahead == 2


def test_a_prefix_that_one_rank_alone_holds_counts_before_the_name_of_the_session():
    router = Router([2], num_replicas=2, cache_tokens=ROOM)
    home = router.pick(prompt(0), 0, session="s")
    router.release(home, CHUNK)
    router.pick(prompt(1, 2), 0, pinned=1 - home)
    router.release(1 - home, 2 * CHUNK)
    assert router.pick(prompt(1, 2, 3), 0, session="s") == 1 - home


def test_with_one_ingress_the_name_of_a_session_changes_nothing():
    router = Router([2], cache_tokens=ROOM)
    assert [router.pick(prompt(number), 10, session="s") for number in range(4)] == [0, 1, 0, 1]


def test_a_rank_that_cannot_be_reached_is_no_home():
    router = Router([3], num_replicas=2, cache_tokens=ROOM)
    home = router.pick(prompt(1), 0, session="s")
    router.loads[home].reachable = False
    assert router.pick(prompt(2), 0, session="s") != home


def test_ranks_of_each_group_take_turns_when_a_request_visits_two_groups():
    router = Router([2, 3])
    picks = [(router.pick([0], 0, groups=[0]), router.pick([0], 0, groups=[1])) for _ in range(6)]
    assert [first for first, _ in picks] == [0, 1] * 3
    assert [second for _, second in picks] == [2, 3, 4] * 2
