"""Delta nets of FP8 checkpoints in every layout: what stays in FP8, with which values, and what is multiplied out.

Dense products are replaced by torch, as in test_dense_fp8.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.block_fp8 import BlockWeights, dequantise
from kernels.routing.expert_map import ContiguousMap
from tests.unit.model_case import OneRank, make_batch
from tests.unit.test_dense_fp8 import DenseFp8Gemm, checkpoint, in_torch
from tests.unit.test_fp8_checkpoint import FILE, SCALE, Fp8Gemm, rewrite
from workers.models.registry import load_model_config
from workers.weights.initial_weights import draw_weights
from workers.weights.tensors import fp8_not_kept, fp8_parameters

__all__ = ["in_torch"]
torch.set_num_threads(1)
PROMPTS = make_batch([[1, 2, 3, 4], [200, 100]], [0, 0])
DECODES = make_batch([[7], [9]], [4, 2])
FAMILIES = {  # and where the names of a layer's delta net begin
    "qwen3_next": "model.layers.0.linear_attn.",
    "qwen3_5_moe": "model.language_model.layers.0.linear_attn.",
}
KEPT = {"attention.qkvz.weight", "attention.out.weight"}
ATTENTION = {"attention.qkv.weight", "attention.o.weight"}  # of the layer with full attention


def quantised(*skipped: str) -> dict[str, Any]:
    """A `quantization_config` that leaves out these modules."""
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", *skipped],
    }


def attention_parameters(path: Path) -> set[str]:
    """The parameters of attention and delta nets in FP8, without their layers."""
    names = fp8_parameters(load_model_config(path))
    return {name.split(".", 2)[2] for name in names if "attention" in name}


def logits(model: OneRank) -> torch.Tensor:
    """Logits of prompts, then of decodes that go on from their states."""
    return torch.cat([model.logits(PROMPTS), model.logits(DECODES)])


def check_logits(path: Path) -> OneRank:
    """Compare the model in FP8 with its weights multiplied out."""
    model = OneRank(path, grouped_gemm=DenseFp8Gemm())
    plain = OneRank(path, grouped_gemm=Fp8Gemm())
    torch.testing.assert_close(logits(model), logits(plain), atol=5e-4, rtol=5e-4)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_published_layouts_stay_in_fp8(tmp_path: Path, family: str) -> None:
    """Full names of modules are left out, and scales are bfloat16."""
    small = ["ba"] if family == "qwen3_next" else ["a", "b"]
    skipped = [f"{FAMILIES[family]}in_proj_{name}" for name in small]
    skipped += [f"{FAMILIES[family]}{name}" for name in ("conv1d", "norm", "A_log")]
    path = checkpoint(tmp_path, family, quantization_config=quantised(*skipped))
    scales = {name for name in load_file(path / FILE) if name.endswith(SCALE)}
    rewrite(path, lambda t: t.update({name: t[name].bfloat16() for name in scales}))
    assert attention_parameters(path) == KEPT | ATTENTION
    layer = check_logits(path).model.layers[0].attention
    assert layer.inputs is None and layer.ba.weight.shape == (8, 256)


def test_a_text_part_alone_names_its_modules_without_the_outer_model(tmp_path: Path) -> None:
    """As transformers saves it; the weight map has the names of whole releases."""
    skipped = [
        f"model.layers.{layer}.linear_attn.in_proj_{name}" for layer in (0, 1) for name in "ab"
    ]
    path = checkpoint(tmp_path, "qwen3_5_moe_text", quantization_config=quantised(*skipped))
    tensors = load_file(path / FILE)
    renamed = {name.replace("language_model.", ""): tensor for name, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, path / FILE)
    assert attention_parameters(path) == KEPT | ATTENTION
    check_logits(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_regrouped_with_their_scales(tmp_path: Path, family: str) -> None:
    """q, k, v and output gates of all heads follow each other; no value is rounded again."""
    path = checkpoint(tmp_path, family)
    disk, at = load_file(path / FILE), FAMILIES[family]
    layers = OneRank(path, grouped_gemm=DenseFp8Gemm()).model.layers
    names = ("qkvz",) if family == "qwen3_next" else ("qkv", "z")
    stored = [f"{at}in_proj_{name}.weight" for name in names]
    whole = torch.cat([dequantise(disk[name], disk[name + SCALE]) for name in stored])
    if family == "qwen3_next":  # 2 key heads: q and k of 128 rows, v and gate of 2 * 64
        heads = whole.view(2, 4, 128, 256)
        whole = heads.transpose(0, 1).reshape(whole.shape)
    held = layers[0].attention.qkvz.weight
    assert isinstance(held, BlockWeights)
    assert torch.equal(dequantise(held.values, held.scales), whole)
    gated = at.replace("layers.0.linear_attn.", "layers.1.self_attn.q_proj.weight")
    heads = dequantise(disk[gated], disk[gated + SCALE]).view(4, 2, 128, 256)
    queries, gates = heads[:, 0], heads[:, 1].reshape(-1, 256)
    rotated = queries[:, :32].view(4, 2, 16, 256).transpose(1, 2).reshape(4, 32, 256)
    queries = torch.cat((rotated, queries[:, 32:]), 1).view(-1, 256)
    held = layers[1].attention.qkv.weight
    assert isinstance(held, BlockWeights)
    found = dequantise(held.values, held.scales)[:1024]
    assert torch.equal(found, torch.cat((gates, queries)))


@pytest.mark.parametrize(
    ("family", "skipped", "kept"),
    [
        ("qwen3_5_moe", ["in_proj_z"], {"attention.out.weight"}),
        ("qwen3_5_moe", ["in_proj_qkv", "in_proj_a"], {"attention.out.weight"}),
        ("qwen3_5_moe", ["out_proj"], {"attention.qkvz.weight"}),
        ("qwen3_5_moe", ["linear_attn.in_proj_b"], KEPT),
        ("qwen3_next", ["in_proj_qkvz"], {"attention.out.weight"}),
        ("qwen3_next", [], KEPT),
    ],
)
def test_mixed_checkpoints(tmp_path: Path, family: str, skipped: list[str], kept: set[str]) -> None:
    """a and b may be in FP8 too; what one product computes is in FP8 as a whole or not at all."""
    path = checkpoint(tmp_path, family, quantization_config=quantised(*skipped))
    assert attention_parameters(path) == kept | ATTENTION
    model = check_logits(path)
    layer = model.model.layers[0].attention
    assert (layer.inputs is None) == ("attention.qkvz.weight" in kept)
    partly = {"in_proj_z", "in_proj_qkv"} & set(skipped)
    expected = ["layers.0.attention.qkvz.weight"] if partly else []
    assert fp8_not_kept(model.config) == expected


def test_heads_of_half_a_block_are_multiplied_out(tmp_path: Path) -> None:
    """q and k of a head would share a scale; rows of the halves go to different places."""
    path = checkpoint(tmp_path, "qwen3_next", linear_key_head_dim=64, head_dim=64)
    assert attention_parameters(path) == {"attention.out.weight", "attention.o.weight"}
    model = check_logits(path)
    names = ["layers.0.attention.qkvz.weight", "layers.1.attention.qkv.weight"]
    assert fp8_not_kept(model.config) == names


@pytest.mark.parametrize("family", FAMILIES)
def test_dummy_weights_are_those_of_the_checkpoint(tmp_path: Path, family: str) -> None:
    path = checkpoint(tmp_path, family)
    rank = OneRank(path, grouped_gemm=DenseFp8Gemm())
    expected = rank.logits(PROMPTS)
    for layer in rank.model.layers[:1]:
        layer.attention.qkvz.weight.values.view(torch.uint8).zero_()
        layer.attention.ba.weight.zero_()
    where = {"expert_map": ContiguousMap(8, 1), "rank": 0, "device": torch.device("cpu")}
    draw_weights(rank.model, config=rank.config, **where)
    assert torch.equal(rank.logits(PROMPTS), expected)
