"""The sweeps' processes keep what was measured when a rank raises, dies or hangs; a dry run of a sweep."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scripts.bench.processes import Limits, run_group
from workers.trace import hidden

ROOT = Path(__file__).parents[2]


def measure(rank: int, report, folder: Path, what: str) -> None:
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
    time.sleep(600)


@pytest.mark.parametrize(
    ("what", "patience_s", "failure"),
    [
        ("end", 60, None),
        ("raise", 60, "rank 1: ValueError: out of"),
        ("die", 60, "rank 1: died with 3"),
        ("hang", 5, "nothing came for 5 s"),
    ],
)
def test_what_was_reported_stays(what, patience_s, failure):
    outcome = run_group(measure, [what], 2, Limits(patience_s, time.monotonic() + 200))
    assert outcome.failure == failure
    assert outcome.reports == [{"rank": 0}]
    assert outcome.said() == (f'{failure}, after {{"rank": 0}}' if failure else "complete")


def test_the_end_of_the_whole_run_is_the_end_of_a_group():
    outcome = run_group(measure, ["hang"], 2, Limits(200, time.monotonic()))
    assert outcome.failure == "the time for the whole run was over"


def dry_run(name: str, options: str, out: Path) -> dict:
    """What a measurement writes on a CPU."""
    command = [sys.executable, "-m", f"scripts.bench.{name}", *options.split(), "--out", str(out)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    assert out.with_suffix(".md").read_text().startswith("# ")
    return json.loads(out.with_suffix(".json").read_text())


def test_exchanges_are_swept_over_gloo(tmp_path):
    options = "--device cpu --ranks 2 --tokens 1 5 --rounds 1 --hidden 64 --width 32"
    found = dry_run("all2all", options + " --experts 8 --top-k 2", tmp_path / "x")
    assert set(found["missing"]) == {"symm", "copy_engine", "deepep", "deepep_low_latency"}
    assert set(found["tokens"]) == {"1", "5"}
    for name in ("allgather", "torch_dist"):
        sizes = found["backends"][name]["sizes"]
        assert set(sizes) == {"1", "5"}
        assert all(row["us"] > 0 and row["both_us"] > 0 for row in sizes.values())
    assert "| 5 |" in (tmp_path / "x.md").read_text()
    assert (tmp_path / "x.png").exists()


def test_experts_are_swept_on_the_cpu(tmp_path):
    options = "--device cpu --tokens 1 5 --rounds 1 --hidden 64 --width 32"
    options += " --experts 8 --local-experts 4 --top-k 2"
    found = dry_run("experts", options, tmp_path / "x")
    assert set(found["missing"]) == {"triton", "deepgemm", "deepgemm_fp8"}
    for name in ("torch_grouped", "reference"):
        rows = found["backends"][name]["sizes"]
        assert set(rows) == {"1", "5"} and rows["5"]["products_us"] > 0


def test_steps_are_cut_over_gloo(tmp_path):
    options = "--ranks 2 --backends torch_dist,symm --model configs/models/demo --max-model-len 64"
    found = dry_run("overlap", options + " --prefill 32 --decode 4 --repeats 1", tmp_path / "x")
    assert "missing" in found["backends"]["symm"]
    for name in ("resident", "torch_dist"):
        steps = found["backends"][name]["steps"]
        assert [(step["phase"], step["tokens"]) for step in steps] == [
            ("prefill", 32),
            ("decode", 4),
        ]
        assert all(step["ubatched_ms"] > 0 for step in steps)
    traced = found["backends"]["torch_dist"]["traced"]
    assert (traced["phase"], traced["tokens"]) == ("prefill", 32) and 0 <= traced["covered"] <= 1
    page = (tmp_path / "x.md").read_text()
    assert hidden.COVERED in page and hidden.SAVED in page


def test_a_timeline_of_two_ranks_has_all_states_of_both(tmp_path):
    options = "--config configs/local.yaml --ranks 2 --scale 0.03 --lengths 0.03"
    options += " --set cluster.device=cpu --set model.weights=dummy --commit abc"
    found = dry_run("timeline", options, tmp_path / "x")
    assert found["commit"] == "abc" and found["backends"]["all2all"] == "shm"
    assert [state["phase"] for state in found["states"]] == ["decode", "decode", "prefill"]
    for state in found["states"]:
        assert [rank["step_ms"] > 0 for rank in state["ranks"]] == [True, True]
    assert len(list(tmp_path.glob("x-*.png"))) == 3
