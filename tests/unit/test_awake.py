"""The time for which a process was awake, with a clock of the test."""

import pytest

from kernels.host.awake import LOOKS, AwakeTime


class Clock:
    """Seconds, which pass as the test sets them."""

    def __init__(self, now: float = 0.0):
        self.now = now

    def __call__(self) -> float:
        return self.now

    def look(self, awake: AwakeTime, *moments: float) -> list[float]:
        """The seconds awake at each of these moments."""
        found = []
        for self.now in moments:
            found.append(awake.look())
        return found


def test_all_time_of_a_process_that_looks_often_counts():
    clock = Clock(100.0)
    awake = AwakeTime(2.0, clock)
    assert clock.look(awake, 100.0, 101.0, 103.0, 103.5, 105.5) == [0.0, 1.0, 3.0, 3.5, 5.5]


def test_a_pause_counts_as_one_part_whatever_its_length():
    clock = Clock(100.0)
    awake = AwakeTime(2.0, clock)
    assert clock.look(awake, 101.0, 1101.0, 1102.0, 10**9, 10**9 + 1) == [1.0, 3.0, 4.0, 6.0, 7.0]


@pytest.mark.parametrize("step_s", [0.01, 8.0 / LOOKS, 3.0, 1e6])
def test_a_limit_is_reached_in_time_and_after_so_many_looks(step_s):
    """Every step of time is one look: short ones reach the limit of 8 s in 8 s, long ones are pauses."""
    clock, num_looks = Clock(), 0
    awake = AwakeTime(8.0 / LOOKS, clock)
    while awake.look() < 8.0:
        clock.now += step_s
        num_looks += 1
    assert num_looks == (LOOKS if step_s >= 8.0 / LOOKS else pytest.approx(8.0 / step_s, abs=1))
