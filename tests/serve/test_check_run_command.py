"""`phalanx check --run` from the command line: two ranks exchange rows, over the shared server's Ray."""

import json
import subprocess
import sys

import pytest

from cluster.config.examples import DEMO


@pytest.mark.exhaustive
def test_two_ranks_exchange_rows(ray_address: str) -> None:
    settings = ["cluster.ranks=2", "cluster.device=cpu", f"cluster.ray_address={ray_address}"]
    options = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "cluster.cli", "check", str(DEMO), "--all2all", "shm", "--run"]
    done = subprocess.run(
        [*command, "--json", *options], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    (report,) = json.loads(done.stdout)
    assert (report["all2all"], report["num_ranks"], report["fp8"]) == ("shm", 2, False)
    assert report["rows"][-1]["num_tokens"] > 1000
    assert all(row["wrong"] == "" and row["dispatch_us"] > 0 for row in report["rows"])
