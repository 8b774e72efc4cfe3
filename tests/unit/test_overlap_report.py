"""What the overlap benchmark derives from its times."""

import pytest

from scripts.bench.overlap_report import best, shares

RESIDENT = {"whole_ms": 80.0, "ubatched_ms": 84.0}


@pytest.mark.parametrize(
    ("whole", "ubatched", "most", "hidden"),
    [
        (100.0, 84.0, 1.25, 1.0),  # all is hidden, only cutting costs
        (100.0, 87.0, 1.25, 0.85),
        (100.0, 114.0, 1.25, -0.5),
        (81.0, 84.0, 1.0125, None),  # too little to be told from noise
    ],
)
def test_shares(whole: float, ubatched: float, most: float, hidden: float | None):
    found_most, found_hidden = shares({"whole_ms": whole, "ubatched_ms": ubatched}, RESIDENT)
    assert found_most == pytest.approx(most)
    assert found_hidden == (None if hidden is None else pytest.approx(hidden))


def test_best_is_of_all_all_to_alls_but_resident():
    def measured(whole: list[float], ubatched: list[float]) -> dict:
        return {"steps": [{"tokens": 64, "whole_ms": whole, "ubatched_ms": ubatched}]}

    group = {
        "all2alls": {
            "resident": measured([1.0], [1.0]),
            "symm": measured([9.0, 10.0, 30.0], [12.0, 12.0, 11.0]),
            "deepep": measured([14.0, 14.0, 14.0], [8.0, 9.0, 9.0]),
            "torch_dist": {"missing": "why"},
        }
    }
    assert best(group, 64) == {"whole_ms": (10.0, "symm"), "ubatched_ms": (9.0, "deepep")}
    assert best(group, 128) == {}
