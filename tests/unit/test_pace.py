"""When a step takes too long, by the times of earlier steps."""

import pytest

from workers.stats.pace import FACTOR, Pace


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def after(clock: Clock, *steps: tuple[int, float]) -> Pace:
    """A pace with these steps, each a number of tokens and seconds."""
    pace = Pace(clock)
    for num_tokens, seconds in steps:
        pace.begin(num_tokens)
        clock.now += seconds
        pace.end()
    return pace


@pytest.mark.parametrize(
    ("steps", "num_tokens", "expected_s"),
    [
        ([(64, 1.0), (100, 3.0), (70, 2.0)], 90, 3.0),  # the longest of its power of two
        ([(1, 0.5), (64, 1.0)], 2048, 32.0),  # in proportion to the next smaller one
        ([(64, 1.0)], 2, 1.0),  # a smaller step takes no longer
        ([(0, 0.25)], 0, 0.25),
    ],
)
def test_a_step_is_overdue_after_a_multiple_of_its_expected_time(steps, num_tokens, expected_s):
    clock = Clock()
    pace = after(clock, *steps)
    pace.begin(num_tokens)
    clock.now += FACTOR * expected_s
    assert not pace.overdue()
    clock.now += 0.01
    assert pace.overdue()


def test_the_first_step_of_a_process_has_all_the_time():
    clock = Clock()
    pace = after(clock)
    pace.begin(1)
    clock.now += 1e6
    assert not pace.overdue()


def test_between_two_steps_nothing_takes_long():
    assert after(Clock(), (1, 1.0)).overdue()
