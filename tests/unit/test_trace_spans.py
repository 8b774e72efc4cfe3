"""What a recorded schedule says of a step: times hidden and exposed, and where layers are in it. Hand-made times."""

import pytest

from cluster.commands.trace import summary
from workers.trace.recorder import _computes
from workers.trace.spans import AllToAllSpan, ComputeSpan, RankTrace, Schedule, overlapping, union


def plain() -> Schedule:
    """Two layers of 2 s attention, 1 s dispatch, 3 s experts, 1 s combine: nothing runs beside an exchange."""
    exchanges, computes = [], []
    for start in (0.0, 7.0):
        computes += [ComputeSpan("attention", 0, start, start + 2)]
        exchanges += [AllToAllSpan("dispatch", 0, *[start + 2] * 4, start + 3)]
        computes += [ComputeSpan("experts", 0, start + 3, start + 6)]
        exchanges += [AllToAllSpan("combine", 0, *[start + 6] * 4, start + 7)]
    return Schedule(exchanges, computes, 14.0)


def sliced(done: float | None = 3.0) -> Schedule:
    """One layer in two slices: the second one's attention hides the first one's dispatch, partly."""
    exchanges = [
        AllToAllSpan("dispatch", 0, 1.0, 1.5, 1.5, 4.0, 4.0, done),
        AllToAllSpan("dispatch", 1, 3.5, 3.5, 3.5, 6.0, 6.5, 6.5),
        AllToAllSpan("combine", 0, 6.0, 6.0, 6.0, 8.0, 8.0, 7.5),
        AllToAllSpan("combine", 1, 8.0, 8.0, 8.0, 8.0, 9.0, 9.0),
    ]
    computes = [
        ComputeSpan("attention", 0, 0.0, 1.0),
        ComputeSpan("attention", 1, 1.5, 3.5),
        ComputeSpan("experts", 0, 4.0, 6.0),
        ComputeSpan("experts", 1, 6.5, 8.0),
    ]
    return Schedule(exchanges, computes, 9.0)


def test_nothing_is_hidden_where_nothing_runs_beside():
    schedule = plain()
    assert (schedule.exposed, schedule.hidden, schedule.hidden_share) == (4.0, 0.0, 0.0)


def test_hidden_is_what_was_computed_while_rows_travelled():
    schedule = sliced()
    assert schedule.exposed == 0.5 + 0.5 + 0.0 + 1.0
    # 1.5 to 3 of attention 1; 4 to 6 of experts 0; 6.5 to 7.5 of experts 1.
    assert schedule.hidden == pytest.approx(4.5)
    assert schedule.hidden_share == pytest.approx(4.5 / 6.5)


@pytest.mark.parametrize(("apart", "begin"), [(False, 1.5), (True, 0.0)])
def test_a_slice_begins_where_the_one_before_stops_unless_they_compute_apart(apart, begin):
    found = sorted(_computes(sliced().exchanges, 9.0, apart=apart), key=lambda one: one.begin)
    first, *others = [one for one in found if one.slice == 1 and one.name == "attention"]
    assert first == ComputeSpan("attention", 1, begin, 3.5) and not others
    others = [one for one in found if one != first]
    assert others[:-1] == [
        one for one in sliced().computes if (one.name, one.slice) != ("attention", 1)
    ]
    assert others[-1] == ComputeSpan("end", 1, 9.0, 9.0)


def test_an_end_that_is_not_seen_counts_until_awaited():
    assert sliced(None).hidden == pytest.approx(5.0)
    late = sliced(99.0)
    assert late.exchanges[0].in_flight == (1.5, 4.0)


def test_a_step_without_exchanges_hides_nothing():
    assert Schedule([], [ComputeSpan("end", 0, 0.0, 1.0)], 1.0).hidden_share == 0.0


def test_layers_are_found_by_their_exchanges():
    assert plain().num_layers() == 2 and sliced().num_layers() == 1
    assert plain().span_of(0, 1) == (0.0, 7.0)
    assert plain().span_of(1, 1) == (7.0, 14.0)
    assert plain().span_of(0, 2) == (0.0, 14.0)
    assert sliced().span_of(0, 1) == (0.0, 8.0)


def test_spans():
    assert list(union([(3, 4), (0, 1), (0.5, 2), (2, 2.5)])) == [(0, 2.5), (3, 4)]
    assert list(union([])) == []
    assert overlapping([(0, 2), (3, 6)], [(1, 4), (5, 5.5), (7, 8)]) == 1 + 1 + 0.5
    assert overlapping([(0, 1)], []) == 0


def test_the_summary_says_when_the_device_waits_for_its_host():
    slow = Schedule(sliced().exchanges, sliced().computes, 9.0, 8.9)
    lines = summary([RankTrace(3, 64, "symm", plain(), slow, (13.0, 8.0))])
    assert lines[0].startswith("rank 3 plain: 14000.00 ms (unrecorded 13000.00 ms)")
    assert "0 % hidden" in lines[0] and "69 % hidden" in lines[1]
    assert "host" not in lines[0] and "took 8900.00 ms to launch it" in lines[1]
