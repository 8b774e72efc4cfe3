"""Quantised checkpoints as other tools write them: fields of config.json, names and values of tensors.

Logits are compared with transformers' model in float32 of the values that the tools' documents give.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.family_cases import load_reference
from tests.unit.model_case import OneRank, make_batch, small_checkpoint
from workers.specs.quantization import parse_quantization

torch.set_num_threads(1)
FILE = "model.safetensors"
IDS = list(range(5, 25))
SHAPE: dict[str, Any] = {"num_layers": 2, "moe_intermediate_size": 64}
# The quantization_config of GPTQModel 7.7, without most settings of the calibration in `meta`.
GPTQMODEL: dict[str, Any] = {
    "bits": 4,
    "group_size": 32,
    "desc_act": False,
    "lm_head": False,
    "method": "gptq",
    "quant_method": "gptq",
    "format": "gptq",
    "checkpoint_format": "gptq",
    "pack_dtype": "int32",
    "meta": {"fallback": {"strategy": "rtn"}, "pack_impl": "auto", "act_group_aware": True},
    "sym": True,
}
GPTQMODEL_AWQ = {
    **{key: value for key, value in GPTQMODEL.items() if key != "sym"},
    "method": "awq",
    "quant_method": "awq",
    "format": "gemm",
    "checkpoint_format": "gemm",
    "version": "gemm",
}
# GPTQConfig and AwqConfig of transformers 5.23.
CALIBRATION: dict[str, Any] = {
    "bits": 4,
    "tokenizer": None,
    "dataset": None,
    "group_size": 32,
    "damp_percent": 0.1,
    "desc_act": False,
    "act_group_aware": True,
    "sym": True,
    "true_sequential": True,
    "meta": None,
    "backend": "auto",
    "model_seqlen": 2048,
    "block_name_to_quantize": None,
    "module_name_preceding_first_block": None,
    "batch_size": 1,
    "pad_token_id": None,
    "max_input_length": None,
    "cache_block_outputs": True,
    "modules_in_block_to_quantize": None,
}
CONFIGS = {
    "gptqmodel": GPTQMODEL,
    "gptqmodel-zeros": GPTQMODEL | {"sym": False},
    "gptqmodel-v2": GPTQMODEL | {"sym": False, "format": "gptq_v2", "checkpoint_format": "gptq_v2"},
    "gptqmodel-ordered": GPTQMODEL | {"desc_act": True},
    "gptqmodel-awq": GPTQMODEL_AWQ | {"zero_point": True},
    "gptqmodel-awq-sym": GPTQMODEL_AWQ | {"zero_point": False},
    "transformers-gptq": CALIBRATION
    | {"quant_method": "gptq", "format": "gptq", "checkpoint_format": "gptq"},
    "transformers-awq": CALIBRATION
    | {"quant_method": "awq", "format": "gemm", "version": "gemm", "zero_point": True}
    | {"modules_to_not_convert": None},
}


def codes_of(words: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Return [..., 8 W] of int32 [..., W]; order: the place in its word of each of eight values."""
    places = 4 * torch.tensor(order)
    return ((words.long() & 0xFFFFFFFF)[..., None] >> places & 15).flatten(-2)


def words_of(codes: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """Return int64 [..., W] of [..., 8 W], from 0 to 2 ** 32 - 1."""
    places = 4 * torch.tensor(order)
    return (codes.long().unflatten(-1, (-1, 8)) << places).sum(-1)


def signed(words: torch.Tensor) -> torch.Tensor:
    return ((words + 2**31) % 2**32 - 2**31).to(torch.int32).contiguous()


def logits_of(path: Path) -> torch.Tensor:
    return OneRank(path).logits(make_batch([IDS], [0]))


def expect_logits(path: Path, values: dict[str, torch.Tensor]) -> None:
    """Compare the checkpoint's logits with those of transformers' model with `values` and no quantisation."""
    plain = path.with_name(f"{path.name}-plain")
    plain.mkdir()
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    copies = {name: value.contiguous().clone() for name, value in values.items()}
    save_file(copies, plain / FILE, metadata={"format": "pt"})
    with torch.inference_mode():
        expected = load_reference(plain)(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits_of(path), expected, atol=1e-3, rtol=1e-3)


AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


def widened(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the values that GPTQModel's documents give to the tensors of a checkpoint of GPTQ or AWQ."""
    found = {}
    for name, tensor in tensors.items():
        module, _, end = name.rpartition(".")
        if end == "qweight":
            scales, zeros = tensors[f"{module}.scales"].float(), tensors[f"{module}.qzeros"]
            if config["quant_method"] == "awq":
                codes_KN, zeros_SN = codes_of(tensor, AWQ), codes_of(zeros, AWQ)
                group_K = torch.arange(len(codes_KN)) // config["group_size"]
            else:
                v1 = config["checkpoint_format"] == "gptq"
                zeros_SN = codes_of(zeros.long() + (0x11111111 if v1 else 0))
                codes_KN = codes_of(tensor.t()).t()
                group_K = tensors[f"{module}.g_idx"].long()
            found[f"{module}.weight"] = ((codes_KN - zeros_SN[group_K]) * scales[group_K]).t()
        elif end not in ("qzeros", "scales", "g_idx"):
            found[name] = tensor
    return found


@pytest.mark.parametrize("tool", CONFIGS)
def test_gptq_and_awq_with_all_fields_of_the_tools(tmp_path: Path, tool: str) -> None:
    config = CONFIGS[tool]
    path = small_checkpoint(tmp_path / "packed", quantization_config=config, **SHAPE)
    tensors = load_file(path / FILE)
    assert "model.layers.1.mlp.experts.3.up_proj.qweight" in tensors
    expect_logits(path, widened(tensors, config))


def test_a_zero_point_of_0_borrows_from_its_neighbours(tmp_path: Path) -> None:
    """GPTQModel takes 0x11111111 from words of zero points and adds it again, with the borrows and carries of both."""
    path = small_checkpoint(
        tmp_path / "zeros", quantization_config=CONFIGS["gptqmodel-zeros"], **SHAPE
    )
    tensors = load_file(path / FILE)
    generator = torch.Generator().manual_seed(1)
    expected = {}
    for name in [name for name in tensors if name.endswith(".qweight")]:
        module = name.removesuffix(".qweight")
        zeros_SN = codes_of(tensors[f"{module}.qzeros"].long() + 0x11111111)
        zeros_SN[torch.rand(zeros_SN.shape, generator=generator) < 0.02] = 0
        tensors[f"{module}.qzeros"] = signed(words_of(zeros_SN) - 0x11111111)
        group_K = tensors[f"{module}.g_idx"].long()
        differences_KN = codes_of(tensors[name].t()).t() - zeros_SN[group_K]
        values = differences_KN * tensors[f"{module}.scales"].float()[group_K]
        expected[f"{module}.weight"] = values.t()
    save_file(tensors, path / FILE)
    ends = (".qweight", ".qzeros", ".scales", ".g_idx")
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith(ends)}
    expect_logits(path, plain | expected)


@pytest.mark.parametrize(
    ("tool", "changes", "message"),
    [
        ("gptqmodel-awq", {"format": "gemv"}, "format is 'gemv', but version is 'gemm'"),
        ("gptqmodel", {"format": "gptq_v2"}, "format is 'gptq_v2', but checkpoint_format is"),
        ("gptqmodel", {"method": "awq"}, "method is 'awq', but quant_method is 'gptq'"),
        ("gptqmodel", {"format": "marlin", "checkpoint_format": None}, "format is 'marlin'; supp"),
    ],
)
def test_fields_that_repeat_another_must_agree(tool: str, changes: Any, message: str) -> None:
    problems: list[str] = []
    parse_quantization({"quantization_config": CONFIGS[tool] | changes}, problems)
    assert [problem for problem in problems if message in problem] == problems != []
