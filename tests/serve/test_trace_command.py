"""`phalanx trace` from the command line to its files, over the shared server's Ray."""

import subprocess
import sys
from pathlib import Path

import yaml

from tests.checkpoints.writer import make_checkpoint


def run(config: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "cluster.cli", "trace", str(config), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_a_step_is_traced(ray_address: str, tmp_path: Path):
    make_checkpoint(tmp_path / "model", num_layers=2)
    config = tmp_path / "config.yaml"
    values = {
        "model": {"path": "model"},
        "cluster": {"ranks": 2, "device": "cpu", "ray_address": ray_address},
        "kernels": {"all2all": "allgather"},
        "cache": {"num_blocks": 512},
        "scheduler": {"max_num_seqs": 8},
    }
    config.write_text(yaml.safe_dump(values))
    done = run(config, "--tokens", "256", "--out", str(tmp_path / "out" / "step"))
    assert done.returncode == 0, done.stderr
    assert "all-to-all allgather" in done.stdout and "rank 1: whole " in done.stdout
    files = {p.name for p in (tmp_path / "out").iterdir()}
    assert files == {"step-rank-0.json.gz", "step-rank-1.json.gz"}
