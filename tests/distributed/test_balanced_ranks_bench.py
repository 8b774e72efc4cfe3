"""`scripts.bench.balanced_ranks`: a dry run of two pinned ranks, and the figures of its turns."""

import json
import os
import sys
from pathlib import Path

import pytest

from kernels.routing.expert_map import PlacedMap
from scripts.bench import balanced_ranks
from workers.specs.expert_layout import ExpertLayout


def test_rows_of_slots_become_loads_of_experts() -> None:
    """Layers may have different maps; copies of an expert count together."""
    maps = ((0, 1, 2, 1, 2, 3), (3, 1, 2, 0, 2, 3))
    layout = ExpertLayout.of(PlacedMap(4, (0, 3, 6), maps), range(2))
    of_ranks = [[[1, 2, 3], [4, 5, 6]], [[10, 20, 30], [40, 50, 60]]]
    assert balanced_ranks.loads_of(layout, of_ranks) == {
        0: [1, 2 + 10, 3 + 20, 30],
        1: [40, 5, 6 + 50, 4 + 60],
    }


def test_the_share_of_what_was_predicted() -> None:
    turns = [("balanced", 100.0), ("unbalanced", 130.0), ("unbalanced", 126.0), ("balanced", 100.0)]
    reports = [{"predicted": 1.4}, *({"mode": mode, "step_ms": ms} for mode, ms in turns)]
    found = balanced_ranks.law_of(1.5, reports)
    assert (found["unbalanced_ms"], found["balanced_ms"]) == (128.0, 100.0)
    assert (found["gain"], found["predicted_gain"]) == (0.28, 0.4)
    assert found["share_of_predicted"] == pytest.approx(0.7)


def test_the_shape_has_wide_experts(tmp_path: Path) -> None:
    model = balanced_ranks.wide_model(tmp_path / "wide", 512, 2)
    shape = balanced_ranks.shape_of(model)
    assert (shape["moe_intermediate_size"], shape["num_hidden_layers"]) == (512, 2)
    assert shape["num_experts"] > shape["num_experts_per_tok"]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a core for each of two ranks")
@pytest.mark.timeout(300)
def test_two_pinned_ranks_move_to_the_planned_map_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "--rounds 2 --width 64 --tokens 32 --exponents 1.5 --commit abcdef0"
    out = tmp_path / "ranks"
    monkeypatch.setattr(sys, "argv", ["balanced_ranks", *options.split(), "--out", str(out)])
    balanced_ranks.main()
    found = json.loads(out.with_suffix(".json").read_text())
    (law,) = found["laws"]
    assert {mode: len(turns) for mode, turns in law["turns_ms"].items()} == {
        "unbalanced": 2,
        "balanced": 2,
    }
    assert law["predicted_gain"] > 0.05 and len(found["cores"]) == 2
    assert found["shape"]["moe_intermediate_size"] == 64
