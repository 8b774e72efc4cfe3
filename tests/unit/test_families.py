"""Every model family: logits of transformers, its map of weights, its reading of config.json."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from kernels.block_fp8 import dequantise
from kernels.routing.expert_map import ContiguousMap
from tests.checkpoints.families import released_layout
from tests.checkpoints.weights import checkpoint_tensors
from tests.checkpoints.writer import make_checkpoint
from tests.family_cases import CASES, SAME_MODEL, VARIANTS, family_checkpoint, load_reference
from tests.published_configs import PUBLISHED
from tests.unit.model_case import OneRank, make_batch
from workers.layers.linear import Linear
from workers.layers.norm import RMSNorm
from workers.models.config_reader import DEFAULTS
from workers.models.registry import (
    FAMILIES,
    ModelConfigError,
    load_model_config,
    parse_model_config,
)
from workers.weights.checkpoint_files import CheckpointError
from workers.weights.initial_weights import draw_weights
from workers.weights.slots import WeightSlot

torch.set_num_threads(1)

# Values of one family's config.json that it cannot honour, and words of the refusal.
REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("deepseek_v2", {"norm_topk_prob": True}, ["norm_topk_prob is true", "false"]),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, ['topk_method is "noaux_tc"', "greedy"]),
    ("deepseek_v2", {"n_group": 3}, ["n_group is 3", "(10)"]),
    ("deepseek_v2", {"n_group": 5}, ["topk_group is 1", "2 experts", "(3)"]),
    ("deepseek_v3", {"scoring_func": "softmax"}, ['scoring_func is "softmax"', "sigmoid"]),
    ("deepseek_v3", {"topk_group": 3}, ["topk_group is 3", "n_group (2)"]),
    ("deepseek_v3", {"num_key_value_heads": 2}, ["num_key_value_heads is 2", "4"]),
    ("deepseek_v3", {"qk_nope_head_dim": 15}, ["qk_nope_head_dim is 15", "even"]),
    ("deepseek_v3", {"rope_interleave": False}, ["rope_interleave is false", "true"]),
    ("ernie4_5_moe", {"use_bias": True}, ["use_bias is true", "false"]),
    ("ernie4_5_moe", {"moe_use_aux_free": False}, ["moe_use_aux_free is false", "true"]),
    ("glm4_moe", {"partial_rotary_factor": 1.5}, ["partial_rotary_factor is 1.5", "<= 1"]),
    ("glm4_moe", {"partial_rotary_factor": 0.3}, ["7 of 24", "even"]),
    ("glm4_moe_lite", {"mlp_layer_types": ["sparse"] * 3}, ["mlp_layer_types is", "dense"]),
    ("glm4v_moe", {"vision_config": {"num_heads": 7}}, ["vision_config.hidden_size is 1536", "7"]),
    ("granitemoe", {"residual_multiplier": 0}, ["residual_multiplier is 0", "> 0"]),
    ("granitemoe", {"shared_intermediate_size": 8}, ["shared_intermediate_size is 8", "unknown"]),
    ("granitemoeshared", {"logits_scaling": -6.0}, ["logits_scaling is -6.0", "> 0"]),
    ("gpt_oss", {"swiglu_limit": 10.0}, ["swiglu_limit is 10.0", "7.0"]),
    ("gpt_oss", {"sliding_window": None}, ["sliding_window is None", "whole number"]),
    ("gpt_oss", {"layer_types": ["full_attention"] * 2}, ["layer_types is", "3 times"]),
    ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, ['"fp8"', "mxfp4"]),
    ("kimi_k2", {"moe_layer_freq": 2}, ["moe_layer_freq is 2", "1"]),
    ("minimax_m2", {"use_routing_bias": False}, ["use_routing_bias is false", "true"]),
    ("minimax_m2", {"rotary_dim": 15}, ["15 of 32", "even"]),
    ("mixtral", {"sliding_window": 4096}, ["sliding_window is 4096", "null"]),
    ("mixtral", {"num_local_experts": 1}, ["num_experts_per_tok is 3", "(1)"]),
    ("olmoe", {"clip_qkv": -1}, ["clip_qkv is -1", "a number > 0"]),
    ("olmoe", {"head_dim": 24}, ["head_dim is 24", "16"]),
    ("qwen2_moe", {"use_sliding_window": True}, ["use_sliding_window is true", "false"]),
    ("qwen2_moe", {"attention_bias": True}, ["attention_bias is true", "unknown"]),
    ("qwen3_5_moe", {"attn_output_gate": False}, ["attn_output_gate is false", "true"]),
    ("qwen3_5_moe", {"mamba_ssm_dtype": "float16"}, ['mamba_ssm_dtype is "float16"', "bfloat16"]),
    ("qwen3_5_moe_text", {"layer_types": ["full_attention"] * 2}, ["layer_types is", "3 times"]),
    ("qwen3_5_moe", {"vision_config": {"window_size": 8}}, ["vision_config.window_size is 8"]),
    ("qwen3_vl_moe", {"vision_config": {"out_hidden_size": 32}}, ["out_hidden_size is 32", "(64)"]),
    ("qwen3_vl_moe", {"vision_config": {"deepstack_visual_indexes": [27]}}, ["[27]", "below"]),
    ("qwen3_vl_moe", {"vision_config": {"num_position_embeddings": 5}}, ["is 5", "square"]),
    ("qwen3_next", {"linear_num_value_heads": 3}, ["linear_num_value_heads is 3", "(2)"]),
    ("qwen3_next", {"hidden_act": "gelu"}, ['hidden_act is "gelu"', "silu"]),
    ("qwen3_moe", {"use_sliding_window": True}, ["use_sliding_window is true", "false"]),
]


# What a config.json must have, because transformers has no default or one that no model can have.
WITHOUT_DEFAULT: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "glm4_moe": {"head_dim": 128},
    # a tower of the default has another width than the text part of the default
    "qwen3_5_moe": {"vision_config": {"out_hidden_size": 2048}},
    "qwen3_vl_moe": {"vision_config": {"out_hidden_size": 2048}},
}


# transformers 5.23 saves the experts as it has transposed them.
SAVED_LAYOUTS = {"qwen3_vl_moe": "fused"}


def defaults_of(family: str) -> dict[str, Any]:
    """The config.json of transformers' defaults, with what it must have beside them."""
    saved = AutoConfig.for_model(SAME_MODEL.get(family, family)).to_dict()
    if family == "glm4v_moe":
        saved["text_config"]["head_dim"] = 128
    return {**saved, "model_type": family, **WITHOUT_DEFAULT.get(family, {})}


def test_every_family_has_cases() -> None:
    assert VARIANTS.keys() == FAMILIES.keys()
    assert PUBLISHED.keys() == FAMILIES.keys() == {family for family, _, _ in REFUSED}


@pytest.mark.parametrize("resaved", [False, True], ids=["hub", "resaved"])
@pytest.mark.parametrize(("family", "variant"), CASES)
def test_logits_equal_transformers(
    tmp_path: Path, family: str, variant: str, resaved: bool
) -> None:
    num_files = 1 if resaved == (variant == "tied") else 3
    path = family_checkpoint(tmp_path, family, variant, resaved=resaved, num_files=num_files)
    files = len(list(path.glob("*.safetensors")))
    assert files == 1 if num_files == 1 else files > 1
    ids = torch.randint(256, (1, 40), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        expected = load_reference(path)(ids).logits[0]
    # The spread of logits is 0.1 to 3; rounding errors of float32 grow with it.
    within = {"atol": 1e-4 * max(1.0, float(expected.std())), "rtol": 0}
    rank = OneRank(path)
    whole = rank.logits(make_batch(ids.tolist(), [0]))
    torch.testing.assert_close(whole, expected, **within)
    parts = [
        rank.logits(make_batch([ids[0, start:end].tolist()], [start], padding=3))
        for start, end in ((0, 17), (17, 18), (18, 40))
    ]
    torch.testing.assert_close(torch.cat(parts), expected, **within)


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_the_map_names_what_transformers_saves(tmp_path: Path, family: str, variant: str) -> None:
    path = family_checkpoint(tmp_path, family, variant, resaved=True)
    saved = load_file(path / "model.safetensors")
    config, layout = load_model_config(path), SAVED_LAYOUTS.get(family, released_layout(family))
    mapped: dict[str, torch.Tensor] = {}
    for tensor in checkpoint_tensors(config, layout):
        mapped |= tensor.draw(config, 0)
    found = {name: tensor.shape for name, tensor in mapped.items()}
    assert found == {name: tensor.shape for name, tensor in saved.items()}


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_the_map_fills_every_value_once(tmp_path: Path, family: str, variant: str) -> None:
    rank = OneRank(family_checkpoint(tmp_path, family, variant))
    parameters = list(_parameters(rank.model))
    for parameter in parameters:
        parameter.zero_()
    for slot in rank.model.weight_slots().values():
        assert isinstance(slot, WeightSlot)
        slot.target.add_(1)
    assert len(parameters) > 10 and all((parameter == 1).all() for parameter in parameters)


def _parameters(model: Any) -> Any:
    """Every tensor that a model and its blocks hold as a parameter."""
    for name, value in vars(model).items():
        if isinstance(value, RMSNorm):
            yield value.weight
        elif isinstance(value, Linear):
            yield value.weight
            if value.bias is not None:
                yield value.bias
        elif isinstance(value, torch.Tensor) and not name.startswith("_"):
            yield value
        elif name == "layers":
            for block in (block for layer in value for block in layer):
                yield from _parameters(block)
        elif name == "shared" and value is not None:
            yield from _parameters(value)


@pytest.mark.parametrize("family", VARIANTS)
def test_random_weights_are_those_of_a_written_checkpoint(tmp_path: Path, family: str) -> None:
    rank = OneRank(family_checkpoint(tmp_path, family, "untied"))
    batch = make_batch([[1, 2, 3]], [0])
    expected = rank.logits(batch)
    for slot in rank.model.weight_slots().values():
        slot.target.zero_()
    expert_map = ContiguousMap(rank.config.num_experts, 1)
    where: dict[str, Any] = {"expert_map": expert_map, "rank": 0, "device": torch.device("cpu")}
    draw_weights(rank.model, config=rank.config, **where)
    assert torch.equal(rank.logits(batch), expected)


@pytest.mark.parametrize("family", sorted(VARIANTS.keys() - {"gpt_oss"}))
def test_fp8_checkpoints_are_read(tmp_path: Path, family: str) -> None:
    """Every projection, also of a shared expert, is in FP8 on disk; router and gates are not."""
    path = make_checkpoint(
        tmp_path, family=family, num_layers=2, moe_intermediate_size=128, fp8=True
    )
    stored = {name: tensor.dtype for name, tensor in load_file(path / "model.safetensors").items()}
    quantised = {name for name, dtype in stored.items() if dtype == torch.float8_e4m3fn}
    for name in stored.keys() - quantised:
        assert not any(part in name for part in ("experts.", "_linear", "_proj.weight")) or (
            name.endswith("_scale_inv")
        )
    assert quantised and not any(
        part in name for name in quantised for part in ("gate.weight", "router")
    )
    found = OneRank(path).logits(make_batch([[1, 2, 3]], [0]))
    tensors = load_file(path / "model.safetensors")
    for name in quantised:
        values, scales = tensors[name], tensors.pop(f"{name}_scale_inv")
        if values.dim() == 2:
            tensors[name] = dequantise(values, scales)
        else:
            tensors[name] = torch.stack(list(map(dequantise, values, scales)))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    assert torch.equal(OneRank(path).logits(make_batch([[1, 2, 3]], [0])), found)


@pytest.mark.parametrize("family", VARIANTS)
def test_missing_keys_take_transformers_defaults(family: str) -> None:
    saved = defaults_of(family)
    optional = {*DEFAULTS, *FAMILIES[family].config.DEFAULTS, "rope_parameters"}
    given = {key: value for key, value in saved.items() if key not in optional}
    assert given.keys() < saved.keys()
    found, expected = (parse_model_config(raw, {}, "config.json") for raw in (given, saved))
    assert found == expected


@pytest.mark.parametrize("family", VARIANTS)
def test_a_missing_size_is_refused(family: str) -> None:
    saved = defaults_of(family)
    for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"):
        given = {name: value for name, value in saved.items() if name != key}
        if key not in saved:  # the model has a vision tower too
            part = saved["text_config"]
            given["text_config"] = {name: part[name] for name in part if name != key}
        with pytest.raises(ModelConfigError, match=f"{key} is missing; expected a"):
            parse_model_config(given, {}, "config.json")


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_configs_are_read_as_transformers_reads_them(tmp_path: Path, family: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[family]))
    config = load_model_config(tmp_path)
    known = SAME_MODEL.get(family, family)
    saved = type(AutoConfig.for_model(known)).from_dict(PUBLISHED[family] | {"model_type": known})
    saved.save_pretrained(tmp_path / "resaved")
    found = replace(load_model_config(tmp_path / "resaved"), model_type=family)
    if not config.eos_token_ids:  # the release has them in generation_config.json alone
        found = replace(found, eos_token_ids=())
    assert found == config
    assert config.dtype == "bfloat16"


@pytest.mark.parametrize(("family", "changes", "words"), REFUSED)
def test_refusals_name_field_and_value(
    tmp_path: Path, family: str, changes: dict[str, Any], words: list[str]
) -> None:
    path = family_checkpoint(tmp_path, family, "untied")
    raw = json.loads((path / "config.json").read_text())
    with pytest.raises(ModelConfigError) as refused:
        parse_model_config(raw | changes, {}, "config.json")
    assert all(word in str(refused.value) for word in ["config.json", *words])


@pytest.mark.parametrize("family", VARIANTS)
def test_unknown_keys_are_refused(family: str) -> None:
    with pytest.raises(ModelConfigError, match=r"attn_logit_softcapping is 30\.0; unknown key"):
        parse_model_config({"model_type": family, "attn_logit_softcapping": 30.0}, {}, "x")


def test_an_unknown_family_lists_all() -> None:
    with pytest.raises(ModelConfigError) as refused:
        parse_model_config({"model_type": "llama"}, {}, "config.json")
    assert "model_type is 'llama'" in str(refused.value)
    assert all(repr(family) in str(refused.value) for family in FAMILIES)


def test_tensors_of_multi_token_prediction_are_skipped_by_name(tmp_path: Path) -> None:
    """Layers behind the last are read only as far as num_nextn_predict_layers names them; all else is an error."""
    path = family_checkpoint(tmp_path, "deepseek_v3", "untied")
    expected = OneRank(path).logits(make_batch([[1, 2, 3]], [0]))
    tensors, raw = load_file(path / "model.safetensors"), (path / "config.json").read_text()
    extra = {"model.layers.3.eh_proj.weight": torch.ones(4, 8)}
    extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors | extra, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 surplus: model\.layers\.3\.eh_proj\.weight"):
        OneRank(path)
    predicting = json.loads(raw) | {"num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(predicting))
    assert torch.equal(OneRank(path).logits(make_batch([[1, 2, 3]], [0])), expected)
    tensors["model.layers.4.eh_proj.weight"] = torch.ones(4, 8)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 surplus: model\.layers\.4\.eh_proj\.weight"):
        OneRank(path)


@pytest.mark.parametrize(
    "family",
    ["deepseek_v3", "ernie4_5_moe", "kimi_k2", "glm4_moe", "glm4_moe_lite", "minimax_m2"],
)
def test_a_missing_router_bias_is_an_error(tmp_path: Path, family: str) -> None:
    """Also where config.json names no method: the family decides."""
    path = family_checkpoint(tmp_path, family, "untied")
    raw = json.loads((path / "config.json").read_text())
    for key in ("topk_method", "scoring_func"):
        raw.pop(key, None)
    (path / "config.json").write_text(json.dumps(raw))
    tensors = load_file(path / "model.safetensors")
    (name,) = (key for key in tensors if "layers.1." in key and "e_score_correction_bias" in key)
    del tensors[name]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=f"1 missing: {name}"):
        OneRank(path)


@pytest.mark.parametrize(
    ("family", "scale"),
    [
        ("deepseek_v2", 192**-0.5 * 1.5896),
        ("deepseek_v3", 192**-0.5 * 1.8739),
        ("kimi_k2", 192**-0.5 * 1.8133),
        ("glm4_moe_lite", 256**-0.5),
    ],
)
def test_the_scale_follows_the_lengthened_embedding(family: str, scale: float) -> None:
    config = parse_model_config(PUBLISHED[family], {}, "config.json")
    assert config.attention.kernel_spec.scale == pytest.approx(scale, rel=1e-4)
    assert config.attention.rope_dim == 64


def test_a_router_bias_stays_float32_in_a_model_of_bfloat16(tmp_path: Path) -> None:
    path = family_checkpoint(tmp_path, "deepseek_v3", "untied")
    stored = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    rank = OneRank(path, dtype=torch.bfloat16)
    assert torch.equal(rank.model.layers[1].mlp.score_bias_E, stored[name])
    assert rank.model.layers[1].mlp.router.weight.dtype == torch.bfloat16
    assert rank.logits(make_batch([[1, 2, 3]], [0])).isfinite().all()
