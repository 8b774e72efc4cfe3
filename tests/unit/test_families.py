"""Every model family: logits of transformers, its map of weights, its reading of config.json."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from cluster.cli import app
from kernels.routing.placement import ExpertPlacement
from tests.family_cases import CASES, VARIANTS, family_checkpoint
from tests.unit.model_case import OneRank, make_batch
from workers.layers.norm import RMSNorm
from workers.models.registry import (
    FAMILIES,
    ModelConfigError,
    load_model_config,
    parse_model_config,
    weight_map,
)
from workers.models.specs import ModelConfig
from workers.weights.checkpoint import make_checkpoint
from workers.weights.initial_weights import draw_weights
from workers.weights.slots import WeightSlot

torch.set_num_threads(1)

# config.json of releases, as the Hub has them.
# fmt: off
PUBLISHED: dict[str, dict[str, Any]] = {
    "mixtral": {  # Mixtral-8x7B-Instruct-v0.1
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "olmoe": {  # OLMoE-1B-7B-0924
        "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None,
        "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 1024, "max_position_embeddings": 4096, "model_type": "olmoe", "norm_topk_prob": False,
        "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
        "num_key_value_heads": 16, "output_router_logits": False, "pad_token_id": 1, "rope_scaling": None,
        "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 50304,
    },
    "qwen2_moe": {  # Qwen1.5-MoE-A2.7B
        "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "decoder_sparse_step": 1, "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 2048,
        "initializer_range": 0.02, "intermediate_size": 5632, "max_position_embeddings": 8192,
        "max_window_layers": 21, "model_type": "qwen2_moe", "moe_intermediate_size": 1408, "norm_topk_prob": False,
        "num_attention_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_key_value_heads": 16, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 5632, "sliding_window": 32768,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.39.0.dev0",
        "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "qwen3_moe": {  # Qwen3-30B-A3B
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
        "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
        "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
        "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
        "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
}
# fmt: on
# Values of one family's config.json that it cannot honour, and words of the refusal.
REFUSED: list[tuple[str, dict[str, Any], list[str]]] = [
    ("mixtral", {"sliding_window": 4096}, ["sliding_window is 4096", "null"]),
    ("mixtral", {"num_local_experts": 1}, ["num_experts_per_tok is 3", "(1)"]),
    ("olmoe", {"clip_qkv": -1}, ["clip_qkv is -1", "a number > 0"]),
    ("olmoe", {"head_dim": 24}, ["head_dim is 24", "16"]),
    ("qwen2_moe", {"use_sliding_window": True}, ["use_sliding_window is true", "false"]),
    ("qwen2_moe", {"attention_bias": True}, ["attention_bias is true", "unknown"]),
    ("qwen3_moe", {"use_sliding_window": True}, ["use_sliding_window is true", "false"]),
]


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
        reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        expected = reference(ids).logits[0]
    rank = OneRank(path)
    whole = rank.logits(make_batch(ids.tolist(), [0]))
    torch.testing.assert_close(whole, expected, atol=1e-4, rtol=0)
    parts = [
        rank.logits(make_batch([ids[0, start:end].tolist()], [start], padding=3))
        for start, end in ((0, 17), (17, 18), (18, 40))
    ]
    torch.testing.assert_close(torch.cat(parts), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_the_map_names_what_transformers_saves(tmp_path: Path, family: str, variant: str) -> None:
    path = family_checkpoint(tmp_path, family, variant, resaved=True)
    saved = load_file(path / "model.safetensors")
    mapped = {entry.name: entry.shape for entry in weight_map(load_model_config(path))}
    assert mapped == {name: tuple(tensor.shape) for name, tensor in saved.items()}


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
        elif isinstance(value, torch.Tensor) and not name.startswith("_"):
            if value is not getattr(model, "embed_VD", None) or name == "embed_VD":
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
    placement = ExpertPlacement(rank.config.num_experts, 1)
    where: dict[str, Any] = {"placement": placement, "rank": 0, "device": torch.device("cpu")}
    draw_weights(rank.model, config=rank.config, **where)
    assert torch.equal(rank.logits(batch), expected)


@pytest.mark.parametrize("family", VARIANTS)
def test_fp8_checkpoints_are_read(tmp_path: Path, family: str) -> None:
    """Every projection, also of a shared expert, is in FP8 on disk; router and gates are not."""
    path = make_checkpoint(tmp_path, family=family, num_layers=2, fp8=True)
    stored = {name: tensor.dtype for name, tensor in load_file(path / "model.safetensors").items()}
    quantised = {name for name, dtype in stored.items() if dtype == torch.float8_e4m3fn}
    for name in stored.keys() - quantised:
        assert "experts." not in name or name.endswith("_scale_inv")
        assert "_proj.weight" not in name or name.endswith("_scale_inv")
    assert quantised and not any("gate.weight" in name for name in quantised)
    assert OneRank(path).logits(make_batch([[1, 2, 3]], [0])).isfinite().all()


@pytest.mark.parametrize("family", VARIANTS)
def test_missing_keys_take_transformers_defaults(family: str) -> None:
    config = parse_model_config({"model_type": family}, {}, "config.json")
    reference = parse_model_config(AutoConfig.for_model(family).to_dict(), {}, "config.json")
    attention, expected = config.attention, reference.attention
    assert attention == expected
    assert (config.moe, config.layers) == (reference.moe, reference.layers)
    for field in ("vocab_size", "hidden_size", "norm_eps", "max_position_embeddings"):
        assert getattr(config, field) == getattr(reference, field), field


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_configs_are_read_as_transformers_reads_them(tmp_path: Path, family: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[family]))
    config = load_model_config(tmp_path)
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "resaved")
    assert load_model_config(tmp_path / "resaved") == config
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


@pytest.mark.parametrize("family", VARIANTS)
def test_make_checkpoint_writes_the_family(tmp_path: Path, family: str) -> None:
    command = ["make-checkpoint", str(tmp_path / "m"), "--family", family, "--layers", "2"]
    assert CliRunner().invoke(app, command).exit_code == 0
    config: ModelConfig = load_model_config(tmp_path / "m")
    assert (config.model_type, config.num_layers, config.num_experts) == (family, 2, 16)
    assert (config.moe.width, config.top_k) == (64, 4)
    assert OneRank(tmp_path / "m").logits(make_batch([[1, 2]], [0])).isfinite().all()


def test_make_checkpoint_refuses_an_unknown_family(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["make-checkpoint", str(tmp_path / "m"), "--family", "llama"])
    assert result.exit_code == 2 and "qwen3_moe" in result.stderr
    assert not (tmp_path / "m").exists()
