"""FP8 checkpoints of compressed-tensors, and FP8 with one scale a tensor."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoints.writer import QUANTIZATIONS
from tests.unit.model_case import OneRank, make_batch, small_checkpoint
from tests.unit.test_fp8_checkpoint import Fp8Gemm
from workers.models.registry import load_model_config
from workers.specs.quantization import parse_quantization
from workers.weights.loader import CheckpointError
from workers.weights.tensors import stores_fp8_experts

torch.set_num_threads(1)
FILE = "model.safetensors"
SHAPE: dict[str, Any] = {"hidden_size": 256, "moe_intermediate_size": 128, "num_layers": 2}
PROMPTS = make_batch([[1, 2, 3, 4], [200, 100]], [0, 0])
FORMS = ["fp8-tensor", "compressed-tensor", "compressed-channel", "compressed-block"]
# As llm-compressor 0.8 and newer writes it for a model with experts.
PUBLISHED: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "format": "float-quantized",
            "input_activations": {
                "actorder": None, "block_structure": None, "dynamic": True, "group_size": None, "num_bits": 8,
                "observer": None, "observer_kwargs": {}, "strategy": "token", "symmetric": True, "type": "float",
            },
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
                "observer": "minmax", "observer_kwargs": {}, "strategy": "channel", "symmetric": True,
                "type": "float",
            },
        }
    },
    "format": "float-quantized",
    "global_compression_ratio": None,
    "ignore": ["model.layers.0.mlp.gate", "re:.*self_attn.*", "lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.12.2",
}  # fmt: skip


def multiplied_out(path: Path, suffix: str) -> Path:
    """The same model without quantisation."""
    tensors = load_file(path / FILE)
    plain = {
        name: tensor for name, tensor in tensors.items() if not name.endswith("_scale" + suffix)
    }
    for name in list(plain):
        scales = tensors.get(f"{name}_scale{suffix}")
        if scales is not None:
            values = plain[name].float()
            if scales.numel() > 1 and scales.shape[0] != len(values):
                scales = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
            plain[name] = (
                values * scales.view(-1, 1)
                if scales.dim() < 2
                else values * scales[: len(values), : values.shape[1]]
            )
    folder = small_checkpoint(path.with_name("plain"), **SHAPE)
    save_file(plain, folder / FILE)
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_values_times_scales(tmp_path: Path, form: str) -> None:
    path = small_checkpoint(tmp_path / "fp8", quantization=form, **SHAPE)
    stored = load_file(path / FILE)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    shape = {"tensor": (1,), "channel": (128, 1), "block": (1, 2)}[form.split("-")[1]]
    assert stored[name].dtype == torch.float8_e4m3fn and stored[f"{name}_scale"].shape == shape
    plain = multiplied_out(path, "")
    assert torch.equal(OneRank(path).logits(PROMPTS), OneRank(plain).logits(PROMPTS))
    near = OneRank(small_checkpoint(tmp_path / "exact", **SHAPE)).logits(PROMPTS)
    assert not torch.equal(OneRank(path).logits(PROMPTS), near)


@pytest.mark.parametrize("form", FORMS)
def test_experts_stay_in_fp8_where_blocks_hold_them_exactly(tmp_path: Path, form: str) -> None:
    path = small_checkpoint(tmp_path, quantization=form, **SHAPE)
    exact = stores_fp8_experts(load_model_config(path))
    assert exact == (form != "compressed-channel")
    held = OneRank(path, grouped_gemm=Fp8Gemm()).logits(PROMPTS)
    expected = OneRank(path).logits(PROMPTS)
    tolerance = 1e-5 if exact else 0.5  # rows of one block have scales of their own: rounded again
    torch.testing.assert_close(held, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_scales_of_activations_are_not_read(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Checkpoints with static activations hold them; in other checkpoints they are surplus."""
    path = small_checkpoint(tmp_path, quantization="fp8-tensor", **SHAPE)
    expected = OneRank(path).logits(PROMPTS)
    tensors = load_file(path / FILE)
    for name in [name for name in tensors if name.endswith("_scale")]:
        tensors[name] = tensors[name].view(shape)
        tensors[name.replace("weight_scale", "input_scale")] = torch.full(shape, 3.0)
    save_file(tensors, path / FILE)
    with pytest.raises(CheckpointError, match=r"surplus: .*input_scale"):
        OneRank(path)
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= {"activation_scheme": "static", "ignored_layers": ["lm_head"]}
    (path / "config.json").write_text(json.dumps(config))
    assert torch.equal(OneRank(path).logits(PROMPTS), expected)


def test_groups_and_ignored_modules() -> None:
    weights = PUBLISHED["config_groups"]["group_0"]["weights"]
    groups = {
        "rest": {"targets": ["Linear"], "weights": weights},
        "blocks": {  # its names come before the class of the group before
            "targets": [r"re:.*experts\.\d+\.(gate|up)_proj$"],
            "weights": weights | {"strategy": "block", "block_structure": [128, 128]},
        },
    }
    problems: list[str] = []
    found = parse_quantization(
        {"quantization_config": PUBLISHED | {"config_groups": groups}}, problems
    )
    assert found is not None and not problems
    forms = {
        "model.layers.1.self_attn.q_proj": None,
        "model.layers.0.mlp.gate": None,
        "model.layers.0.mlp.gate_proj": "channel",
        "model.layers.10.mlp.experts.3.down_proj": "channel",
        "model.layers.10.mlp.experts.3.up_proj": "block",
        "lm_head": None,
    }
    assert {
        name: form and form.scaling
        for name in forms
        if (form := found.form(f"{name}.weight")) or True
    } == forms


def test_the_first_group_that_names_a_module_decides() -> None:
    weights = PUBLISHED["config_groups"]["group_0"]["weights"]

    def form(module: str, *targets: str) -> str | None:
        strategies = ("channel", "tensor")
        groups = {
            strategy: {"targets": [target], "weights": weights | {"strategy": strategy}}
            for strategy, target in zip(strategies, targets, strict=True)
        }
        config = PUBLISHED | {"config_groups": groups, "ignore": []}
        problems: list[str] = []
        found = parse_quantization({"quantization_config": config}, problems)
        assert found is not None and not problems
        stored = found.form(f"{module}.weight")
        return stored and stored.scaling

    assert form("a.up_proj", "Linear", "Linear") == "channel"
    assert form("a.up_proj", "re:.*up_proj", "re:a.*") == "channel"
    assert form("a.up_proj", "re:.*down_proj", "Linear") == "tensor"
    assert form("a.up_proj", "re:.*down_proj", "re:b.*") is None, "no group has it"


def test_modules_that_match_are_read_unquantised(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path, quantization_config=PUBLISHED, fp8=True, **SHAPE)
    stored = load_file(path / FILE)
    assert stored["model.layers.1.self_attn.q_proj.weight"].dtype == torch.float32
    assert stored["model.layers.1.mlp.experts.0.up_proj.weight"].dtype == torch.float8_e4m3fn
    assert OneRank(path).logits(PROMPTS).isfinite().all()


@pytest.mark.parametrize(
    ("changes", "weights", "words"),
    [
        ({"format": "int-quantized"}, {}, [".format is 'int-quantized'", "float-quantized"]),
        ({"kv_cache_scheme": {"num_bits": 8}}, {}, [".kv_cache_scheme is", "null"]),
        ({"config_groups": {}}, {}, [".config_groups is {}", "a group or more"]),
        (
            {"config_groups": {"g": {"targets": ["Linear"]}}},
            {},
            [".config_groups.g.weights is None"],
        ),
        ({"ignore": "lm_head"}, {}, [".ignore is 'lm_head'", "list"]),
        ({"ignore": ["re:*"]}, {}, [".ignore holds 're:*'", "no regular expression"]),
        ({"bits": 4}, {}, [".bits is 4", "unknown key"]),
        ({}, {"num_bits": 2}, [".group_0.weights.num_bits is 2", "supported: 8"]),
        ({}, {"num_bits": 4}, [".group_0 has 4 bits in the format 'float-quantized'", "pack-"]),
        ({}, {"type": "int"}, [".weights.type is 'int'", "float"]),
        ({}, {"symmetric": False}, [".weights.symmetric is False"]),
        ({}, {"strategy": "group"}, [".weights.strategy is 'group'", "tensor or channel or block"]),
        ({}, {"strategy": "block", "block_structure": [64, 64]}, [".block_structure is [64, 64]"]),
        ({}, {"zero_point": 1}, [".weights.zero_point is 1", "unknown key"]),
    ],
)
def test_what_is_not_supported_is_named(
    changes: dict[str, Any], weights: dict[str, Any], words: list[str]
) -> None:
    config = json.loads(json.dumps(PUBLISHED)) | changes
    if weights:
        config["config_groups"]["group_0"]["weights"] |= weights
    problems: list[str] = []
    parse_quantization({"quantization_config": config}, problems)
    assert all(word in "; ".join(problems) for word in ["quantization_config", *words]), problems


def test_other_formats_are_refused() -> None:
    problems: list[str] = []
    parse_quantization({"quantization_config": {"quant_method": "hqq"}}, problems)
    assert "'hqq'" in problems[0] and "fp8, compressed-tensors" in problems[0]


def test_every_written_form_is_read_without_complaint() -> None:
    for name, config in QUANTIZATIONS.items():
        if name == "mxfp4":
            continue  # read by its family alone
        problems: list[str] = []
        assert parse_quantization({"quantization_config": config}, problems) and not problems
