"""The sweeps' processes keep what was measured when a rank raises, dies or hangs; a dry run of a sweep."""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from scripts.bench import processes
from scripts.bench.processes import Limits, run_group


def measure(rank: int, report, folder: Path, what: str, hangs: Path) -> None:
    """Reports once, and then rank 1 does `what` while the others wait for it."""
    report({"rank": rank})
    if what == "end":
        return
    if rank == 1:
        while not (folder / "reports").read_text():
            time.sleep(0.01)
        if what == "raise":
            raise ValueError("out of\nluck")
        if what == "die":
            os._exit(3)
        hangs.touch()
    time.sleep(600)


class Clock:
    """A clock that goes a second ahead at each look once the file `reported` is there."""

    def __init__(self, reported: Path):
        self.ahead, self._reported = 0, reported
        self.sleep = time.sleep

    def monotonic(self) -> float:
        self.ahead += self._reported.exists()
        return time.monotonic() + self.ahead


@pytest.mark.parametrize(
    ("what", "failure"),
    [
        ("end", None),
        ("raise", "rank 1: ValueError: out of"),
        ("die", "rank 1: died with 3"),
        ("hang", "nothing came for 60 s"),
    ],
)
def test_what_was_reported_stays(what, failure, monkeypatch, tmp_path):
    """A rank has a minute for its first report, because it may have to import this module first."""
    monkeypatch.setattr(processes, "POLL_S", 0.01)
    monkeypatch.setattr(processes, "time", Clock(tmp_path / "hangs"))
    outcome = run_group(measure, [what, tmp_path / "hangs"], 2, Limits(60, time.monotonic() + 1e6))
    assert outcome.failure == failure
    assert outcome.reports == [{"rank": 0}]
    assert outcome.said() == (f'{failure}, after {{"rank": 0}}' if failure else "complete")


def test_the_end_of_the_whole_run_is_the_end_of_a_group(tmp_path):
    outcome = run_group(measure, ["hang", tmp_path / "hangs"], 2, Limits(200, time.monotonic()))
    assert outcome.failure == "the time for the whole run was over"


@pytest.fixture
def dry_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str], dict]:
    """dry_run(name, options): what a measurement writes on a CPU, to x.json and x.md of tmp_path."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    out = tmp_path / "x"

    def run(name: str, options: str) -> dict:
        monkeypatch.setattr(sys, "argv", [name, *options.split(), "--out", str(out)])
        importlib.import_module(f"scripts.bench.{name}").main()
        assert out.with_suffix(".md").read_text().startswith("# ")
        return json.loads(out.with_suffix(".json").read_text())

    return run


def test_exchanges_are_swept_over_gloo(dry_run, tmp_path):
    options = "--device cpu --ranks 2 --tokens 1 5 --rounds 1 --hidden 64 --width 32"
    found = dry_run("all2all", options + " --experts 8 --top-k 2")
    assert set(found["missing"]) == {"symm", "copy_engine", "deepep", "deepep_low_latency"}
    assert set(found["tokens"]) == {"1", "5"}
    for name in ("allgather", "torch_dist"):
        sizes = found["backends"][name]["sizes"]
        assert set(sizes) == {"1", "5"}
        assert all(row["us"] > 0 and row["both_us"] > 0 for row in sizes.values())
    assert "| 5 |" in (tmp_path / "x.md").read_text()
    assert (tmp_path / "x.png").exists()


def test_experts_are_swept_on_the_cpu(dry_run):
    options = "--device cpu --tokens 1 5 --rounds 1 --hidden 64 --width 32"
    options += " --experts 8 --local-experts 4 --top-k 2"
    found = dry_run("experts", options)
    assert set(found["missing"]) == {"triton", "deepgemm", "deepgemm_fp8"}
    for name in ("torch_grouped", "reference"):
        rows = found["backends"][name]["sizes"]
        assert set(rows) == {"1", "5"} and rows["5"]["products_us"] > 0


def test_a_timeline_of_two_ranks_has_all_states_of_both(dry_run, tmp_path):
    options = "--config configs/local.yaml --ranks 2 --scale 0.03 --lengths 0.03"
    options += " --set cluster.device=cpu --set model.weights=dummy --commit abc"
    found = dry_run("timeline", options)
    assert found["commit"] == "abc" and found["backends"]["all2all"] == "shm"
    assert [state["phase"] for state in found["states"]] == ["decode", "decode", "prefill"]
    for state in found["states"]:
        assert [rank["step_ms"] > 0 for rank in state["ranks"]] == [True, True]
    assert len(list(tmp_path.glob("x-*.png"))) == 3


def test_what_a_map_and_counts_cost(dry_run):
    options = "--config configs/local.yaml --ranks 2 --rounds 2 --state decode:2:6:90 --commit abc"
    options += (
        " --set cluster.device=cpu --set model.weights=dummy --set model.routing.kind=uniform"
    )
    found = dry_run("expert_cost", options)
    (row,) = found["states"]
    assert {name: len(turns) for name, turns in row["turns_ms"].items()} == {"off": 2, "on": 2}
    assert row["on_over_off"] == round(row["off_ms"] / row["on_ms"], 4) > 0


def test_overlap_is_swept_over_gloo_and_one_that_fails_costs_no_other(dry_run, tmp_path):
    options = (
        "--ranks 2 --all2alls deepep,torch_dist --gemms auto --model configs/models/demo --layers 2"
    )
    options += " --max-model-len 64 --prefill 8,16 --rounds 2"
    (group,) = dry_run("overlap", options)["groups"]
    figures = group["all2alls"]
    assert "on GPUs only" in figures["deepep"]["missing"]
    for name in ("resident", "torch_dist"):
        assert [len(step["whole_ms"]) for step in figures[name]["steps"]] == [2, 2]
