"""config.json: every honoured field is read, everything else is refused by name."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from workers.models.registry import ModelConfigError, load_model_config
from workers.specs.model import ModelConfig, MoeSpec, weight_map

BASE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
}


def fp8(**changes: Any) -> dict[str, Any]:
    """The quantisation of the published FP8 checkpoints, changed."""
    fields = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    return {"quantization_config": {**fields, "activation_scheme": "dynamic", **changes}}


def load(tmp_path: Path, **changes: Any) -> ModelConfig:
    raw = {key: value for key, value in {**BASE, **changes}.items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return load_model_config(tmp_path)


def refusal(tmp_path: Path, **changes: Any) -> str:
    with pytest.raises(ModelConfigError) as caught:
        load(tmp_path, **changes)
    return str(caught.value)


def test_reads_what_transformers_saves(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig as Reference

    scaling = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 5e5}
    Reference(
        **{**BASE, "head_dim": 48, "rope_parameters": scaling, "eos_token_id": [3, 4]},
        dtype="bfloat16",
        tie_word_embeddings=True,
    ).save_pretrained(tmp_path)
    config = load_model_config(tmp_path)
    attention = config.attention
    assert (config.num_experts, attention.head_dim, config.dtype) == (8, 48, "bfloat16")
    assert config.tie_word_embeddings and config.eos_token_ids == (3, 4)
    assert config.attention.rope.rope_theta == 5e5
    assert config.attention.rope.scaling == {"factor": 4.0, "original_max_position_embeddings": 256}
    assert (attention.q_size, attention.kv_size) == (192, 96)


def test_dense_layers(tmp_path: Path) -> None:
    config = load(tmp_path, decoder_sparse_step=2, mlp_only_layers=[3])
    assert [isinstance(layer.mlp, MoeSpec) for layer in config.layers] == [
        False,
        True,
        False,
        False,
    ]
    assert [layer.mlp.intermediate_size for layer in config.layers] == [96, 32, 96, 96]


def test_old_rope_form(tmp_path: Path) -> None:
    config = load(tmp_path, rope_theta=1e6, rope_scaling={"type": "linear", "factor": 2.0})
    assert config.attention.rope.rope_type == "linear"
    assert config.attention.rope.rope_theta == 1e6
    assert config.attention.rope.scaling == {"factor": 2.0}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"modules_to_not_convert": None},
        {"fmt": None, "scale_fmt": "ue8m0"},
        {"dequantize": False},
    ],
)
def test_published_quantisation(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = load(tmp_path, mlp_only_layers=[3], attention_bias=True, **fp8(**changes))
    stored = {entry.name: entry.fp8 for entry in weight_map(config)}
    for name in (
        "3.self_attn.q_proj.weight",
        "1.mlp.experts.7.down_proj.weight",
        "3.mlp.up_proj.weight",
    ):
        assert stored[f"model.layers.{name}"]
    for name in ("1.mlp.gate.weight", "3.input_layernorm.weight", "3.self_attn.q_proj.bias"):
        assert not stored[f"model.layers.{name}"]
    assert not stored["lm_head.weight"] and not stored["model.embed_tokens.weight"]
    assert load(tmp_path).quantization is None


def test_modules_that_are_not_quantised(tmp_path: Path) -> None:
    skipped = ["lm_head", "model.layers.1.self_attn", "model.layers.0.mlp.gate", "up_proj"]
    skipped += ["experts.7.down_proj", "model.layers.2", "self_attn"]
    found = load(tmp_path, **fp8(modules_to_not_convert=skipped)).quantization
    assert found is not None
    names = {
        "model.layers.1.self_attn.q_proj": False,
        "model.layers.11.self_attn.q_proj": True,
        "model.layers.0.mlp.gate_proj": True,
        "model.layers.0.mlp.experts.2.up_proj": False,
        "model.layers.0.mlp.experts.2.down_proj": True,
        "model.layers.0.mlp.experts.7.down_proj": False,
        "model.layers.0.mlp.experts.17.down_proj": True,
        "model.layers.2.mlp.experts.2.down_proj": False,
        "model.layers.0.self_attn.o_proj": True,
        "model.layers.0.self_attn": False,
    }
    assert {name: found.form(f"{name}.weight") is not None for name in names} == names


def test_weight_maps_of_a_few_configs_are_kept(tmp_path: Path) -> None:
    plain, stored = load(tmp_path), load(tmp_path, **fp8())
    assert weight_map(plain) != weight_map(stored)
    for config in (plain, stored):
        assert weight_map(config) is weight_map(replace(config)), "equal configs"


def test_generation_config_decides_eos(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    assert load(tmp_path, eos_token_id=7).eos_token_ids == (7, 5)
    (tmp_path / "generation_config.json").write_text("{}")
    assert load(tmp_path, eos_token_id=7).eos_token_ids == (7,)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "llama"}, ["model_type", "'llama'", "'qwen3_moe'"]),
        ({"architectures": ["Qwen3MoeForTokenClassification"]}, ["architectures", "Qwen3MoeModel"]),
        (
            {"hidden_act": "relu"},
            ["hidden_act", '"relu"', '"silu" or "gelu" or "gelu_pytorch_tanh"'],
        ),
        ({"hidden_act": ["silu"]}, ["hidden_act", '["silu"]']),
        ({"use_sliding_window": True}, ["use_sliding_window", "true", "false"]),
        ({"quantization_config": {"quant_method": "hqq"}}, [".quant_method is 'hqq'", "fp8"]),
        ({"quantization_config": "fp8"}, ["quantization_config is 'fp8'"]),
        (fp8(weight_block_size=[64, 64]), [".weight_block_size is [64, 64]", "[128, 128]"]),
        (fp8(fmt="e5m2"), ["quantization_config.fmt is 'e5m2'", "e4m3"]),
        (fp8(activation_scheme="static"), [".activation_scheme is 'static'", "dynamic"]),
        (fp8(kv_cache_scheme={"type": "float"}), [".kv_cache_scheme is", "unknown key"]),
        (fp8(modules_to_not_convert="lm_head"), [".modules_to_not_convert is 'lm_head'"]),
        (fp8(modules_to_not_convert=["model.*.mlp"]), ["'model.*.mlp'", "plain module names"]),
        ({"attn_logit_softcapping": 30.0}, ["attn_logit_softcapping", "30.0", "unknown"]),
        ({"dtype": "float8_e4m3fn"}, ["dtype", "float8_e4m3fn", "bfloat16"]),
        ({"torch_dtype": "int8"}, ["torch_dtype", "int8"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers", "True"]),
        ({"rms_norm_eps": 0}, ["rms_norm_eps", "0"]),
        ({"norm_topk_prob": 1}, ["norm_topk_prob", "1"]),
        ({"mlp_only_layers": [-1]}, ["mlp_only_layers", "[-1]"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads is 4", "num_key_value_heads (3)"]),
        ({"head_dim": 33}, ["head_dim is 33", "even"]),
        ({"num_experts_per_tok": 9}, ["num_experts_per_tok is 9", "(8)"]),
        ({"num_local_experts": 16}, ["num_experts is 8", "num_local_experts is 16"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding"]),
        ({"layer_types": 3}, ["layer_types", "3"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["'dynamic'", "length", "yarn"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["rope_parameters.rope_type", "longrope"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["rope_parameters.factor is missing"]),
        ({"rope_parameters": {"rope_type": "linear", "factor": -1}}, [".factor is -1"]),
        ({"rope_parameters": {"mrope_section": [1, 2]}}, ["rope_parameters.mrope_section"]),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, [".partial_rotary_factor is 0.5"]),
        ({"rope_theta": 0}, ["rope_theta is 0"]),
        ({"rope_scaling": "yarn"}, ["rope_scaling is 'yarn'"]),
    ],
)
def test_refusals_name_field_and_value(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    message = refusal(tmp_path, **changes)
    for word in [*words, "config.json"]:
        assert word in message


def test_all_problems_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path, hidden_act="relu", vocab_size=-1, mystery=1)
    assert all(word in message for word in ("hidden_act", "vocab_size is -1", "mystery"))


def test_null_and_harmless_keys_pass(tmp_path: Path) -> None:
    config = load(
        tmp_path, mystery=None, rope_scaling=None, max_window_layers=4, partial_rotary_factor=1.0
    )
    assert config.attention.rope.rope_type == "default"


def test_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"not a folder.*a name on the Hugging Face Hub"):
        load_model_config(tmp_path / "nowhere")
    with pytest.raises(ModelConfigError, match=r"no config\.json"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match="JSON"):
        load_model_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ModelConfigError, match="list"):
        load_model_config(tmp_path)


def test_needs_neither_torch_nor_transformers() -> None:
    code = (
        f"import sys, workers.models.registry as r; r.parse_model_config({BASE!r}, {{}}, '');"
        "assert not {'torch', 'transformers'} & sys.modules.keys(), 'heavy import'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "fields",
    [{}, {"rope_scaling": {}}, {"rope_scaling": None}, {"rope_parameters": {}}],
)
def test_gpt_oss_without_rotary_settings_has_those_of_transformers(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    import torch
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

    from tests.family_cases import family_checkpoint
    from workers.layers.rope import build_rope_table

    path = family_checkpoint(tmp_path, "gpt_oss", "tied", weights=False)
    raw = json.loads((path / "config.json").read_text())
    given = {key: value for key, value in raw.items() if not key.startswith("rope_")} | fields
    (path / "config.json").write_text(json.dumps(given))
    rotary = GptOssRotaryEmbedding(GptOssConfig.from_pretrained(path))
    angles_Pr = torch.arange(40.0)[:, None] * rotary.inv_freq
    expected = torch.polar(torch.full_like(angles_Pr, rotary.attention_scaling), angles_Pr)
    found = build_rope_table(load_model_config(path), 40, torch.device("cpu"))
    torch.testing.assert_close(found, expected)
