"""`scripts.bench.expert_moves`: a dry run of two CPU ranks, and the figures of rounds."""

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from kernels.routing.expert_map import ContiguousMap
from scripts.bench import expert_moves
from scripts.bench.processes import Outcome
from workers.specs.expert_layout import ExpertLayout


def layout(num_experts: int, num_ranks: int) -> ExpertLayout:
    return ExpertLayout.of(ContiguousMap(num_experts, num_ranks), range(2))


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_an_exchange_and_back(num_ranks: int) -> None:
    """Each rank gives half of its experts away; those that stay keep their slots."""
    before = layout(4 * num_ranks, num_ranks)
    there = expert_moves.exchanged(before, 0.5, forth=True)
    for layer, it in there.layers.items():
        was = before.layers[layer].slots
        assert sorted(it.slots) == sorted(was)
        for start, end in pairwise(there.starts):
            assert it.slots[start : start + 2] == was[start : start + 2]
            assert not set(it.slots[start + 2 : end]) & set(was[start:end])
    assert expert_moves.exchanged(there, 0.5, forth=False).layers == before.layers


def test_figures_of_all_gaps_and_of_each_round() -> None:
    still = {"gaps_ms": [1.0] * 99 + [2.0], "commit_gaps_ms": [], "moves": 0}
    still |= {"move_s": [], "layers_moved": 0}
    moving = {**still, "gaps_ms": [1.0] * 98 + [4.0] * 2, "commit_gaps_ms": [1.0, 4.0], "moves": 2}
    moving |= {"move_s": [0.5, 1.5], "layers_moved": 12}
    modes = {"still": expert_moves.summary([still]), "moving": expert_moves.summary([moving] * 2)}
    assert modes["still"]["gap_p99_ms"] == pytest.approx(1.01) and modes["moving"]["gaps"] == 200
    assert (modes["moving"]["moves"], modes["moving"]["layers_moved"]) == (4, 24)
    assert (modes["moving"]["move_s_p50"], modes["moving"]["move_s_max"]) == (1.0, 1.5)
    assert "move_s_p50" not in modes["still"] and len(modes["moving"]["rounds"]) == 2
    assert modes["still"]["gap_p999_ms"] == pytest.approx(1.901)
    modes["still"]["rounds"] *= 2
    assert expert_moves.compared(modes) == {
        "gap_p99_of_still": 3.96,
        "gap_p99_of_still_of_pairs": 3.96,
        "gap_p999_more_ms": 2.099,
        "longest_gap_more_ms": 2.0,
        "all_layers_s_max": 1.5,
    }


@pytest.mark.timeout(240)
def test_two_ranks_move_all_layers_beside_open_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = "--rounds 1 --tokens 40 --streams 2 --commit abcdef0 --set cluster.device=cpu"
    out = tmp_path / "moves"
    monkeypatch.setattr(sys, "argv", ["expert_moves", *options.split(), "--out", str(out)])
    expert_moves.main()
    found = json.loads(out.with_suffix(".json").read_text())
    assert found["ranks"] == 2 and found["backends"]["all2all"] == "shm"
    still, moving = found["modes"]["still"], found["modes"]["moving"]
    assert (still["moves"], still["layers_moved"]) == (0, 0)
    assert moving["moves"] > 0 and moving["layers_moved"] == found["layers"] * moving["moves"]
    assert still["gaps"] == moving["gaps"] == 2 * (40 - 1 - expert_moves.WARM_TOKENS)
    assert moving["commit_gap_max_ms"] <= moving["gap_max_ms"]
    assert found["ended"] == "complete"
    page = out.with_suffix(".md").read_text()
    assert f"| moving | {moving['gaps']} | {moving['gap_p50_ms']:.3f} |" in page
    out.with_suffix(".md").unlink()
    monkeypatch.setattr(sys, "argv", ["expert_moves", "--redraw", "--out", str(out)])
    expert_moves.main()
    assert out.with_suffix(".md").read_text() == page


@pytest.mark.parametrize(
    ("num_rounds", "move_s", "line"),
    [
        (1, [], None),
        (3, [], "No move ended within a round."),
        (3, [0.5, 1.5], "A move of 6 layers takes 1.000 s (median), 1.500 s at most; 3 moves."),
    ],
)
def test_rounds_until_the_time_is_over_are_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_rounds: int,
    move_s: list[float],
    line: str | None,
) -> None:
    """A round without its pair does not count."""
    one = {"gaps_ms": [1.0, 2.0], "commit_gaps_ms": [], "moves": 0, "move_s": [], "layers_moved": 0}
    moving = {"round": {**one, "mode": "moving", "moves": 3, "move_s": move_s}}
    rounds = [moving, *[{"round": {**one, "mode": "still"}}] * 2]
    start = {"start": {"backends": {"all2all": "shm"}, "layers": 6}}
    ended = Outcome([start, {"warm": "still"}, *rounds[:num_rounds]], "the time was over")
    monkeypatch.setattr(expert_moves, "run_group", lambda *args: ended)
    out = tmp_path / "moves"
    options = f"--commit abcdef0 --set cluster.device=cpu --out {out}"
    monkeypatch.setattr(sys, "argv", ["expert_moves", *options.split()])
    with pytest.raises(SystemExit, match="the time was over"):
        expert_moves.main()
    if line is None:
        assert not out.with_suffix(".json").exists()
        return
    found = json.loads(out.with_suffix(".json").read_text())
    assert found["ended"] == "the time was over"
    assert found["all_layers_s_max"] == max(move_s, default=None)
    assert [len(it["rounds"]) for it in found["modes"].values()] == [1, 1]
    page = out.with_suffix(".md").read_text()
    assert "1 rounds of each kind, ended: the time was over" in page
    assert line in page
