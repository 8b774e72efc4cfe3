"""Measurements of draft tokens: the servers and the table, and steps by their rows on a CPU rank."""

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import ROOT, gpu_speculation, results, speculation_host, step_rows
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
    assert "Milliseconds by rows" not in page
    off, on = (line.split(" | ") for line in page.splitlines()[-2:])
    assert off[1:4] == ["off", "100", "1.00"] and off[6:8] == ["-", "-"]
    assert on[1:4] == ["mtp, 0.8", "150", "1.50"] and on[6:8] == ["3.00", "3.00"]
    found["mtp, 0.8"]["step_ms"] = "decode 1: 4.00"
    page = gpu_speculation.page({**report, "servers": found}, "x")
    assert page.endswith("- mtp, 0.8: decode 1: 4.00\n")


def options(**changes: Any) -> argparse.Namespace:
    found = {
        "rows": ["accept", "low", "schema"],
        "speculation": "mtp",
        "num_draft_tokens": 3,
        "accept_lengths": [(0.8, 0.5), (0.4,)],
        "in_flight": [1, 8],
        "low_in_flight": [8, 64],
        "beside": 63,
    }
    return argparse.Namespace(**found | changes)


def test_each_acceptance_has_a_server() -> None:
    found = gpu_speculation.servers(options())
    assert [one.name for one in found] == ["off", "mtp, 0.8 0.5", "mtp, 0.4", "mtp, 0.2"]
    assert found[0].settings == ["speculation.method=off"]
    assert found[1].settings[-1] == "speculation.accept_lengths=[0.8, 0.5]"
    plain, structured = (63, gpu_speculation.PLAIN), (63, gpu_speculation.STRUCTURED)
    assert found[0].loads == [(1, ""), (8, ""), (64, ""), plain, structured]
    assert found[1].loads == found[2].loads == [(1, ""), (8, "")]
    assert found[3].loads == [(8, ""), (64, "")]


@pytest.mark.parametrize(
    ("rows", "names", "loads"), [("low", ["off", "mtp, 0.2"], 2), ("schema", ["off"], 2)]
)
def test_rows_are_chosen(rows: str, names: list[str], loads: int) -> None:
    found = gpu_speculation.servers(options(rows=[rows]))
    assert [one.name for one in found] == names and len(found[0].loads) == loads


def test_a_json_schema_is_compared_with_a_stream_without() -> None:
    """Other loads of as many requests are none to compare with, nor is a load that was not measured yet."""
    found = server(100, 0, 0, 0)
    (load,) = found["loads"]
    loads = [copy.deepcopy(load) | {"beside": beside} for beside in ("", "a stream")]
    loads.append(copy.deepcopy(load) | {"beside": gpu_speculation.STRUCTURED})
    for one, rate in zip(loads, (400, 200, 190), strict=True):
        one["result"]["output_tokens_per_s"] = rate
    report = {name: value for name, value in PUBLISHED.items() if name != "loads"}
    page = gpu_speculation.page({**report, "servers": {"off": {**found, "loads": loads}}}, "x")
    assert [line.split(" | ")[3] for line in page.splitlines()[-3:]] == ["1.00", "1.00", "0.95"]
    page = gpu_speculation.page({**report, "servers": {"off": {**found, "loads": loads[2:]}}}, "x")
    assert page.splitlines()[-1].split(" | ")[3] == "-"


def test_steps_by_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = family_checkpoint(
        tmp_path / "mtp", "glm4_moe", "tied", mtp=True, num_nextn_predict_layers=1
    )
    speculation = {"method": "mtp", "num_draft_tokens": 2, "accept_lengths": [0.5]}
    config = rank_config(folder, 1, speculation=speculation)
    steps = step_rows.Steps(config, 2, 8)
    found = [steps.measure(2, num_drafts) for num_drafts in (0, 2)]
    assert [(row.rows, row.graph) for row in found] == [(2, "-"), (6, "-")]
    # The passes are those behind the step before, which may take longer than a step on a busy machine.
    assert all(0 < row.forward_ms < row.step_ms and row.draft_ms > 0 for row in found)


def test_turns_of_the_host_alternate_and_their_ratios_are_medians() -> None:
    turns: list[str] = []

    def turn(name: str, *times: float) -> Callable[[], dict[str, float]]:
        left = iter(times)

        def measure() -> dict[str, float]:
            turns.append(name)
            found = next(left)
            return {"ahead": found, "host": 2 * found}

        return measure

    # The first pair warms up; other work slows the machine down in the second one.
    found = speculation_host.compare((turn("off", 9, 1, 5, 2), turn("on", 1, 3, 10, 5)), 3)
    assert turns == ["off", "on", "on", "off", "off", "on", "on", "off"]
    assert found["ahead_ratio"] == found["host_ratio"] == 2.5
    assert found["off"] == {"ahead": 2, "host": 4} and found["on"] == {"ahead": 5, "host": 10}
    text = speculation_host.tables({"steps": [{"in_flight": 8, **found}], "schema": []})
    assert "| 8 | 2.000 | 5.000 | 2.50 | 4.000 | 10.000 | 2.50 |" in text
