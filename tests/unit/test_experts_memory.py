"""What `phalanx check` counts for slots and for spare memory of experts."""

from pathlib import Path

from cluster.commands.check import check
from cluster.config.load import load_config
from tests.unit.model_case import small_checkpoint


def rows(checkpoint: Path, ranks: int = 2, **experts: object):
    data = {
        "model": {"path": str(checkpoint)},
        "cluster": {"ranks": ranks, "device": "cpu"},
        "experts": experts,
    }
    return check(load_config(data))


def test_slots_and_spare_memory_are_counted(tmp_path: Path):
    checkpoint = small_checkpoint(tmp_path / "model")
    expert = 3 * 64 * 32 * 4  # bytes of one, in each of 3 layers
    plain = rows(checkpoint).ranks[0]
    slots = rows(checkpoint, redundant_slots=2).ranks[0]
    assert slots.weight_bytes - plain.weight_bytes == 3 * 2 * expert and slots.experts == "0-3 +2"
    moving = rows(checkpoint, redundant_slots=2, rebalance=50).ranks[0]
    assert moving.weight_bytes == slots.weight_bytes
    assert moving.buffer_bytes - slots.buffer_bytes == (4 + 2) * expert
    alone = rows(checkpoint, ranks=1, rebalance="auto")
    assert alone.ranks[0].buffer_bytes == rows(checkpoint, ranks=1).ranks[0].buffer_bytes
    assert "experts.rebalance is auto with one rank, so no expert moves" in alone.warnings
