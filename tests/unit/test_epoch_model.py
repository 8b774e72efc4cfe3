"""Model check of epochs, fencing, wakes and replay: see tests/unit/epoch_model.py."""

from collections import defaultdict, deque
from collections.abc import Iterator

import pytest

from cluster.client.open_request import OpenRequest
from tests.unit.epoch_model import State, first_state, moves
from tests.unit.epoch_model_code import CACHES
from workers.engine.engine import Engine

Origins = dict[State, tuple[State, str] | None]


class DeadlockError(AssertionError):
    """A state from which the requests cannot end."""


def explore(failures: int, num_requests: int) -> int:
    """Visit every state; return their number. Raises AssertionError when a move breaks a promise."""
    first = first_state(failures, num_requests)
    origins: Origins = {first: None}
    before: defaultdict[State, list[State]] = defaultdict(list)
    goals, todo = [], deque([first])
    while todo:
        state = todo.popleft()
        try:
            found = list(moves(state))
        except AssertionError as error:
            raise AssertionError(f"{error}\n{path_to(state, origins)}") from error
        if is_goal(state):
            goals.append(state)
        for name, after in found:
            if not is_luck(name):
                before[after].append(state)
            if after not in origins:
                origins[after] = (state, name)
                todo.append(after)
    reaching, ends = set(goals), deque(goals)
    while ends:
        for state in before[ends.popleft()]:
            if state not in reaching:
                reaching.add(state)
                ends.append(state)
    stuck = next((state for state in origins if state not in reaching), None)
    if stuck is not None:
        raise DeadlockError(path_to(stuck, origins))
    return len(origins)


def is_luck(move: str) -> bool:
    """Whether nothing may wait for a move: a failure, or a stopped process that goes on by itself."""
    return move.endswith((" is dead", " is stopped")) or (
        move.startswith("rank") and move.endswith("goes on")
    )


def is_goal(state: State) -> bool:
    """Whether all requests have ended and new ones are taken in the present epoch."""
    ended = all(request is not None and request[2] for request in state.requests)
    return ended and state.group[0] == "serving" and state.client[:2] == (state.group[1], True)


def path_to(state: State, origins: Origins) -> str:
    names, here = [], origins[state]
    while here is not None:
        names.append(here[1])
        here = origins[here[0]]
    return "; ".join(reversed(names)) + f"\n{state}"


@pytest.fixture
def changed_code() -> Iterator[None]:
    """For tests that change the code."""
    for cached in CACHES:
        cached.cache_clear()
    yield
    for cached in CACHES:
        cached.cache_clear()


def test_without_failures_two_requests_end():
    assert explore(0, 2) > 1000


def test_no_failure_loses_or_doubles_a_token_or_stops_a_request():
    assert explore(1, 1) > 10_000


@pytest.mark.parametrize(
    ("owner", "name", "broken", "error"),
    [
        (Engine, "_woken_by_peer", lambda self: False, DeadlockError),
        (
            OpenRequest,
            "emitted",
            property(lambda self: [], lambda self, value: None),
            AssertionError,
        ),
    ],
    ids=["wakes are ignored", "no token is kept"],
)
def test_the_check_finds_broken_code(owner, name, broken, error, changed_code, monkeypatch):
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(error):
        explore(1, 1)
