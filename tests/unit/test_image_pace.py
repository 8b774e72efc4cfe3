"""The pace of the vision tower beside steps: it waits for the next step when it has computed its share."""

import threading
from typing import Any

import pytest

from tests.unit.test_image_encoder import SPEC, FakeTower, image, scheduler_of
from tests.unit.test_image_encoder import make as make
from tests.unit.test_image_encoder import tower as tower
from workers.images import pace as subject
from workers.images.pace import Pace
from workers.images.step_share import DECODE_SHARE, FIRST_TOKENS
from workers.step.step_sync import StepPlan

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


def test_the_pace_follows_the_plans(make: Any) -> None:
    encoder = make()
    scheduler = scheduler_of(encoder, [])
    scheduler.follow(StepPlan(True, (3,), decodes=True, prefill_tokens=2))
    assert encoder.pace._left == 4 + 2
    for plan in (StepPlan(False, (0,)), StepPlan(True, (2,), prefill_tokens=2)):
        encoder.pace.stepped(1)
        scheduler.follow(plan)
        assert encoder.pace._left is None, "no stream waits for a step without decodes"


def test_the_pace_follows_measured_times(make: Any) -> None:
    """A step of 10 ms without the tower, 13 ms beside it, and a tower that takes 0.5 ms for a token."""
    encoder = make(per_step=None)
    scheduler, decodes = scheduler_of(encoder, []), StepPlan(True, (3,), decodes=True)
    scheduler.follow(decodes)
    assert encoder.pace._left == FIRST_TOKENS, "no time is known"
    encoder.token_s = 0.5e-3
    scheduler.observe(decodes, 0.010)
    encoder.pace.take(1)
    scheduler.observe(decodes, 0.013)
    scheduler.follow(decodes)
    assert encoder.pace._left == pytest.approx(DECODE_SHARE * 10 / 0.5)


def test_the_time_of_a_token_is_that_of_most_blocks(make: Any, tower: FakeTower) -> None:
    """The first block takes longer, because kernels load."""
    encoder, clock = make(), iter([0.0, 9.0, 9.5, 10.0, 10.5])
    encoder.measure(image(1, 5), lambda: next(clock))
    assert tower.calls == [5] and encoder.token_s == pytest.approx(0.5 * SPEC.depth / 5)


@pytest.mark.parametrize(("num_tokens", "cost"), [(4, 4.0), (8, 8.0), (16, 16 * 2816 / 1792)])
def test_tokens_of_larger_images_cost_more(make: Any, num_tokens: int, cost: float) -> None:
    """Products of a patch have 768 FLOPs here, attention 32 for each patch of the image; a batch has 32 patches."""
    encoder = make()
    encoder.pace.stepped(100)
    encoder.compute([image(1, num_tokens)])
    assert encoder.pace._left == pytest.approx(100 - cost)
