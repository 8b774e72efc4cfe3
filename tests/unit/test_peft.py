"""Logits with adapters that PEFT made and saved equal those of PEFT's model, wrapped and merged."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.family_cases import VARIANTS, family_checkpoint, load_reference
from tests.unit.test_adapter_logits import logits_of, rank_with
from tests.unit.test_model_logits import random_ids
from workers.lora_config import AdapterError, LoraConfig

torch.set_num_threads(1)
pytestmark = [
    # PEFT compares patterns with modules alone here, and applies them to parameters too
    pytest.mark.filterwarnings("ignore:.*keys did not match any targeted module:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers` to `True`:UserWarning"),
]

LORA = LoraConfig(max_loras=1, max_rank=8, targets=["attention", "mlp", "experts", "embeddings"])
MLP = ["gate_proj", "up_proj", "down_proj"]
# Names in checkpoints of experts' projections, which PEFT takes for parameters of all experts in transformers 5.
PROJECTIONS = {"mixtral": ["w1", "w2", "w3"], "minimax_m2": ["w1", "w2", "w3"]}
ALWAYS = ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_5_moe")
RECIPES = ("attention", "projections", "parameters", "patterns", "rslora", "embeddings")


def cases() -> Iterator[Any]:
    """Yield every family's first variant with every recipe, and experts packed in four bits."""
    for family, variants in VARIANTS.items():
        for recipe in RECIPES:
            always = family in ALWAYS or (family, recipe) == ("olmoe", "projections")
            marks = () if always else pytest.mark.exhaustive
            yield pytest.param(family, next(iter(variants)), recipe, marks=marks)
    yield pytest.param("gpt_oss", "mxfp4", "parameters")


def settings_of(model: torch.nn.Module, family: str, recipe: str) -> dict[str, Any]:
    """Return the arguments of PEFT's configuration."""
    linear = [name for name, it in model.named_modules() if isinstance(it, torch.nn.Linear)]
    attention = [name for name in linear if "self_attn" in name or "linear_attn" in name]
    attention = sorted({name.rpartition(".")[2] for name in attention if "visual" not in name})
    parameters = sorted(
        {
            ".".join(name.split(".")[-3:])
            for name, it in model.named_parameters()
            if it.dim() == 3 and ".experts." in name
        }
    )
    fused = {"target_modules": ["o_proj"], "target_parameters": parameters}
    ranks = {r".*\.down_proj": 2, r"layers\.1\..*\.gate_up_proj": 6}
    alphas = {r".*\.experts\.gate_up_proj": 3.5, "o_proj": 1}
    return {
        "attention": {"target_modules": attention},
        "projections": {"target_modules": ["o_proj", *PROJECTIONS.get(family, MLP)]},
        "parameters": fused,
        "patterns": fused | {"rank_pattern": ranks, "alpha_pattern": alphas},
        "rslora": {
            "target_modules": [*attention, *PROJECTIONS.get(family, MLP)],
            "use_rslora": True,
        },
        "embeddings": {"target_modules": ["embed_tokens", "lm_head", "o_proj"]},
    }[recipe]


def save_adapter(model: Any, folder: Path, **settings: Any) -> Any:
    """Save an adapter with random A and B by PEFT, and return PEFT's model with it."""
    import peft

    config = peft.LoraConfig(r=4, lora_alpha=6, **settings)
    wrapped = peft.get_peft_model(model, config).eval()
    generator = torch.Generator().manual_seed(1)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.data = drawn * (0.05 if "_B" in name else 1 / math.sqrt(parameter.shape[1]))
    wrapped.save_pretrained(folder)
    return wrapped


def reference_logits(model: Any, sequences: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([ids])).logits[0] for ids in sequences])


@pytest.mark.parametrize(("family", "variant", "recipe"), [*cases()])
def test_logits_equal_those_of_peft(tmp_path: Path, family: str, variant: str, recipe: str) -> None:
    import peft

    # Square matrices do not show the order of A and B: OLMoE's gate and up are square, and gpt-oss's down.
    sizes = {} if family == "olmoe" or variant == "mxfp4" else {"moe_intermediate_size": 48}
    checkpoint, folder = family_checkpoint(tmp_path, family, variant, **sizes), tmp_path / "adapter"
    model = load_reference(checkpoint)
    sequences = random_ids(1, 1, 9, 5)
    base = reference_logits(model, sequences)
    wrapped = save_adapter(model, folder, **settings_of(model, family, recipe))
    expected = reference_logits(wrapped, sequences)
    assert (expected - base).abs().max() > 0.01
    found = logits_of(rank_with(checkpoint, [folder], LORA), sequences, [1] * len(sequences))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    merged = peft.PeftModel.from_pretrained(load_reference(checkpoint), folder).merge_and_unload()
    torch.testing.assert_close(found, reference_logits(merged, sequences), atol=1e-4, rtol=0)


def test_gate_and_up_in_one_parameter_have_twice_the_rank(tmp_path: Path) -> None:
    checkpoint, folder = family_checkpoint(tmp_path, "qwen3_moe", "untied"), tmp_path / "adapter"
    save_adapter(load_reference(checkpoint), folder, target_modules=MLP)
    lora = LORA.model_copy(update={"max_rank": 4})
    message = r"experts.gate_up_proj: rank 8 is above lora.max_rank \(4\); set lora.max_rank: 8$"
    with pytest.raises(AdapterError, match=message):
        rank_with(checkpoint, [folder], lora)
