"""Heads for multi-token prediction beside quantised models, as releases and tools write them.

Logits of a head are compared with those of transformers' modules in float32 that have the values of the checkpoint.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.block_fp8 import BlockWeights
from tests.checkpoints.four_bit import FOUR_BITS
from tests.draft_reference import QwenMtp, TransformersMtp, draft_logits
from tests.family_cases import family_checkpoint
from tests.unit.draft_case import OneRankDraft
from tests.unit.test_quantised_files import FP8, FP8_CONFIGS, fp8_of, widened
from workers.config import ModelSection
from workers.models.draft_config import load_draft_config
from workers.models.registry import load_model_config
from workers.specs.model import weight_map
from workers.speculation_config import SpeculationConfig
from workers.weights.checkpoint_files import find_files, tensor_names
from workers.weights.loader import Checkpoint
from workers.weights.slots import BlockSlot

FILE = "model.safetensors"
PROMPT, NEXT, DEPTH = [5, 6, 7, 8, 200, 13], 17, 3
# The head of Qwen's releases in FP8, of which modules_to_not_convert names what stays in 16 bits.
QWEN_RULES = ["lm_head", "mtp.fc", "mtp.layers.0.mlp.gate", "mtp.layers.0.mlp.shared_expert_gate"]
# GLM-4.7-FP8 of compressed-tensors: a scale a row, and the projection of the head's inputs in `ignore`.
GLM: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "float",
                "strategy": "channel",
                "symmetric": True,
                "dynamic": False,
            },
            "input_activations": {"num_bits": 8, "type": "float", "dynamic": True},
        }
    },
    "ignore": ["lm_head", "re:.*mlp.gate$", "model.layers.3.eh_proj", "model.layers.3.shared_head"],
}
AWQ = FOUR_BITS["awq"]
CASES = {
    "deepseek-fp8": ("deepseek_v3", FP8),
    "glm-compressed": ("glm4_moe", GLM),
    "qwen-fp8": ("qwen3_next", FP8 | {"modules_to_not_convert": QWEN_RULES}),
    "qwen-fp8-without-head": ("qwen3_next", FP8 | {"modules_to_not_convert": ["lm_head", "mtp"]}),
    "qwen-awq": ("qwen3_next", AWQ),
    "glm-awq": ("glm4_moe", AWQ),
}


SIZES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_nextn_predict_layers": 1, "num_experts": 8},
    "glm4_moe": {
        "num_nextn_predict_layers": 1,
        "num_experts": 8,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
    },
    "qwen3_5_moe": {
        "num_experts": 8,
        "num_kv_heads": 2,
        "shared_expert_intermediate_size": 64,
        "linear_num_value_heads": 8,
        "expert_layout": "apart",
    },
    "qwen3_next": {"num_experts": 8, "num_kv_heads": 2, "shared_expert_intermediate_size": 64},
}


def quantised(path: Path, family: str, config: dict[str, Any]) -> Path:
    return family_checkpoint(
        path, family, "untied", mtp=True, quantization_config=config, **SIZES[family]
    )


def values_of(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return what the tensors of a checkpoint stand for."""
    if config["quant_method"] == "awq":
        return widened(tensors, config)
    found = {}
    for name, tensor in tensors.items():
        scales = tensors.get(f"{name}_scale_inv", tensors.get(f"{name}_scale"))
        if scales is not None:
            rows, columns = tensor.shape
            if f"{name}_scale_inv" in tensors:
                scales = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)
                scales = scales[:, :columns]
            tensor = tensor.float() * scales
        if not name.endswith(("_scale_inv", "_scale")):
            found[name] = tensor
    return found


def check(path: Path, family: str, values: dict[str, torch.Tensor]) -> None:
    """Compare the head with that of transformers with `values` and no quantisation."""
    plain = path.parent / "plain"
    plain.mkdir()
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    copies = {name: value.float().contiguous().clone() for name, value in values.items()}
    save_file(copies, plain / FILE, metadata={"format": "pt"})
    reference = QwenMtp(plain) if family.startswith("qwen") else TransformersMtp(plain)
    expected = draft_logits(reference, PROMPT, NEXT, DEPTH)
    for found, wanted in zip(
        OneRankDraft(path).logits([PROMPT], [NEXT], DEPTH), expected, strict=True
    ):
        torch.testing.assert_close(found[0], wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_heads_of_quantised_releases(tmp_path: Path, case: str) -> None:
    family, config = CASES[case]
    path = quantised(tmp_path, family, config)
    tensors = load_file(path / FILE)
    head = "mtp." if family == "qwen3_next" else "model.layers.3."
    packed = any(name.startswith(head) and "scale" in name for name in tensors)
    assert packed == (case != "qwen-fp8-without-head")
    check(path, family, values_of(tensors, config))


@pytest.mark.parametrize("case", ["deepseek-fp8", "glm-compressed", "qwen-fp8", "qwen-awq"])
def test_a_head_in_16_bits_without_a_rule(tmp_path: Path, case: str) -> None:
    """Tools that load a model without its head copy the head as it was, and their config.json has no rule for it."""
    family, config = CASES[case]
    path = quantised(tmp_path, family, config)
    tensors = load_file(path / FILE)
    head = "mtp." if family == "qwen3_next" else "model.layers.3."
    values = values_of(tensors, config)
    stored = {name: tensor for name, tensor in tensors.items() if not name.startswith(head)}
    copied = {name: value for name, value in values.items() if name.startswith(head)}
    save_file(
        stored | {name: value.contiguous() for name, value in copied.items()},
        path / FILE,
        metadata={"format": "pt"},
    )
    check(path, family, values)


@pytest.mark.parametrize("case", ["deepseek-fp8", "glm-compressed", "qwen-tensor", "glm-awq"])
def test_a_projection_of_the_heads_inputs_that_is_quantised_too(tmp_path: Path, case: str) -> None:
    """Releases keep it in 16 bits; tools that load the head as one more layer quantise it."""
    family, config = CASES.get(case, ("qwen3_next", FP8_CONFIGS["tensor"]))
    if case == "glm-compressed":
        config = config | {"ignore": ["lm_head", "re:.*mlp.gate$"]}
    path = quantised(tmp_path, family, config)
    tensors = load_file(path / FILE)
    name = "mtp.fc.weight" if family == "qwen3_next" else "model.layers.3.eh_proj.weight"
    if case == "glm-awq":
        module, plain = name.removesuffix(".weight"), tensors.pop(name)
        donor = next(
            it for it in tensors if it.endswith(".qweight") and tensors[it].shape == (64, 8)
        )
        for end in ("qweight", "qzeros", "scales"):
            tensor = tensors[donor.replace("qweight", end)]
            tensors[f"{module}.{end}"] = torch.cat((tensor, tensor.flip(0)))
        assert plain.shape == (64, 128)
    elif case == "glm-compressed":
        scales = tensors[name].abs().amax(1, keepdim=True) / 448
        tensors |= {name: (tensors[name] / scales).to(torch.float8_e4m3fn), f"{name}_scale": scales}
    elif case == "deepseek-fp8":
        codes, scales, _ = fp8_of(tensors[name], config)
        tensors |= {name: codes, f"{name}_scale_inv": scales}
    save_file(tensors, path / FILE, metadata={"format": "pt"})
    check(path, family, values_of(tensors, config))


@pytest.mark.parametrize("config", [GLM, AWQ], ids=["compressed", "awq"])
@pytest.mark.parametrize("rules", [[], ["mtp", r"re:^mtp.*"]], ids=["without", "with"])
def test_a_head_with_all_experts_in_one_tensor_beside_quantised_experts(
    tmp_path: Path, config: dict[str, Any], rules: list[str]
) -> None:
    """Qwen3.5 is published so; tools that split the experts of the model copy the head with its tensors."""
    key = "ignore" if config is GLM else "modules_to_not_convert"
    config = config | {key: [*config[key], *(rules if config is GLM else rules[:1])]}
    path = quantised(tmp_path, "qwen3_5_moe", config)
    tensors = load_file(path / FILE)
    values = values_of(tensors, config)
    head = {name: value for name, value in values.items() if name.startswith("mtp.")}
    at = "mtp.layers.0.mlp.experts."
    gate, up, down = (
        torch.stack([head.pop(f"{at}{expert}.{part}_proj.weight") for expert in range(8)])
        for part in ("gate", "up", "down")
    )
    head |= {f"{at}gate_up_proj": torch.cat((gate, up), 1), f"{at}down_proj": down}
    stored = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    stored |= {name: value.contiguous() for name, value in head.items()}
    save_file(stored, path / FILE, metadata={"format": "pt"})
    check(path, "qwen3_5_moe", values)


def test_a_head_in_a_file_of_its_own(tmp_path: Path) -> None:
    """compressed-tensors 0.15 adds it to a model of one file, which keeps its name, by an index of both files."""
    path = quantised(tmp_path, "qwen3_next", FP8)
    tensors, alone = load_file(path / FILE), "model_mtp.safetensors"
    values = values_of(tensors, FP8)
    head = {name: value.clone() for name, value in values.items() if name.startswith("mtp.")}
    base = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    save_file(base, path / FILE, metadata={"format": "pt"})
    save_file(head, path / alone, metadata={"format": "pt"})
    index = path / "model.safetensors.index.json"
    stale = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
    index.write_text(json.dumps(stale))
    assert tensor_names(path) == base.keys(), "an index of other files does not count"
    files = dict.fromkeys(base, FILE) | dict.fromkeys(head, alone)
    index.write_text(json.dumps({"weight_map": files}))
    assert tensor_names(path) == files.keys()
    assert {FILE, alone} <= find_files(path, weights=True).files.keys()
    check(path, "qwen3_next", values)


def test_a_matrix_in_16_bits_is_rounded_where_the_model_computes_in_fp8(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """config.json gives it to the products in FP8, which round other weights at load too."""
    path = quantised(tmp_path, "deepseek_v3", FP8)
    config = load_model_config(path).mtp
    assert config is not None
    tensors = load_file(path / FILE)
    name = "model.layers.3.mlp.experts.2.down_proj.weight"
    plain = values_of(tensors, FP8)[name]
    del tensors[f"{name}_scale_inv"]
    save_file(tensors | {name: plain}, path / FILE, metadata={"format": "pt"})
    (entry,) = [entry for entry in weight_map(config) if entry.name == name]
    held = BlockWeights.empty(*plain.shape, device="cpu")
    Checkpoint(path, config).read([entry], {name: BlockSlot(held)}, torch.device("cpu"))
    assert "1 matrices are not quantised, as quantization_config in config.json has" in caplog.text
    assert f"such as {name} (F32); the model rounds them" in caplog.text
    torch.testing.assert_close(held.values.float() * held.scales[0, 0], plain, atol=0, rtol=0.07)


@pytest.mark.parametrize("prefix", ["model.", ""])
@pytest.mark.parametrize("case", ["deepseek-fp8", "glm-awq", "qwen-awq"])
def test_a_head_without_scales_is_not_quantised_in_memory(
    tmp_path: Path, case: str, prefix: str
) -> None:
    """Its dense products stay in 16 bits; before, they were to be in FP8 or in four bits by the rules for all."""
    family, config = CASES[case]
    path = quantised(tmp_path, family, config)
    section = ModelSection(path=str(path))
    speculation = SpeculationConfig(method="mtp")
    tensors = load_file(path / FILE)
    if not prefix:
        tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        save_file(tensors, path / FILE)
    found = load_draft_config(speculation, section, load_model_config(path))
    assert found is not None and found.layers.quantization is not None
    head = "mtp." if family == "qwen3_next" else f"{prefix}layers.3."
    stored = {name: tensor for name, tensor in tensors.items() if not name.startswith(head)}
    values = values_of(tensors, config)
    stored |= {name: value.contiguous() for name, value in values.items() if name.startswith(head)}
    save_file(stored, path / FILE)
    found = load_draft_config(speculation, section, load_model_config(path))
    assert found is not None and found.layers.quantization is None
