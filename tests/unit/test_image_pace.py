"""The pace of the vision tower beside steps: it waits for the next step when it has computed its share."""

import threading

import pytest

from workers.images import pace as subject
from workers.images.pace import Pace

WAIT_S = 60


class WatchedCondition(threading.Condition):
    """Counts the waits that begin."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.release()
        return super().wait(timeout)


def test_the_pace_bounds_blocks_beside_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "PATIENCE_S", WAIT_S)
    pace, changed, taken = Pace(), WatchedCondition(), []
    monkeypatch.setattr(pace, "_changed", changed)
    pace.stepped(2)

    def work() -> None:
        for number in range(6):
            pace.take(1.0)
            taken.append(number)

    thread = threading.Thread(target=work)
    thread.start()
    assert changed.waits.acquire(timeout=WAIT_S) and taken == [0, 1]
    pace.stepped(3)
    assert changed.waits.acquire(timeout=WAIT_S) and taken == [0, 1, 2, 3, 4]
    pace.stepped(0)
    assert changed.waits.acquire(timeout=WAIT_S) and len(taken) == 5
    pace.free()
    thread.join(WAIT_S)
    assert not thread.is_alive() and len(taken) == 6


def test_a_piece_beyond_the_limit_is_taken_off_later_steps() -> None:
    """A block of a large image takes longer than all that a step allows."""
    pace = Pace()
    pace.stepped(2)
    pace.take(7.0)
    left = []
    for _ in range(3):
        pace.stepped(2)
        left.append(pace._left)
    assert left == [-3.0, -1.0, 1.0]
    pace.stepped(2)
    assert pace._left == 2.0, "what is left is not kept"
    pace.take(9.0)
    pace.free()
    pace.stepped(2)
    assert pace._left == 2.0


def test_the_pace_notes_that_work_has_begun() -> None:
    pace = Pace()
    assert not pace.took()
    pace.take(1.0)
    assert pace.took() and not pace.took()
