"""Ratios of cells to their baseline."""

from cluster.experiments.comparison import CellResult, Spread, ratio


def cell(*values: float | None) -> CellResult:
    """A cell of which each repeat has a value of `m`; None: the repeat has another metric alone."""
    runs = {i: {"other": 1.0} if v is None else {"m": v} for i, v in enumerate(values)}
    return CellResult(1, "cell", {}, runs)


def test_each_repeat_is_compared_with_the_repeat_of_its_number() -> None:
    found = ratio(cell(2.0, 4.0, 9.0), cell(4.0, 1.0, 3.0), "m")
    assert found == Spread(median=3.0, low=0.5, high=4.0)


def test_repeats_without_a_value_on_both_sides_are_left_out() -> None:
    found = ratio(cell(2.0, 4.0, None, 5.0), cell(4.0, None, 1.0), "m")
    assert found == Spread(0.5, 0.5, 0.5)
    assert ratio(cell(None), cell(1.0), "m") is None
    assert ratio(cell(1.0), cell(0.0), "m") is None, "nothing is a multiple of 0"
