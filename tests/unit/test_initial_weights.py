"""Random weights in place of a checkpoint: the same model on any number of ranks, finite in bfloat16."""

import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from kernels.routing.expert_map import ContiguousMap, ExpertMap
from scripts import make_checkpoint
from tests.unit.model_case import SMALL, OneRank, make_batch, small_checkpoint
from workers.models.registry import load_model_config
from workers.specs.model import ModelConfig
from workers.weights.initial_weights import draw_weights
from workers.weights.loader import CheckpointError, load_weights
from workers.weights.slots import Progress, SlottedModel, WeightSlot
from workers.weights.tensors import rank_weight_bytes, rank_weights

torch.set_num_threads(1)
PUBLISHED = Path(__file__).parents[2] / "configs" / "models" / "qwen3-30b-a3b"


class Rank:
    """Plain tensors in the place of a model's parameters."""

    def __init__(self, config: ModelConfig, expert_map: ExpertMap, rank: int):
        self.tensors = {
            entry.name: torch.full(entry.shape, float("nan"))
            for entry in rank_weights(config, expert_map, rank)
        }

    def weight_slots(self) -> dict[str, WeightSlot]:
        return {name: WeightSlot.plain(tensor) for name, tensor in self.tensors.items()}


def draw_all(
    model: SlottedModel,
    config: ModelConfig,
    rank: int = 0,
    num_ranks: int = 1,
    progress: Progress | None = None,
) -> None:
    expert_map, cpu = ContiguousMap(config.num_experts, num_ranks), torch.device("cpu")
    draw_weights(
        model, config=config, expert_map=expert_map, rank=rank, device=cpu, progress=progress
    )


def drawn(config: ModelConfig, rank: int, num_ranks: int) -> dict[str, torch.Tensor]:
    model = Rank(config, ContiguousMap(config.num_experts, num_ranks), rank)
    draw_all(model, config, rank, num_ranks)
    return model.tensors


def test_every_number_of_ranks_holds_the_same_model(tmp_path: Path) -> None:
    config = load_model_config(small_checkpoint(tmp_path, weights=False))
    whole = drawn(config, 0, 1)
    for num_ranks in (2, 3, 9):
        ranks = [drawn(config, rank, num_ranks) for rank in range(num_ranks)]
        assert set().union(*ranks) == whole.keys()
        for tensors in ranks:
            assert all(torch.equal(tensor, whole[name]) for name, tensor in tensors.items())
    different = {tuple(tensor.flatten()[:8].tolist()) for tensor in whole.values()}
    assert len(different) == len(whole), "two tensors hold the same values"


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True, "attention_bias": True}])
def test_the_same_as_a_written_checkpoint(tmp_path: Path, changes: dict) -> None:
    path = small_checkpoint(tmp_path, mlp_only_layers=[1], **changes)
    model = OneRank(path)
    batch = make_batch([[1, 2, 3]], [0])
    expected = model.logits(batch)
    for slot in model.model.weight_slots().values():
        slot.target.zero_()
    draw_all(model.model, model.config)
    assert torch.equal(model.logits(batch), expected)


def test_stays_finite_in_bfloat16_over_many_layers(tmp_path: Path) -> None:
    """And the answer hangs on the prompt: a benchmark's sequences do not all say the same."""
    shape = {"num_layers": 48, "hidden_size": 128, "head_dim": 32, "vocab_size": 512}
    model = OneRank(small_checkpoint(tmp_path, dtype="bfloat16", **shape), torch.bfloat16)
    prompts = torch.randint(0, 256, (8, 40), generator=torch.Generator().manual_seed(1)).tolist()
    logits = model.logits(make_batch(prompts, [0] * 8))
    assert logits.isfinite().all() and 1 < logits[:, :256].std() < 10
    assert len(logits.argmax(-1).unique()) > 100


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    config = load_model_config(small_checkpoint(tmp_path, weights=False))
    seen: list[tuple[int, int]] = []
    model = Rank(config, ContiguousMap(config.num_experts, 2), 1)
    draw_all(model, config, 1, 2, lambda *progress: seen.append(progress))
    total = sum(tensor.nbytes for tensor in model.tensors.values())
    assert seen[-1] == (total, total) and len(seen) == len(model.tensors)


def test_without_weights_a_checkpoint_names_the_way_out(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path, weights=False)
    assert not list(path.glob("*.safetensors*"))
    assert {"config.json", "tokenizer.json"} <= {file.name for file in path.iterdir()}
    config, expert_map = load_model_config(path), ContiguousMap(SMALL["num_experts"], 1)
    with pytest.raises(CheckpointError, match=r"model\.weights: dummy"):
        load_weights(
            Rank(config, expert_map, 0),
            path,
            config=config,
            expert_map=expert_map,
            rank=0,
            device=torch.device("cpu"),
        )


def test_the_published_shape_is_what_its_readme_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (command,) = re.findall(r"```\n(.*?)```", (PUBLISHED / "README.md").read_text(), re.DOTALL)
    *program, folder = (words := shlex.split(command.replace("\\\n", "")))[:4]
    assert program == ["python", "-m", make_checkpoint.__name__] and folder == "FOLDER"
    monkeypatch.setattr(sys, "argv", ["make_checkpoint", str(tmp_path / "new"), *words[4:]])
    make_checkpoint.main()
    for shape in (PUBLISHED, tmp_path / "new"):
        config = load_model_config(shape)
        num_bytes = rank_weight_bytes(config, ContiguousMap(128, 1), 0, config.dtype)
        assert num_bytes == 2 * 30_532_122_624  # Qwen3-30B-A3B's parameters
