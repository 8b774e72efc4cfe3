"""A rank process that takes another rank's place: it ends with the weights of a new process, and reads only experts.

No peers: `load` needs none.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.block_fp8 import BlockWeights
from kernels.routing.expert_map import STANDBY
from tests.checkpoints.writer import make_checkpoint
from tests.distributed.engine_harness import rank_config
from workers.layers.moe import FREE
from workers.rank import process as process_module
from workers.rank.process import RankProcess
from workers.weights.checkpoint_files import CheckpointError
from workers.weights.slots import WeightSlot

NUM_EXPERTS = 7


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seats") / "model"
    return make_checkpoint(folder, num_layers=2, hidden_size=32, num_experts=NUM_EXPERTS)


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The experts of each call that reads weights; None: all weights of the rank."""
    calls: list[Any] = []
    for name in ("load_weights", "draw_weights"):
        original = getattr(process_module, name)

        def noting(*args: Any, original: Any = original, **options: Any) -> None:
            experts = options["experts"]
            calls.append(None if experts is None else sorted(experts))
            original(*args, **options)

        monkeypatch.setattr(process_module, name, noting)
    return calls


def loaded(checkpoint: Path, rank: int, num_ranks: int, **sections: Any) -> RankProcess:
    process = RankProcess(rank, rank_config(checkpoint, num_ranks, **sections))
    process.load()
    return process


def held(process: RankProcess) -> list[list[int]]:
    """The experts that each layer has the weights of."""
    return [block.held for block in process.model.moe_blocks().values()]


def in_both_layers(*experts: int) -> list[tuple[int, int]]:
    return [(layer, expert) for layer in range(2) for expert in experts]


def assert_weights_of(process: RankProcess, expected: RankProcess) -> None:
    assert held(process) == held(expected)
    mine, theirs = process.model.weight_slots(), expected.model.weight_slots()
    assert list(mine) == list(theirs)
    for name, slot in theirs.items():
        assert isinstance(slot, WeightSlot)
        assert torch.equal(mine[name].target, slot.target), name


@pytest.mark.parametrize("weights", ["checkpoint", "dummy"])
def test_seats_taken_one_after_another(checkpoint, read, weights):
    model = {"weights": weights}
    process = loaded(checkpoint, STANDBY, 3, model=model)
    assert held(process) == [[], []] and read == [None]
    # (rank, ranks, experts read): 7 experts over 3, 2, 1 and 8 ranks
    seats = [
        (1, 3, [3, 4]),
        (1, 3, None),
        (0, 2, [0, 1, 2]),
        (1, 2, [4, 5, 6]),
        (0, 1, [0, 1, 2, 3]),
        (2, 3, None),
        (7, 8, None),
        (6, 8, [6]),
    ]
    for rank, num_ranks, missing in seats:
        read.clear()
        process.become(rank, rank_config(checkpoint, num_ranks, model=model))
        process.load()
        assert read == ([] if missing is None else [in_both_layers(*missing)])
        fresh = loaded(checkpoint, rank, num_ranks, model=model)
        assert_weights_of(process, fresh)
        fresh.close()
    process.close()


def test_a_checkpoint_that_is_gone_for_a_while(checkpoint, read):
    process = loaded(checkpoint, 0, 3)
    hidden = checkpoint.rename(checkpoint.with_name("hidden"))
    process.become(0, rank_config(checkpoint, 2))
    for _ in range(2):
        with pytest.raises(CheckpointError, match=str(checkpoint)):
            process.load()
    assert held(process) == [[0, 1, 2, FREE]] * 2
    hidden.rename(checkpoint)
    read.clear()
    process.load()
    assert read == [in_both_layers(3)]
    fresh = loaded(checkpoint, 0, 2)
    assert_weights_of(process, fresh)
    fresh.close()
    process.close()


def test_settings_of_an_epoch_change_without_reading_weights(checkpoint, read):
    process = loaded(checkpoint, 0, 2)
    read.clear()
    kept = process.caches.kv_caches
    changes = {
        "model": {"routing": {"kind": "zipf", "s": 2.0}},
        "kernels": {"all2all": "torch_dist"},
        "overlap": {"mode": "on", "min_prefill_tokens": 64},
    }
    process.become(0, rank_config(checkpoint, 2, **changes))
    process.load()
    assert read == [] and process.caches.kv_caches is kept
    fresh = loaded(checkpoint, 0, 2, **changes)
    assert process.overlap == fresh.overlap and process.overlap.policy.enabled
    assert process.selection.names() == fresh.selection.names()
    assert process.settings() == fresh.settings()
    rows = torch.arange(12)
    for mine, theirs in zip(process.model.layers, fresh.model.layers, strict=True):
        law, expected = mine.mlp.forced_routing, theirs.mlp.forced_routing
        assert torch.equal(law(rows, rows, 12)[0], expected(rows, rows, 12)[0])
    process.become(0, rank_config(checkpoint, 2))
    assert all(layer.mlp.forced_routing is None for layer in process.model.layers)
    fresh.close()
    process.close()


def test_settings_of_a_process_cannot_change(checkpoint):
    process = loaded(checkpoint, 0, 2)
    other = rank_config(checkpoint, 3, cache={"block_size": 32}, scheduler={"max_num_seqs": 4})
    with pytest.raises(ValueError, match=r"^cache.block_size, scheduler.max_num_seqs changed"):
        process.become(0, other)
    assert process.config.num_ranks == 2
    process.close()


def test_experts_in_fp8_keep_their_scales():
    def filled(first: int) -> BlockWeights:
        new = BlockWeights.empty(3, 128, 256, device="cpu")
        for at in range(3):
            new.values[at] = float(first + at)
            new.scales[at] = float(10 * (first + at))
        return new

    new, old = filled(100), filled(1)
    new[0:2].copy_(old[1:3])
    assert new.values[:, 0, 0].float().tolist() == [2, 3, 104]  # 102 is rounded
    assert new.scales[:, 0, 1].tolist() == [20, 30, 1020]
