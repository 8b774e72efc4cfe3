"""Requests that end ranks are found soon, and no other request is blamed, also under hundreds of requests."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import Any

import pytest

from cluster.client.open_request import OpenRequest
from cluster.client.router import RankLoad
from cluster.client.suspects import MAX_CAUSES, TRIAL_FAILURES, Suspects
from tests.unit.poison_world import World
from workers.engine import arrivals
from workers.wire.request import RequestOutput, SamplingParams


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "BEGIN_S", 0.0)


@pytest.mark.parametrize(
    ("num_ingresses", "copies", "seed"), [(1, 1, 1), (1, 2, 7), (2, 2, 0), (2, 2, 1), (2, 2, 6)]
)
def test_ranks_that_die_often_blame_no_request(num_ingresses, copies, seed):
    """A death each 10 to 30 steps of ranks, so that some requests are hit in two trials. All 64 streams go on."""
    world = World(seed, 64, num_ingresses=num_ingresses, copies=copies)
    world.run(60, every=(10, 30))
    assert world.num_asked > 200
    assert [ingress.set_aside for ingress in world.ingresses] == [[]] * num_ingresses
    # A failure puts few requests on trial, and the trials delay the others by few steps.
    assert 0 < world.trials < 8 * world.failures
    assert mean(world.stalls) < 25


@pytest.mark.parametrize("mute", [False, True], ids=["notices", "lost notices"])
@pytest.mark.parametrize(
    ("count", "num_ingresses", "at"),
    [(1, 1, 0), (1, 2, 3), (2, 1, 3), (2, 2, 0)],
    ids=["one", "one of two ingresses, later", "two, later", "two of two ingresses"],
)
def test_requests_that_end_ranks_are_found_among_hundreds(count, num_ingresses, at, mute):
    names = [f"poison{number}" for number in range(count)]
    world = World(5, 200, num_ingresses=num_ingresses, poison=dict.fromkeys(names, at), mute=mute)
    for _ in range(10):
        world.step()
    for number, name in enumerate(names):
        world.ask(name, number % num_ingresses)
    found: list[str] = []
    for _ in range(2000):
        world.step()
        found = [name for ingress in world.ingresses for name in ingress.set_aside]
        if len(found) == count:
            break
    assert sorted(found) == names
    assert world.failures <= count * (6 if mute else 5 if at else 4)
    assert world.excused >= count
    failures = world.failures
    for _ in range(20):
        world.step()
    assert world.failures == failures


def test_requests_that_end_ranks_are_found_while_ranks_die_by_chance():
    world = World(3, 64, poison={"poison": 0})
    world.ask("poison", 0)
    world.run(25, every=(15, 60))
    assert world.ingresses[0].set_aside == ["poison"]


def made(name: str, **fields: bool) -> OpenRequest:
    request = OpenRequest(name, [*name.encode()], SamplingParams(max_tokens=4), 0, "", None, 1)
    request.begin_attempt()
    for field, value in fields.items():
        setattr(request, field, value)
    return request


def test_failures_are_excused_a_few_times_without_a_served_request():
    suspects = Suspects()
    excused = []
    for number in range(MAX_CAUSES + 2):
        for _ in range(TRIAL_FAILURES):  # one request may end any number of ranks
            suspects.judge([made(f"a{number}", begun=True, on_trial=True)], lambda _: True)
        excused.append(suspects.verdict)
    assert excused == [True] * MAX_CAUSES + [False] * 2
    served = made("b")
    served.put(RequestOutput("b", [7]))
    suspects.judge([served, made("a", begun=True, on_trial=True)], lambda _: True)
    assert suspects.verdict
    suspects.judge([made("a", begun=True)], lambda _: True)
    assert suspects.verdict is None, "the failure that begins a suspicion has no known cause yet"


def test_requests_of_living_ranks_are_not_counted():
    request = made("a", begun=True, on_trial=True)
    assert Suspects().judge([request], lambda _: False) == []
    assert (request.failures, request.trial_failures) == (0, 0)


def test_all_open_requests_of_a_poison_are_found_with_it():
    """A client that sends one body many times ends no rank for each of them."""
    suspects = Suspects()
    proved = made("a", begun=True, on_trial=True)
    proved.trial_failures = TRIAL_FAILURES - 1
    copy, other = made("a"), made("b")
    copy.params = replace(copy.params, seed=7)  # which the server draws for each request
    proved.load = RankLoad((0, 1))
    assert suspects.judge([other, copy, proved], lambda place: place == (0, 1)) == [copy, proved]


def test_ranks_that_fail_at_once_under_copies_count_once():
    suspects = Suspects()
    copies = [made("a", begun=True, on_trial=True) for _ in range(3)]
    for rank, copy in enumerate(copies):
        copy.load = RankLoad((0, rank))
    for count in range(1, TRIAL_FAILURES + 1):
        found = suspects.judge(copies, lambda _: True)
        assert [copy.trial_failures for copy in copies] == [count] * 3
        assert found == (copies if count == TRIAL_FAILURES else [])


def test_a_copy_with_a_token_keeps_no_failure_of_another_copy():
    """Each of two copies is hit by chance in every second epoch, and sends a token in the other ones."""
    suspects = Suspects()
    copies = [made("a", begun=True, on_trial=True) for _ in range(2)]
    copies[1].load = RankLoad((0, 1))
    for epoch in range(3 * TRIAL_FAILURES):
        hit, served = copies[epoch % 2], copies[1 - epoch % 2]
        served.put(RequestOutput("a", [7]))
        assert suspects.judge(copies, lambda place, hit=hit: place == hit.place) == []
        assert (hit.trial_failures, served.trial_failures) == (1, 0)
        for copy in copies:
            copy.begin_attempt()
            copy.begun = copy.on_trial = True


def test_a_rank_that_has_served_a_request_that_left_is_not_broken():
    suspects = Suspects()

    def fail(number: int, left: Sequence[OpenRequest] = ()) -> bool | None:
        suspects.leave(left)
        suspects.judge([made(f"a{number}", begun=True, on_trial=True)], lambda it: it == (0, 0))
        return suspects.verdict

    served, elsewhere = made("b"), made("c")
    elsewhere.load = RankLoad((0, 1))
    for request in (served, elsewhere):
        request.put(RequestOutput(request.request_id, [7]))
    assert [fail(number) for number in range(MAX_CAUSES)] == [True] * MAX_CAUSES
    assert fail(MAX_CAUSES, [elsewhere]) is False, "another rank has served it"
    assert fail(MAX_CAUSES + 1, [served]) is True
    assert [fail(MAX_CAUSES + 2 + number) for number in range(MAX_CAUSES)] == [True, False]


@pytest.mark.parametrize(
    ("fields", "leaves"),
    [
        ({}, True),
        ({"begun": True}, False),
        ({"on_trial": True}, False),
        ({"finished": True}, False),
        ({"apart": True}, False),
        ({"pinned": (0, 1)}, False),
    ],
)
def test_the_requests_that_may_leave_a_group_that_fails(fields: dict[str, Any], leaves: bool):
    request = made("a", **fields)
    assert request.may_leave is leaves
    if leaves:
        Suspects().leave([request])
        assert not request.may_leave, "it has no token of its second group"
        request.put(RequestOutput("a", [7]))
        assert request.may_leave
