"""Checkpoints of NVIDIA ModelOpt: FP8 is read, other formats are refused by name; scales of cached K and V."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.model_case import OneRank, make_batch, small_checkpoint
from tests.unit.test_compressed_tensors import PUBLISHED as COMPRESSED
from tests.unit.test_quantised_files import expect_logits
from workers.models.config_reader import ModelConfigError
from workers.models.registry import load_model_config
from workers.specs.quantization import parse_quantization
from workers.weights.checkpoint_files import CheckpointError
from workers.weights.tensors import stores_fp8_experts

FILE, QUANT_FILE = "model.safetensors", "hf_quant_config.json"
SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 256, "moe_intermediate_size": 128}
# As ModelOpt summarises modules: prefixes with *, and whole names.
EXCLUDED = ["lm_head", "model.layers.0.self_attn*", "model.layers.*.mlp.gate"]
PRODUCER = {"name": "modelopt", "version": "0.39.0"}
# hf_quant_config.json; older versions of ModelOpt write nothing to config.json.
OLD: dict[str, Any] = {
    "producer": PRODUCER,
    "quantization": {
        "quant_algo": "FP8",
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": EXCLUDED,
    },
}
NEW: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
            "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
            "targets": ["Linear"],
        }
    },
    "ignore": EXCLUDED,
    "quant_algo": "FP8",
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": PRODUCER,
    "quant_method": "modelopt",
}


def export(path: Path, *, rows: bool = False) -> dict[str, torch.Tensor]:
    """Store projections as ModelOpt does, with scales of activations and of the cache; return what they stand for."""
    tensors = load_file(path / FILE)
    expected, saved = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        kept = "layers.0.self_attn" in name or name.endswith("mlp.gate.weight")
        if "_proj." not in name or kept:
            continue
        amax = tensor.abs().amax(1, keepdim=True) if rows else tensor.abs().amax()
        scale = amax / 448
        saved[name] = (tensor / scale).to(torch.float8_e4m3fn)
        expected[name] = saved[name].float() * scale
        saved[f"{name}_scale"] = scale.flatten() if rows else scale
        if not rows:
            saved[name.replace("weight", "input_scale")] = torch.tensor(0.02)
    for layer in range(2):
        for part in "kv":
            at = f"model.layers.{layer}.self_attn.{part}_proj.{part}_scale"
            saved[at] = torch.tensor(1.0)
    save_file(saved, path / FILE, metadata={"format": "pt"})
    return expected


def describe(path: Path, config: dict[str, Any] | None, file: dict[str, Any] | None) -> None:
    raw = json.loads((path / "config.json").read_text())
    if config is not None:
        raw["quantization_config"] = config
    (path / "config.json").write_text(json.dumps(raw))
    if file is not None:
        (path / QUANT_FILE).write_text(json.dumps(file))


@pytest.mark.parametrize(
    ("config", "file"), [(NEW, OLD), (None, OLD), (NEW, None)], ids=["both", "old", "new"]
)
def test_fp8_of_modelopt(
    tmp_path: Path, config: dict[str, Any] | None, file: dict[str, Any] | None
) -> None:
    path = small_checkpoint(tmp_path / "fp8", **SHAPE)
    expected = export(path)
    describe(path, config, file)
    assert stores_fp8_experts(load_model_config(path))
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({"quantization_config": None} | raw))
    expect_logits(path, expected)


def test_fp8_of_modelopt_with_a_scale_a_row(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path / "fp8", **SHAPE)
    expected = export(path, rows=True)
    describe(path, NEW | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "config_groups": None}, None)
    expect_logits(path, expected)


def test_a_cache_that_alone_is_quantised(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path / "cache", **SHAPE)
    before = OneRank(path).logits(make_batch([[1, 2, 3]], [0]))
    scales = {"model.layers.0.self_attn.k_proj.k_scale": torch.tensor(2.0)}
    save_file(load_file(path / FILE) | scales, path / FILE)
    with pytest.raises(CheckpointError, match=r"surplus: .*k_scale"):
        OneRank(path)
    describe(path, None, {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}})
    assert torch.equal(OneRank(path).logits(make_batch([[1, 2, 3]], [0])), before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_algo": "NVFP4"}, "quant_algo is 'NVFP4', a format of ModelOpt; supported: FP8"),
        ({"quant_algo": "W4A8_AWQ"}, "quant_algo is 'W4A8_AWQ'"),
        ({"quant_algo": ["FP8"]}, r"quant_algo is \['FP8'\]"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "NVFP4"}}},
            "quant_algo is 'MIXED_PRECISION'",
        ),
        ({"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo is 'NVFP4'; supported: FP8"),
        ({"group_size": 16}, "group_size is 16; unknown key"),
        ({"exclude_modules": "lm_head"}, "exclude_modules is 'lm_head'; expected a list"),
    ],
)
def test_other_formats_are_refused_by_name_before_files_are_read(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = small_checkpoint(tmp_path, weights=False, **SHAPE)
    describe(path, None, OLD | {"quantization": OLD["quantization"] | changes})
    where = rf"config\.json with {QUANT_FILE}: quantization_config\."
    with pytest.raises(ModelConfigError, match=where + message):
        load_model_config(path)


def test_descriptions_of_two_formats_are_refused(tmp_path: Path) -> None:
    """FP8 in blocks has a name of TensorRT-LLM in the second file; config.json decides."""
    path = small_checkpoint(tmp_path, weights=False, fp8=True, **SHAPE)
    for algorithm in ("NVFP4", "FP8_BLOCK_SCALES"):
        (path / QUANT_FILE).write_text(json.dumps({"quantization": {"quant_algo": algorithm}}))
        if algorithm == "NVFP4":
            with pytest.raises(ModelConfigError, match=r"quant_method is 'fp8', but .* 'NVFP4'"):
                load_model_config(path)
        else:
            assert load_model_config(path).quantization is not None


@pytest.mark.parametrize("bits", [{"num_bits": 4, "type": "float", "group_size": 16}, None])
def test_groups_of_other_weights_are_refused(bits: dict[str, Any] | None) -> None:
    problems: list[str] = []
    groups = {"group_0": {"targets": ["Linear"], "weights": bits}}
    parse_quantization({"quantization_config": NEW | {"config_groups": groups}}, problems)
    assert len(problems) == 1 and ".config_groups.group_0.weights is" in problems[0]


def test_quantised_tensors_without_a_quantization_config(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path, **SHAPE)
    export(path)
    with pytest.raises(CheckpointError, match=r"quantised .* F8_E4M3.* no quantization_config"):
        OneRank(path)


def test_excluded_modules() -> None:
    problems: list[str] = []
    names = ["model.layers.1.mlp", "*shared_expert*", "model.layers.0.self_attn*"]
    found = parse_quantization({"quantization_config": NEW | {"ignore": names}}, problems)
    assert found is not None and not problems
    forms = {
        "model.layers.1.mlp.experts.0.up_proj.weight": False,
        "model.layers.10.mlp.experts.0.up_proj.weight": True,
        "model.layers.2.mlp.shared_expert.up_proj.weight": False,
        "model.layers.0.self_attn.q_proj.weight": False,
        "model.layers.1.self_attn.q_proj.weight": True,
    }
    assert {name: found.form(name) is not None for name in forms} == forms


CACHE: dict[str, Any] = {
    "num_bits": 8,
    "type": "float",
    "strategy": "tensor",
    "symmetric": True,
    "dynamic": False,
}


@pytest.mark.parametrize("names", ["self_attn.{}_scale", "self_attn.{0}_proj.output_scale"])
def test_cache_scales_of_compressed_tensors_are_not_read(tmp_path: Path, names: str) -> None:
    path = small_checkpoint(tmp_path, quantization="compressed-tensor", **SHAPE)
    before = OneRank(path).logits(make_batch([[1, 2, 3]], [0]))
    scales = {
        f"model.layers.{layer}.{names.format(part)}": torch.tensor([0.1])
        for part in "kv"
        for layer in range(2)
    }
    save_file(load_file(path / FILE) | scales, path / FILE)
    with pytest.raises(CheckpointError, match="4 surplus"):
        OneRank(path)
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"]["kv_cache_scheme"] = CACHE
    (path / "config.json").write_text(json.dumps(raw))
    assert torch.equal(OneRank(path).logits(make_batch([[1, 2, 3]], [0])), before)


@pytest.mark.parametrize(
    ("form", "weights"),
    [
        (
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        ),
        (
            "mxfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
        ),
    ],
)
def test_four_bit_floats_of_compressed_tensors_are_refused_by_name(
    form: str, weights: dict[str, Any]
) -> None:
    group = COMPRESSED["config_groups"]["group_0"]
    group = group | {"format": form, "weights": group["weights"] | weights}
    config = COMPRESSED | {"format": form, "config_groups": {"group_0": group}}
    problems: list[str] = []
    parse_quantization({"quantization_config": config}, problems)
    text = "; ".join(problems)
    for words in (f".format is '{form}'", f"has 4 bits in the format '{form}'", ".type is 'float'"):
        assert words in text
