"""Logits with adapters equal those of the model into which the adapter is merged, in every family's products."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.grouped_gemm.native_four_bit import NativeFourBit
from tests.adapter_case import (
    add_embeddings,
    chosen,
    make_adapter,
    make_fused_adapter,
    merge,
    merge_embeddings,
    merge_fused,
    weight_shapes,
)
from tests.checkpoints.families import names_of
from tests.unit.model_case import SMALL, OneRank, make_batch, small_checkpoint
from tests.unit.test_model_logits import random_ids
from workers.adapters.layout import AdapterLayout
from workers.adapters.peft_folder import PeftFolder
from workers.adapters.pools import AdapterPools
from workers.lora_config import AdapterError, LoraConfig
from workers.models.registry import load_model_config
from workers.rank.backend_choice import four_bit_experts

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
        ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    ),
    "deepseek_v3": (
        {"num_kv_heads": None},
        (
            *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
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


def rank_with(
    checkpoint: Path, adapters: list[Path], lora: LoraConfig = LORA, **options: Any
) -> OneRank:
    """A model with these adapters in its slots, from 1 on."""
    rank = OneRank(checkpoint, **options)
    layout = AdapterLayout.of(rank.config, lora, range(rank.config.num_experts))
    pools = AdapterPools(layout, lora.max_loras, device=torch.device("cpu"), dtype=rank.model.dtype)
    pools.attach(rank.model)
    for slot, folder in enumerate(adapters, start=1):
        pools.write(slot, pools.stage(PeftFolder.read(folder)), 0)
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
    # Rows of other experts beside it may change the order of sums.
    torch.testing.assert_close(base[1], found[1], atol=1e-5, rtol=0)
    changed = (base - found).abs().amax(1) > 1e-4
    lens = torch.tensor([len(ids) for ids in sequences])
    assert torch.equal(changed, torch.tensor(slots).repeat_interleave(lens) > 0)


EXPERTS = LoraConfig(max_loras=3, max_rank=6, targets=["attention", "mlp", "experts"])
SINGLES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "qwen3_moe": ({}, ("q_proj", *MLP)),
    "mixtral": ({}, ("w1", "w2", "w3")),
    "deepseek_v3": ({"num_kv_heads": None}, MLP),  # dense MLPs and shared experts too
}


@pytest.mark.parametrize("family", SINGLES)
def test_adapters_of_single_experts(tmp_path: Path, family: str) -> None:
    """Of all experts, of one expert alone, and of some products of some experts."""
    fields, endings = SINGLES[family]
    absent = {name: None for name in SMALL if names_of(family).get(name, name) is None}
    checkpoint = small_checkpoint(tmp_path / "base", family=family, **absent, **fields)
    modules = chosen(weight_shapes(checkpoint), endings)
    some = {name: it for number, (name, it) in enumerate(modules.items()) if number % 3}
    adapters = [
        make_adapter(tmp_path / "a", modules, rank=4),
        make_adapter(tmp_path / "b", {n: it for n, it in modules.items() if ".3." in n}, seed=1),
        make_adapter(tmp_path / "c", some, rank=6, seed=2, use_rslora=True),
    ]
    assert_equals_merged(tmp_path, checkpoint, adapters, merge)


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("family", "width"),
    [("qwen3_moe", 40), ("qwen3_moe", 32), ("gpt_oss", 48), ("gpt_oss", 64)],
)
def test_adapters_of_fused_experts(tmp_path: Path, family: str, width: int, swapped: bool) -> None:
    """`target_parameters`, in both orders of PEFT, which square matrices do not show: width 32 gate and up, 64 down.

    gpt-oss has columns before rows, and gate and up in turn.
    """
    absent = {name: None for name in SMALL if names_of(family).get(name, name) is None}
    checkpoint = small_checkpoint(
        tmp_path / "base", family=family, **absent | {"moe_intermediate_size": width}
    )
    layers = {f"model.layers.{number}.mlp.experts": (8, width, 64) for number in (0, 2)}
    make = partial(make_fused_adapter, layers=layers, swapped=swapped)
    adapters = [make(tmp_path / f"{seed}", rank=seed, seed=seed) for seed in (1, 2, 3)]
    assert_equals_merged(tmp_path, checkpoint, adapters, partial(merge_fused, swapped=swapped))


@pytest.mark.parametrize("quantization", ["int4-zeros", "gptq-ordered", "awq", "mxfp4"])
def test_adapters_beside_experts_in_four_bits(tmp_path: Path, quantization: str) -> None:
    """Adapters name the modules of packed weights as those of others; compared with weights in float32."""
    family = "gpt_oss" if quantization == "mxfp4" else "qwen3_moe"
    absent = {name: None for name in SMALL if names_of(family).get(name, name) is None}
    sizes = {"hidden_size": 128, "moe_intermediate_size": 192, **absent}
    checkpoint = small_checkpoint(
        tmp_path / "base", family=family, quantization=quantization, **sizes
    )
    layers = {f"model.layers.{number}.mlp.experts": (8, 192, 128) for number in (0, 2)}
    adapters = []
    for seed in (1, 2, 3):
        if family == "gpt_oss":
            made = make_fused_adapter(
                tmp_path / f"{seed}", layers, swapped=False, rank=seed, seed=seed
            )
        else:
            modules = {
                f"{name}.{expert}.{part}": (128, 192) if part == "down_proj" else (192, 128)
                for name in layers
                for expert in range(8)
                for part in MLP
            }
            modules |= {"model.layers.1.self_attn.o_proj": (128, 64)}
            made = make_adapter(tmp_path / f"{seed}", modules, rank=seed, seed=seed)
        adapters.append(made)
    form = four_bit_experts(load_model_config(checkpoint))
    assert form is not None
    sequences, slots = random_ids(1, 1, 1, 9, 2, 5), [3, 0, 1, 2, 1]
    packed = rank_with(checkpoint, adapters, EXPERTS, grouped_gemm=NativeFourBit(form))
    wide = rank_with(checkpoint, adapters, EXPERTS)
    found, expected = (logits_of(rank, sequences, slots) for rank in (packed, wide))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    base = logits_of(packed, sequences)
    lens = torch.tensor([len(ids) for ids in sequences])
    changed = (found - base).abs().amax(1) > 1e-3
    assert torch.equal(changed, torch.tensor(slots).repeat_interleave(lens) > 0)


@pytest.mark.parametrize("tied", [False, True])
def test_adapters_of_embedding_and_head(tmp_path: Path, tied: bool) -> None:
    """Also where the head is the embedding: then the adapter of each changes the one and not the other."""
    checkpoint = small_checkpoint(tmp_path / "base", tie_word_embeddings=tied)
    modules = chosen(weight_shapes(checkpoint), ("q_proj",))
    table = SMALL["vocab_size"], SMALL["hidden_size"]
    adapters = []
    for seed in (1, 2, 3):
        adapters.append(make_adapter(tmp_path / f"{seed}", modules, rank=1 + seed, seed=seed))
        add_embeddings(adapters[-1], *table, seed=seed, bases=seed == 2)
    lora = EXPERTS.model_copy(update={"targets": ["attention", "embeddings"]})
    assert_equals_merged(tmp_path, checkpoint, adapters, merge_embeddings, lora)
    add_embeddings(adapters[0], 301, table[1], bases=True)
    with pytest.raises(AdapterError, match=r"is \[301, 64\], the model has \[300, 64\]"):
        rank_with(checkpoint, adapters, lora)
    with pytest.raises(AdapterError, match=r"; add embeddings to lora.targets"):
        rank_with(checkpoint, adapters[1:], LORA)


def assert_equals_merged(
    folder: Path,
    checkpoint: Path,
    adapters: list[Path],
    make_merged: Callable[..., Path],
    lora: LoraConfig = EXPERTS,
) -> None:
    """Sequences of three adapters and of none in one batch."""
    sequences, slots = random_ids(1, 1, 1, 9, 2, 5), [3, 0, 1, 2, 1]
    rank = rank_with(checkpoint, adapters, lora)
    found = logits_of(rank, sequences, slots).split([len(ids) for ids in sequences])
    models = [
        checkpoint,
        *(make_merged(checkpoint, it, folder / f"merged-{it.name}") for it in adapters),
    ]
    merged = {slot: OneRank(models[slot]) for slot in set(slots)}
    base = logits_of(rank, sequences).split([len(ids) for ids in sequences])
    for ids, slot, row, plain in zip(sequences, slots, found, base, strict=True):
        torch.testing.assert_close(row, logits_of(merged[slot], [ids]), atol=1e-4, rtol=0)
        assert slot == 0 or (row - plain).abs().max() > 1e-4
