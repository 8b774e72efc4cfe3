"""Rests of a thread by the time that it has run, with a clock of the test."""

import pytest

from workers.engine.staging_pace import Pace, Rests


class Thread:
    """Runs and rests by a clock of its own."""

    def __init__(self, share: float, longest_s: float) -> None:
        self.ran, self.rests = 0.0, []
        self.rest = Rests(Pace(share, longest_s), self.rests.append, lambda: self.ran)

    def work(self, seconds: float) -> None:
        self.ran += seconds
        self.rest()


def test_a_thread_takes_its_share_of_time():
    thread = Thread(0.05, 60.0)
    for seconds in (0.01, 0.002, 0.3):
        thread.work(seconds)
    assert thread.rests == pytest.approx([0.19, 0.038, 5.7])
    assert thread.ran / (thread.ran + sum(thread.rests)) == pytest.approx(0.05)


def test_short_rests_are_added_up():
    thread = Thread(0.5, 60.0)
    for _ in range(5):
        thread.work(0.0004)
    assert thread.rests == pytest.approx([0.0012])


def test_the_rests_of_a_task_have_a_limit():
    thread = Thread(0.1, 1.0)
    for _ in range(4):
        thread.work(0.05)
    assert thread.rests == pytest.approx([0.45, 0.45, 0.1])
