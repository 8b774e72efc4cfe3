"""`phalanx check --run`: which all-to-alls a name stands for, and the figures of all ranks in one row."""

import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from cluster.cli import app
from cluster.commands.check_exchange import (
    ExchangeReport,
    check_exchange,
    fitting,
    merged,
    render_exchange,
)
from cluster.config.examples import DEMO
from cluster.config.load import load_config
from kernels.interface.backend import BackendShape
from workers.rank.exchange_check import Measured, sizes
from workers.rank.exchange_probe import formats

GPUS = BackendShape(
    device="cuda",
    dtype=torch.bfloat16,
    num_ranks=4,
    hidden_size=2048,
    moe_intermediate_size=768,
    num_experts=128,
    top_k=8,
    max_num_tokens=8192,
    max_num_seqs=256,
)
HOST = ["deepep", "deepep_low_latency"]
HOSTS = ["deepep_hosts", "deepep_low_latency"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, HOST),
        ({"num_ranks": 16, "num_nodes": 2}, HOSTS),
        ({"num_ranks": 8, "num_nodes": 2}, ["deepep_low_latency"]),  # fewer than 8 GPUs a host
        ({"num_ranks": 16, "num_nodes": 2, "hidden_size": 2304}, None),
        ({"device": "cpu"}, None),
    ],
)
def test_deepep_is_each_mode_that_carries_the_ranks(
    changes: dict[str, Any], expected: list[str] | None
) -> None:
    shape = replace(GPUS, **changes)
    if expected is None:
        with pytest.raises(ValueError, match=r"kernels\.all2all: deepep"):
            fitting("deepep", shape)
        return
    found = fitting("deepep", shape)
    assert list(found) == expected
    rows = {name: of.max_num_tokens for name, of in found.items()}
    assert rows.pop("deepep_low_latency") == 1024  # its limit, below that of a step
    assert set(rows.values()) <= {8192}


def test_other_names() -> None:
    assert list(fitting("deepep_hosts", replace(GPUS, num_ranks=16, num_nodes=2))) == [HOSTS[0]]
    assert list(fitting("auto", GPUS))[:2] == ["copy_engine", "allgather"]
    for name in ("auto", "torch_dist"):
        with pytest.raises(ValueError, match=r"cluster\.ranks is 1, so there is no all-to-all"):
            fitting(name, replace(GPUS, num_ranks=1))


def test_formats_of_rows() -> None:
    for name, both in (("deepep_hosts", True), ("deepep_low_latency", True), ("symm", True)):
        assert formats(name, GPUS) == [False, True][: 1 + both]
    assert formats("shm", GPUS) == [False]
    assert formats("deepep", replace(GPUS, hidden_size=2049)) == [False]


def test_sizes_end_with_the_largest_step() -> None:
    assert sizes(1) == [1] and sizes(128) == [1, 32, 128] and sizes(100) == [1, 32, 100]
    assert sizes(1024)[-2:] == [512, 1024] and sizes(16384)[-1] == 4096


def one(**changes: Any) -> Measured:
    return replace(Measured(32, "masked", 0.001, "", 2e-4, 1e-4, 2_000_000), **changes)


def test_the_slowest_rank_and_every_error() -> None:
    wrong = "the experts got 3 rows, expected are 4"
    row = merged([one(), one(dispatch_s=4e-4, sent_bytes=6_000_000, error=0.5, wrong=wrong)])
    assert (row.num_tokens, row.layout, row.error) == (32, "masked", 0.5)
    assert row.dispatch_us == pytest.approx(400) and row.combine_us == pytest.approx(100)
    assert row.dispatch_gb_s == pytest.approx(10) and row.combine_gb_s == pytest.approx(40)
    report = ExchangeReport("deepep_hosts", True, 16, 2, [merged([one()]), row])
    assert report.errors == [f"deepep_hosts in FP8, 32 rows a rank: rank 1: {wrong}"]
    shown = io.StringIO()
    render_exchange([report], Console(file=shown, width=200))
    text = shown.getvalue()
    assert "deepep_hosts, rows in FP8: 16 ranks on 2 hosts" in text and wrong in text
    assert "agree" not in text
    render_exchange([replace(report, rows=[merged([one()])])], Console(file=shown, width=200))
    assert "dispatch and combine agree with the reference" in shown.getvalue()


def test_what_cannot_be_run_starts_nothing() -> None:
    groups = "pool=[{role: prefill, ranks: 1}, {role: decode, ranks: 1}]"
    config = load_config(DEMO, ["cluster.ranks=2", groups, "cache.host_memory_gib=0.5"])
    with pytest.raises(ValueError, match="pool: --run checks the all-to-all of one group"):
        check_exchange(config)
    found = CliRunner().invoke(app, ["check", "--run", "--cluster"])
    assert found.exit_code == 2
    found = CliRunner().invoke(app, ["check", "--all2all", "nccl"])
    assert found.exit_code == 2 and "kernels.all2all" in found.output
