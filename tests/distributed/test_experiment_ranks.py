"""An experiment on real ranks: cells share a start, ranks change settings, a killed rank costs its run alone."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cluster.cli import app
from cluster.experiments import cluster_lock
from cluster.experiments.metrics import known_metrics
from cluster.experiments.results_folder import read_lines
from tests.checkpoints.writer import make_checkpoint


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experiment")
    make_checkpoint(folder / "tiny", num_layers=2, hidden_size=64, num_experts=6, head_dim=32)
    base = {
        "model": {"path": "tiny", "max_model_len": 2048},
        "cluster": {"ranks": 2, "device": "cpu"},
        "cache": {"num_blocks": 256},
        "overlap": {"mode": "off"},
        "scheduler": {"async_scheduling": True},  # as on GPUs
    }
    (folder / "base.yaml").write_text(yaml.safe_dump(base))
    changed = {
        "kernels.all2all": "torch_dist",
        "overlap.mode": "on",
        "model.routing.kind": "zipf",
    }
    values = {
        "title": "Real ranks",
        "kind": "engine",
        "base": "base.yaml",
        "sweep": {
            "list": [
                {"workload.request_rate": 40.0, "workload.phase": "prefill"},
                {"workload.concurrency": 3, **changed},
                {"workload.output_len": 1500, **changed},
            ]
        },
        "workload": {"requests": 6, "input_len": 12, "output_len": 8},
        "repeats": 1,
        "warmup": 2,
    }
    path = folder / "file.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def kill_a_rank(log: Path, begun: Path) -> None:
    """Kill the process that writes `log`, once the run of the folder `begun` is under way."""
    deadline = time.monotonic() + 200
    while not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "fd" / "1") == str(log):
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:
            continue


def test_cells_share_ranks_and_a_lost_rank_costs_its_run(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_lock.tempfile, "gettempdir", lambda: str(tmp_path))
    out = tmp_path / "out"
    killer = threading.Thread(
        target=kill_a_rank, args=(out / "engines/001/rank-1.log", out / "runs/003-r1"), daemon=True
    )
    killer.start()
    result = CliRunner().invoke(app, ["experiment", str(file), "--output", str(out)])
    killer.join()
    assert result.exit_code == 1, result.output
    arrivals, closed, lost = read_lines(out)
    assert arrivals["error"] is None and closed["error"] is None, result.output
    assert arrivals["engine"]["folder"] == closed["engine"]["folder"] == "engines/001"
    assert arrivals["metrics"]["output_tokens"] == 6, "prefill: one token each"
    assert closed["metrics"]["output_tokens"] == 6 * 8
    assert closed["metrics"].keys() <= set(known_metrics("engine"))
    assert closed["metrics"]["max_in_flight"] <= 4, "3 places are 2 and 1 of the ranks"
    assert "rank 1 ended with exit code -9" in lost["error"]
    assert "1 runs failed" in result.output
    first, second = (
        json.loads((out / f"runs/{run}/run.json").read_text())["engine"]
        for run in ("001-r1", "002-r1")
    )
    assert (first["backends"]["all2all"], first["num_changes"]) == ("shm", 0)
    assert (second["backends"]["all2all"], second["num_changes"]) == ("torch_dist", 1)
    assert (
        arrivals["metrics"]["ubatched_step_share"] == 0 < closed["metrics"]["ubatched_step_share"]
    )
    page = (out / "summary.md").read_text()
    assert "2 of 3 runs" in page and "Failed runs:" in page
    assert (out / "plot.png").exists()
