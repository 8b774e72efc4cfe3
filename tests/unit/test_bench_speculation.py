"""Measurements of draft tokens: the servers and the table, and steps by their rows on a CPU rank."""

import argparse
import copy
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import ROOT, gpu_speculation, results, step_rows
from tests.distributed.engine_harness import rank_config
from tests.family_cases import family_checkpoint

PUBLISHED = results.load(ROOT / "docs" / "results" / "gpu-one-after")


def server(rate: float, drafts: int, drafted: int, accepted: int) -> dict[str, Any]:
    """A server with the loads of a published report, at `rate` output tokens/s."""
    found = copy.deepcopy({"resolved": PUBLISHED["resolved"], "loads": PUBLISHED["loads"][:1]})
    (load,) = found["loads"]
    load["result"]["output_tokens_per_s"] = rate
    for rank in load["ranks"]:
        rank |= {"drafts": drafts, "draft_tokens": drafted, "accepted_tokens": accepted}
    return found


def test_rates_are_compared_with_the_server_without_drafts() -> None:
    found = {"off": server(100, 0, 0, 0), "mtp, 0.8": server(150, 10, 30, 20)}
    report = {name: value for name, value in PUBLISHED.items() if name != "loads"}
    page = gpu_speculation.page({**report, "servers": found}, "x")
    off, on = (line.split(" | ") for line in page.splitlines()[-2:])
    assert off[1:4] == ["off", "100", "1.00"] and off[6:8] == ["-", "-"]
    assert on[1:4] == ["mtp, 0.8", "150", "1.50"] and on[6:8] == ["3.00", "3.00"]


def test_each_acceptance_has_a_server() -> None:
    options = argparse.Namespace(
        speculation="mtp", num_draft_tokens=3, accept_lengths=[(0.8, 0.5), (0.2,)]
    )
    found = gpu_speculation.servers(options)
    assert list(found) == ["off", "mtp, 0.8 0.5", "mtp, 0.2"]
    assert found["off"] == ["speculation.method=off"]
    assert found["mtp, 0.8 0.5"][-1] == "speculation.accept_lengths=[0.8, 0.5]"


def test_steps_by_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = family_checkpoint(
        tmp_path / "mtp", "glm4_moe", "tied", mtp=True, num_nextn_predict_layers=1
    )
    speculation = {"method": "mtp", "num_draft_tokens": 2, "accept_lengths": [0.5]}
    config = rank_config(folder, 1, speculation=speculation)
    steps = step_rows.Steps(config, 2, 8)
    found = [steps.measure(2, num_drafts) for num_drafts in (0, 2)]
    assert [(row.rows, row.graph) for row in found] == [(2, "-"), (6, "-")]
    assert all(0 < row.draft_ms < row.step_ms and 0 < row.forward_ms < row.step_ms for row in found)
