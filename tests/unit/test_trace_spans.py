"""What a recorded step says of a step: times hidden and exposed, and where layers are in it. Hand-made times."""

import pytest

from cluster.commands.trace import summary
from workers.trace import hidden
from workers.trace.recorder import Recording, _AllToAllMoments, compute_spans
from workers.trace.spans import AllToAllSpan, ComputeSpan, RankTrace, StepTrace, overlapping, union


def plain() -> StepTrace:
    """Two layers of 2 s attention, 1 s dispatch, 3 s experts, 1 s combine: nothing runs beside an exchange."""
    all2alls, computes = [], []
    for start in (0.0, 7.0):
        computes += [ComputeSpan("attention", 0, start, start + 2)]
        all2alls += [AllToAllSpan("dispatch", 0, *[start + 2] * 4, start + 3)]
        computes += [ComputeSpan("experts", 0, start + 3, start + 6)]
        all2alls += [AllToAllSpan("combine", 0, *[start + 6] * 4, start + 7)]
    return StepTrace(all2alls, computes, 14.0)


def ubatched(done: float | None = 3.0) -> StepTrace:
    """One layer in two ubatches: the second one's attention hides the first one's dispatch, partly."""
    all2alls = [
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
    return StepTrace(all2alls, computes, 9.0)


def test_nothing_is_covered_where_nothing_runs_beside():
    step = plain()
    assert (step.exposed, step.covered, step.covered_share) == (4.0, 0.0, 0.0)


def test_covered_is_what_was_computed_while_rows_travelled():
    step = ubatched()
    assert step.exposed == 0.5 + 0.5 + 0.0 + 1.0
    # 1.5 to 3 of attention 1; 4 to 6 of experts 0; 6.5 to 7.5 of experts 1.
    assert step.covered == pytest.approx(4.5)
    assert step.covered_share == pytest.approx(4.5 / 6.5)


@pytest.mark.parametrize(("side_by_side", "begin"), [(False, 1.5), (True, 0.0)])
def test_a_ubatch_begins_where_the_one_before_stops_unless_they_compute_side_by_side(
    side_by_side, begin
):
    found = sorted(
        compute_spans(ubatched().all2alls, 9.0, side_by_side=side_by_side),
        key=lambda one: one.begin,
    )
    first, *others = [one for one in found if one.ubatch == 1 and one.name == "attention"]
    assert first == ComputeSpan("attention", 1, begin, 3.5) and not others
    others = [one for one in found if one != first]
    assert others[:-1] == [
        one for one in ubatched().computes if (one.name, one.ubatch) != ("attention", 1)
    ]
    assert others[-1] == ComputeSpan("end", 1, 9.0, 9.0)


def test_an_end_that_is_not_seen_counts_until_awaited():
    assert ubatched(None).covered == pytest.approx(5.0)
    late = ubatched(99.0)
    assert late.all2alls[0].in_flight == (1.5, 4.0)


def test_a_step_without_all2alls_covers_nothing():
    assert StepTrace([], [ComputeSpan("end", 0, 0.0, 1.0)], 1.0).covered_share == 0.0


def test_layers_are_found_by_their_all2alls():
    assert plain().num_layers() == 2 and ubatched().num_layers() == 1
    assert plain().interval_of(0, 1) == (0.0, 7.0)
    assert plain().interval_of(1, 1) == (7.0, 14.0)
    assert plain().interval_of(0, 2) == (0.0, 14.0)
    assert ubatched().interval_of(0, 1) == (0.0, 8.0)


def test_spans():
    assert list(union([(3, 4), (0, 1), (0.5, 2), (2, 2.5)])) == [(0, 2.5), (3, 4)]
    assert list(union([])) == []
    assert overlapping([(0, 2), (3, 6)], [(1, 4), (5, 5.5), (7, 8)]) == 1 + 1 + 0.5
    assert overlapping([(0, 1)], []) == 0


def test_the_summary_gives_both_shares_and_their_definitions():
    step = ubatched()
    host_bound = StepTrace(step.all2alls, step.computes, 9.0, 8.9)
    trace = RankTrace(
        rank=3,
        num_tokens=64,
        all2all="symm",
        plain=plain(),
        ubatched=host_bound,
        unrecorded=(13.0, 8.0),
    )
    assert trace.saved_share == 0.5, "2 of 4 s without compute are left"
    lines = summary([trace])
    assert lines[0].startswith("rank 3 plain: 14000.00 ms (unrecorded 13000.00 ms)")
    assert lines[0].endswith("0 % covered")
    assert "69 % covered, 50 % saved" in lines[1]
    assert "host" not in lines[0] and "took 8900.00 ms to launch it" in lines[1]
    assert lines[2] == hidden.COVERED and lines[3].startswith(hidden.SAVED)


def test_another_ubatch_that_computes_is_no_wait_in_a_graph():
    """In a graph a ubatch computes on its own stream while another one stands still for its all-to-all."""
    all2alls = [
        _AllToAllMoments("dispatch", 0, [2.0, 3.0, 3.0, 3.0, 6.0], 5.0),
        _AllToAllMoments("dispatch", 1, [4.0, 4.0, 4.0, 4.0, 7.0], 7.0),
        *(_AllToAllMoments("combine", ubatch, [8.0] * 5, 8.0) for ubatch in range(2)),
    ]
    step = Recording(all2alls, 64, 0.0, 8.0, None, captured=True).trace()
    # Ubatch 0 waits from 2 to 6, ubatch 1 from 4 to 7; ubatch 1 computes until 4, ubatch 0 again from 6.
    assert step.exposed == 6 - 4
    # In flight from 3 to 5 and from 4 to 7, of which 3 to 4 and 6 to 7 have compute.
    assert step.covered == 1 + 1
    assert step.covered_share == 2 / 4


@pytest.mark.parametrize(
    ("added_ubatched", "added_whole", "share"),
    [(1.0, 4.0, 0.75), (0.0, 4.0, 1.0), (6.0, 4.0, -0.5), (1.0, 0.0, None)],
)
def test_saved_share(added_ubatched, added_whole, share):
    assert hidden.saved_share(added_ubatched, added_whole) == share


def test_covered_share():
    assert hidden.covered_share(3.0, 1.0) == 0.75
    assert hidden.covered_share(0.0, 0.0) == 0.0
