"""`scripts.bench.expert_cost`: its switch changes what a step does, and its figures are those of the turns."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scripts.bench.expert_cost import Switch, rows_of
from tests.checkpoints.writer import make_checkpoint
from tests.distributed.engine_harness import rank_config
from workers.rank.process import RankProcess


def test_the_switch_takes_tables_and_counts_away_and_puts_them_back(tmp_path: Path) -> None:
    process = RankProcess(0, rank_config(make_checkpoint(tmp_path / "model", num_layers=2), 1))
    process.load()
    assert process.model is not None and process.backends is not None
    epoch: Any = SimpleNamespace(process=process, runner=SimpleNamespace(graphs=None))
    blocks, load = process.model.moe_blocks().values(), process.backends.expert_load
    counts, switch = load.counts_Ls, Switch(epoch)
    assert counts is not None and all(block.table is None for block in blocks)
    for _ in range(2):
        switch.use("on")
        assert load.counts_Ls is counts
        for block in blocks:
            assert block.table is not None and block.experts_e is not None
            assert torch.equal(
                block.table.slots_EC[:, 0].long(), torch.arange(block.spec.num_experts)
            )
        switch.use("off")
        assert load.counts_Ls is None and all(block.table is None for block in blocks)
    process.close()


def test_rows_have_the_medians_of_the_turns() -> None:
    times = {"off": [10.0, 12.0, 11.0], "on": [11.0, 13.0, 12.0]}
    turns = [
        {"state": "decode", "variant": name, "step_ms": ms}
        for name, of_variant in times.items()
        for ms in of_variant
    ]
    turns.append({"state": "prefill", "variant": "off", "step_ms": 1.0})  # the run ended here
    decode, prefill = rows_of(turns)
    assert decode == {
        "state": "decode",
        "turns_ms": times,
        "off_ms": 11.0,
        "on_ms": 12.0,
        "on_over_off": pytest.approx(11 / 12, abs=1e-4),
    }
    assert prefill == {"state": "prefill", "turns_ms": {"off": [1.0], "on": []}}
