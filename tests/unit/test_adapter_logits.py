"""Logits with adapters equal those of the model into which the adapter is merged, in every family's products."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.adapter_case import chosen, make_adapter, merge, weight_shapes
from tests.checkpoints.families import names_of
from tests.unit.model_case import SMALL, OneRank, make_batch, small_checkpoint
from tests.unit.test_model_logits import random_ids
from workers.adapters.layout import AdapterLayout
from workers.adapters.peft_folder import PeftFolder
from workers.adapters.pools import AdapterPools
from workers.lora_config import LoraConfig

torch.set_num_threads(1)

QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
SHARED = tuple(f"shared_expert.{name}" for name in MLP)
# Fields of a small checkpoint, and the modules that its adapter changes.
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "qwen3_moe": ({"mlp_only_layers": [1]}, (*QKVO, *(f"1.mlp.{name}" for name in MLP))),
    "mixtral": ({}, ("q_proj", "v_proj")),
    "olmoe": ({"clip_qkv": 0.5}, QKVO),
    "qwen2_moe": ({}, (*QKVO, *SHARED)),
    "gpt_oss": ({}, QKVO),
    "deepseek_v2": (
        {
            "num_kv_heads": None,
            "q_lora_rank": None,
            "n_group": None,
            "topk_group": None,
            "topk_method": "greedy",
        },
        ("q_proj", "kv_a_proj_with_mqa", "o_proj"),
    ),
    "deepseek_v3": (
        {"num_kv_heads": None},
        (
            *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
            *(f"0.mlp.{name}" for name in MLP),
            *(f"shared_experts.{name}" for name in MLP),
        ),
    ),
    "qwen3_next": ({}, (*QKVO, "in_proj_qkvz", "in_proj_ba", "out_proj", *SHARED)),
    "qwen3_5_moe": (
        {},
        (*QKVO, *(f"in_proj_{name}" for name in ("qkv", "z", "a", "b")), "out_proj", *SHARED),
    ),
}
LORA = LoraConfig(max_loras=3, max_rank=6)


def rank_with(checkpoint: Path, adapters: list[Path], lora: LoraConfig = LORA) -> OneRank:
    """A model with these adapters in its slots, from 1 on."""
    rank = OneRank(checkpoint)
    layout = AdapterLayout.of(rank.config, lora)
    pools = AdapterPools(layout, lora.max_loras, device=torch.device("cpu"), dtype=rank.model.dtype)
    pools.attach(rank.model)
    for slot, folder in enumerate(adapters, start=1):
        pools.write(slot, pools.stage(PeftFolder.read(folder)))
    return rank


def logits_of(
    rank: OneRank, sequences: list[list[int]], slots: list[int] | None = None
) -> torch.Tensor:
    """float32 [all tokens, V]; `slots` of the sequences."""
    batch = make_batch(sequences, [0] * len(sequences))
    if slots is not None:
        lens = torch.tensor([len(ids) for ids in sequences])
        batch = replace(batch, adapter_slots=torch.tensor(slots).repeat_interleave(lens))
    return rank.logits(batch)


@pytest.mark.parametrize("family", CASES)
def test_logits_equal_those_of_the_merged_model(tmp_path: Path, family: str) -> None:
    """A mix of three adapters, of several ranks and both scalings, and none, in one batch."""
    fields, endings = CASES[family]
    absent = {name: None for name in SMALL if names_of(family).get(name, name) is None}
    checkpoint = small_checkpoint(tmp_path / "base", family=family, **absent, **fields)
    modules = chosen(weight_shapes(checkpoint), endings)
    assert {name for name in endings if any(it.endswith(name) for it in modules)} == {*endings}
    last = dict([next(it for it in modules.items() if it[0].endswith(endings[-1]))])
    adapters = [
        make_adapter(tmp_path / "a", modules, rank=4),
        make_adapter(tmp_path / "b", modules, rank=6, seed=1, use_rslora=True, alpha=3),
        make_adapter(tmp_path / "c", last, rank=1, seed=2, alpha=12),
    ]
    sequences, slots = random_ids(1, 1, 1, 9, 2, 5), [3, 0, 1, 2, 1]
    rank = rank_with(checkpoint, adapters)
    found = logits_of(rank, sequences, slots)
    models = [
        checkpoint,
        *(merge(checkpoint, it, tmp_path / f"merged-{it.name}") for it in adapters),
    ]
    merged = {slot: OneRank(models[slot]) for slot in set(slots)}
    rows = found.split([len(ids) for ids in sequences])
    for ids, slot, row in zip(sequences, slots, rows, strict=True):
        expected = logits_of(merged[slot], [ids])
        torch.testing.assert_close(row, expected, atol=1e-4, rtol=0)
    base = logits_of(rank, sequences)
    torch.testing.assert_close(base[1], found[1], atol=0, rtol=0)
    changed = (base - found).abs().amax(1) > 1e-4
    lens = torch.tensor([len(ids) for ids in sequences])
    assert torch.equal(changed, torch.tensor(slots).repeat_interleave(lens) > 0)
