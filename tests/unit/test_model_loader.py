"""The loader: values end up in the right place, a rank reads its own experts, errors name names."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.routing.expert_map import ContiguousMap, ExpertMap
from tests.unit.model_case import SMALL, OneRank, make_batch, small_checkpoint
from workers.models.registry import load_model_config
from workers.specs.model import ModelConfig, weight_map
from workers.weights import reader as weight_reader
from workers.weights.files import read_headers
from workers.weights.loader import CheckpointError, load_weights
from workers.weights.slots import WeightSlot
from workers.weights.tensors import rank_weight_bytes, rank_weights

torch.set_num_threads(1)

NUM_EXPERTS = SMALL["num_experts"]


class Rank:
    """Plain tensors in the place of a model's parameters: the loader needs no more."""

    def __init__(self, config: ModelConfig, expert_map: ExpertMap, rank: int):
        self.tensors = {
            entry.name: torch.full(entry.shape, float("nan"))
            for entry in rank_weights(config, expert_map, rank)
        }

    def weight_slots(self) -> dict[str, WeightSlot]:
        return {name: WeightSlot.plain(tensor) for name, tensor in self.tensors.items()}


def load_rank(path: Path, rank: int = 0, num_ranks: int = 1, **options: Any) -> Rank:
    config = load_model_config(path)
    expert_map = ContiguousMap(config.num_experts, num_ranks)
    model = Rank(config, expert_map, rank)
    where = {"expert_map": expert_map, "rank": rank, "device": torch.device("cpu")}
    load_weights(model, path, config=config, **where, **options)
    return model


def rewrite(path: Path, change: Any) -> None:
    """Save the checkpoint's tensors again after `change(tensors)`."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_rank(path)
    return str(caught.value)


@pytest.mark.parametrize("num_shards", [1, 4])
@pytest.mark.parametrize("num_ranks", [1, 3, 9])
def test_ranks_together_hold_every_tensor(tmp_path: Path, num_ranks: int, num_shards: int) -> None:
    path = small_checkpoint(tmp_path, num_shards=num_shards)
    disk: dict[str, torch.Tensor] = {}
    for file in path.glob("*.safetensors"):
        disk |= load_file(file)
    ranks = [load_rank(path, rank, num_ranks) for rank in range(num_ranks)]
    for model in ranks:
        for name, tensor in model.tensors.items():
            assert torch.equal(tensor, disk[name]), name
    assert set().union(*(model.tensors for model in ranks)) == disk.keys()
    owners = [name for model in ranks for name in model.tensors if ".experts." in name]
    assert len(owners) == len(set(owners)), "an expert on two ranks"


def test_reads_no_other_ranks_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = small_checkpoint(tmp_path, num_shards=3)
    read: list[tuple[str, int, int]] = []
    real_read = os.preadv

    def spy(file: int, buffers: list[memoryview], offset: int) -> int:
        count = real_read(file, buffers, offset)
        read.append((os.path.realpath(f"/proc/self/fd/{file}"), offset, count))
        return count

    monkeypatch.setattr(weight_reader.os, "preadv", spy)
    model = load_rank(path, rank=1, num_ranks=3)
    stored = read_headers(path)
    wanted = [
        (str(stored[name].file.resolve()), stored[name].offset, stored[name].num_bytes)
        for name in model.tensors
    ]
    assert sorted(read) == sorted(wanted)
    experts = {
        int(name.split(".experts.")[1].split(".")[0]) for name in model.tensors if "experts" in name
    }
    assert experts == set(ContiguousMap(NUM_EXPERTS, 3).experts_of(1))


def _config_expert_map(path: Path, num_ranks: int) -> tuple[ModelConfig, ExpertMap]:
    config = load_model_config(path)
    return config, ContiguousMap(config.num_experts, num_ranks)


def test_model_parameters_are_this_ranks_only(tmp_path: Path) -> None:
    """The memory table tells the truth, and no tensor keeps a file's pages."""
    path = small_checkpoint(tmp_path)
    config, expert_map = _config_expert_map(path, 1)
    model = OneRank(path).model
    storages = {
        slot.target.untyped_storage().data_ptr(): slot.target.untyped_storage().nbytes()
        for slot in model.weight_slots().values()
    }
    norms = (SMALL["num_heads"] + SMALL["num_kv_heads"] - 2) * SMALL["head_dim"] * 4
    told = rank_weight_bytes(config, expert_map, 0, "float32")
    assert sum(storages.values()) == told + norms * SMALL["num_layers"]
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(path) not in maps.read_text()
    assert rank_weight_bytes(config, expert_map, 0, "bfloat16") * 2 == told
    shares = [
        rank_weight_bytes(config, ContiguousMap(NUM_EXPERTS, 3), rank, "float32")
        for rank in range(3)
    ]
    assert shares[0] == shares[1] > shares[2]


def test_expected_tensors_are_what_transformers_saves(tmp_path: Path) -> None:
    from transformers import Qwen3MoeForCausalLM

    source = small_checkpoint(
        tmp_path / "a", mlp_only_layers=[1], attention_bias=True, tie_word_embeddings=True
    )
    Qwen3MoeForCausalLM.from_pretrained(source).save_pretrained(tmp_path / "b")
    saved = load_file(tmp_path / "b" / "model.safetensors")
    expected = {entry.name: entry.shape for entry in weight_map(load_model_config(source))}
    assert {name: tuple(tensor.shape) for name, tensor in saved.items()} == expected
    batch = make_batch([[1, 2, 3]], [0])
    assert torch.equal(OneRank(tmp_path / "b").logits(batch), OneRank(source).logits(batch))


def test_converts_the_dtype(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path, dtype="bfloat16")
    slots = OneRank(path, torch.float32).model.weight_slots()
    disk = load_file(path / "model.safetensors")
    name = "model.layers.1.self_attn.v_proj.weight"
    assert slots[name].target.dtype == torch.float32
    assert torch.equal(slots[name].target, disk[name].float())


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path, num_shards=2)
    seen: list[tuple[int, int]] = []
    load_rank(path, 0, 2, progress=lambda done, total: seen.append((done, total)))
    config, expert_map = _config_expert_map(path, 2)
    total = rank_weight_bytes(config, expert_map, 0, "float32")
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})


def test_errors_name_all_tensors(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path)
    gone, bent = "model.norm.weight", "model.layers.2.mlp.experts.7.up_proj.weight"

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[gone]
        tensors[bent] = torch.zeros(5, 3)
        tensors["model.layers.3.input_layernorm.weight"] = torch.zeros(64)
        tensors["lm_head.weight"] = torch.zeros(300, 64, dtype=torch.int8)

    rewrite(path, change)
    message = refusal(path)
    assert f"1 missing: {gone}" in message
    assert f"1 misshaped: {bent} [5, 3] instead of [32, 64]" in message
    assert "1 surplus: model.layers.3.input_layernorm.weight" in message
    assert "lm_head.weight I8" in message


def test_long_lists_are_cut(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path)
    rewrite(path, lambda tensors: [tensors.pop(n) for n in list(tensors) if "down_proj" in n])
    assert "24 missing" in refusal(path) and "and 4 more" in refusal(path)


def test_tied_head_may_be_repeated_but_not_differ(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path, tie_word_embeddings=True)
    rewrite(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load_rank(path)
    rewrite(path, lambda t: t["lm_head.weight"].add_(1))
    assert "lm_head.weight differs from model.embed_tokens.weight" in refusal(path)


def test_broken_files_are_named(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path / "model", num_shards=2)
    second = path / "model-00002-of-00002.safetensors"
    content = second.read_bytes()
    for broken in (content[:-100], content[:50], b"", b"\xff" * 64):
        second.write_bytes(broken)
        assert str(second) in refusal(path)
    second.unlink()
    assert f"files that are not there: {second.name}" in refusal(path)
    index = path / "model.safetensors.index.json"
    shutil.copy(path / "model-00001-of-00002.safetensors", second)
    assert "is in both" in refusal(path)
    for text in ("{", "[]", "{}", '{"weight_map": 3}'):
        index.write_text(text)
        assert str(index) in refusal(path)
    index.write_text(json.dumps({"weight_map": {}}))
    assert "missing" in refusal(path)
    index.unlink()
    assert "neither model.safetensors nor" in refusal(path)


def test_parameters_are_told_without_torch() -> None:
    """A configuration check tells the memory of a model without importing torch."""
    import subprocess
    import sys

    code = "import sys, workers.weights.tensors; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
