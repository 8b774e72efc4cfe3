"""gpt-oss in MXFP4 as published, and the files that transformers writes of it in 16 bits."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.family_cases import family_checkpoint, load_reference
from tests.unit.model_case import OneRank, make_batch
from workers.models.config_reader import ModelConfigError
from workers.models.registry import load_model_config
from workers.weights.loader import CheckpointError

FILE = "model.safetensors"
IDS = list(range(5, 25))


def logits_of(path: Path) -> torch.Tensor:
    return OneRank(path).logits(make_batch([IDS], [0]))


def test_experts_that_transformers_unpacked(tmp_path: Path) -> None:
    """transformers 5.23 saves them under the names of packed ones, which it cannot load; config.json is right."""
    path, saved = family_checkpoint(tmp_path, "gpt_oss", "mxfp4"), tmp_path / "saved"
    reference = load_reference(path)
    reference.save_pretrained(saved)
    name = "model.layers.1.mlp.experts.gate_up_proj_blocks"
    assert load_file(saved / FILE)[name].dtype == torch.float32
    assert "quantization_config" not in json.loads((saved / "config.json").read_text())
    with torch.inference_mode():
        expected = reference(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits_of(saved), expected, atol=1e-3, rtol=1e-3)


def test_a_config_that_forgot_that_experts_were_unpacked_is_refused(tmp_path: Path) -> None:
    path = family_checkpoint(tmp_path, "gpt_oss", "mxfp4")
    tensors = load_file(family_checkpoint(tmp_path / "plain", "gpt_oss", "untied") / FILE)
    save_file(tensors, path / FILE, metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"gate_up_proj is F32, but quantization_config .* remove"
    ):
        OneRank(path)


def test_packed_experts_without_a_quantization_config_are_refused(tmp_path: Path) -> None:
    path = family_checkpoint(tmp_path, "gpt_oss", "mxfp4")
    raw = json.loads((path / "config.json").read_text())
    del raw["quantization_config"]
    (path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(
        CheckpointError,
        match=r"quantised \(.*proj_(blocks|scales) is U8\), but .* no quantization_config",
    ):
        OneRank(path)


@pytest.mark.parametrize(
    "found",
    [{"quant_method": "modelopt", "quant_algo": "NVFP4"}, {"quant_method": "compressed-tensors"}],
)
def test_other_forms_of_gpt_oss_are_refused_by_name(tmp_path: Path, found: dict[str, Any]) -> None:
    path = family_checkpoint(tmp_path, "gpt_oss", "untied", weights=False)
    raw = json.loads((path / "config.json").read_text()) | {"quantization_config": found}
    (path / "config.json").write_text(json.dumps(raw))
    message = f'quantization_config.quant_method is "{found["quant_method"]}"; supported: mxfp4'
    with pytest.raises(ModelConfigError, match=message):
        load_model_config(path)
