"""Quantised checkpoints as other tools write them: fields of config.json, names and values of tensors.

Logits are compared with transformers' model in float32 of the values that the tools' documents give.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.four_bit import FourBitWeights
from kernels.four_bit_format import FourBitFormat
from tests.family_cases import load_reference
from tests.unit.model_case import OneRank, make_batch, small_checkpoint
from workers.models.registry import load_model_config
from workers.specs.model import weight_map
from workers.specs.quantization import parse_quantization
from workers.weights.loader import Checkpoint, CheckpointError
from workers.weights.slots import FourBitSlot

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


# FineGrainedFP8Config of transformers 5.23 with blocks; `scale_fmt: ue8m0` gives scales in F8_E8M0.
FP8: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "dequantize": False,
    "expert_dtype": "fp8",
    "modules_to_convert": None,
    "modules_to_not_convert": None,
    "quant_method": "fp8",
    "scale_fmt": "float",
    "weight_block_size": [128, 128],
}
FP8_CONFIGS = {
    "blocks": FP8,
    "powers": FP8 | {"scale_fmt": "ue8m0"},
    "tensor": FP8 | {"weight_block_size": None},
    "static": FP8 | {"weight_block_size": None, "activation_scheme": "static"},
}


def fp8_of(
    values: torch.Tensor, config: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes [N, K], scales of blocks or [1, 1], and the values in float32 that they stand for."""
    size = 128 if config["weight_block_size"] else max(values.shape)
    rows, columns = (torch.arange(side) // size for side in values.shape)
    index = rows[:, None] * (int(columns.max()) + 1) + columns
    amax = torch.zeros(int(index.max()) + 1)
    amax = amax.scatter_reduce(0, index.flatten(), values.abs().flatten(), "amax")
    scales = amax / 448
    if config["scale_fmt"] == "ue8m0":
        scales = scales.log2().ceil().exp2()
    codes = (values / scales[index]).to(torch.float8_e4m3fn)
    grid = scales.view(int(rows.max()) + 1, -1)
    stored = grid.to(torch.float8_e8m0fnu) if config["scale_fmt"] == "ue8m0" else grid
    return codes, stored, codes.float() * scales[index]


def transformers_fp8(path: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Save projections as transformers does: matrices of each expert, scales of all; return what they stand for."""
    tensors = load_file(path / FILE)
    static = config["activation_scheme"] == "static"
    expected, saved = dict(tensors), dict(tensors)
    for name in [name for name in tensors if ".self_attn." in name and "_proj." in name]:
        saved[name], saved[f"{name}_scale_inv"], expected[name] = fp8_of(tensors[name], config)
        if static:
            saved[name.replace("weight", "activation_scale")] = torch.tensor(0.5)
    for layer in range(SHAPE["num_layers"]):
        at, fused = f"model.layers.{layer}.mlp.experts.", {}
        for parts in (("gate_proj", "up_proj"), ("down_proj",)):
            scales = []
            for expert in range(8):
                names = [f"{at}{expert}.{part}.weight" for part in parts]
                codes, scale, values = fp8_of(torch.cat([tensors[n] for n in names]), config)
                scales.append(scale)
                for name, code, value in zip(
                    names, codes.chunk(len(parts)), values.chunk(len(parts)), strict=True
                ):
                    saved[name], expected[name] = code.contiguous(), value
            fused[f"{at}{'gate_up_proj' if len(parts) == 2 else 'down_proj'}"] = scales
        for name, scales in fused.items():
            whole = torch.stack([scale.view(torch.uint8) for scale in scales])
            saved[f"{name}_scale_inv"] = whole.view(scales[0].dtype)
            if static:
                saved[f"{name}_activation_scale"] = torch.ones(8)
    save_file(saved, path / FILE, metadata={"format": "pt"})
    return expected


@pytest.mark.parametrize("form", FP8_CONFIGS)
def test_fp8_that_transformers_quantised_and_saved(tmp_path: Path, form: str) -> None:
    config = FP8_CONFIGS[form]
    path = small_checkpoint(
        tmp_path / "fp8", moe_intermediate_size=128, hidden_size=256, num_layers=2
    )
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    expect_logits(path, transformers_fp8(path, config))


def test_scales_of_all_experts_and_of_one_are_too_many(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path / "fp8", quantization_config=FP8, **SHAPE)
    tensors = load_file(path / FILE)
    tensors["model.layers.0.mlp.experts.down_proj_scale_inv"] = torch.ones(8, 1, 1)
    save_file(tensors, path / FILE)
    with pytest.raises(CheckpointError, match=r"holds both .*proj_scale_inv and .*experts\.0"):
        OneRank(path)


DELTA: dict[str, Any] = SHAPE | {
    "num_layers": 4,
    "shared_expert_intermediate_size": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_value_head_dim": 32,
}


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_moe_text"])
def test_modules_that_gptq_leaves_out_without_a_rule(tmp_path: Path, family: str) -> None:
    """GPTQModel quantises neither b nor a of delta nets, and its config.json names no rule."""
    config = CONFIGS["gptqmodel"]
    sizes = DELTA if family == "qwen3_next" else DELTA | {"intermediate_size": None}
    sizes |= {"family": family, "expert_layout": "apart"}
    path = small_checkpoint(tmp_path / "gptq", quantization_config=config, **sizes)
    tensors = load_file(path / FILE)
    values = widened(tensors, config)
    modules = [n.removesuffix(".qweight") for n in tensors if n.endswith(".qweight")]
    left_out = [module for module in modules if "in_proj_a" in module or "in_proj_b" in module]
    assert len(left_out) == (2 if family == "qwen3_next" else 4)
    for module in left_out:
        for end in ("qweight", "qzeros", "scales", "g_idx"):
            del tensors[f"{module}.{end}"]
        tensors[f"{module}.weight"] = values[f"{module}.weight"].contiguous()
    save_file(tensors, path / FILE)
    expect_logits(path, values)


def test_experts_in_16_bits_are_not_rounded_to_four(tmp_path: Path) -> None:
    """A backend that holds all experts in four bits refuses others by name."""
    config = CONFIGS["gptqmodel"]
    path = small_checkpoint(tmp_path / "gptq", quantization_config=config, **SHAPE)
    tensors = load_file(path / FILE)
    name = "model.layers.1.mlp.experts.3.up_proj"
    plain = widened(tensors, config)[f"{name}.weight"].contiguous()
    for end in ("qweight", "qzeros", "scales", "g_idx"):
        del tensors[f"{name}.{end}"]
    save_file(tensors | {f"{name}.weight": plain}, path / FILE)
    slots = OneRank(path).model.weight_slots()
    assert torch.equal(slots[f"{name}.weight"].target, plain)
    entries = {entry.key: entry for entry in weight_map(load_model_config(path))}
    form = FourBitFormat("int4", 32)
    packed = FourBitSlot(FourBitWeights.empty(form, 64, 64, device="cpu", tiled=False))
    with pytest.raises(CheckpointError, match=f"{name}.weight is F32, but the model holds"):
        Checkpoint(path, load_model_config(path)).read(
            [entries[f"{name}.weight"]], {f"{name}.weight": packed}, torch.device("cpu")
        )


def test_a_router_that_awq_quantised_too(tmp_path: Path) -> None:
    """AutoAWQ leaves a router out only where modules_to_not_convert names it."""
    config = CONFIGS["gptqmodel-awq"] | {"modules_to_not_convert": None}
    path = small_checkpoint(tmp_path / "awq", quantization_config=config, **SHAPE)
    tensors = load_file(path / FILE)
    generator = torch.Generator().manual_seed(2)
    for layer in range(2):
        gate = f"model.layers.{layer}.mlp.gate"
        experts, columns = tensors.pop(f"{gate}.weight").shape
        codes, zeros = (
            torch.randint(16, (size, experts), generator=generator)
            for size in (columns, columns // 32)
        )
        tensors[f"{gate}.qweight"] = signed(words_of(codes, AWQ))
        tensors[f"{gate}.qzeros"] = signed(words_of(zeros, AWQ))
        scales = torch.rand(columns // 32, experts, generator=generator) * 0.01
        tensors[f"{gate}.scales"] = scales.half()
    save_file(tensors, path / FILE)
    expect_logits(path, widened(tensors, config))


def test_a_gate_of_a_shared_expert_in_fp8(tmp_path: Path) -> None:
    """transformers quantises it unless modules_to_not_convert names it."""
    config = FP8_CONFIGS["tensor"]
    shape = DELTA | {"family": "qwen3_next", "hidden_size": 256}
    path = small_checkpoint(tmp_path / "fp8", quantization_config=config, **shape)
    tensors = load_file(path / FILE)
    plain = {}
    for name in [name for name in tensors if name.endswith("shared_expert_gate.weight")]:
        codes, scales, plain[name] = fp8_of(tensors[name], config)
        tensors |= {name: codes, f"{name}_scale_inv": scales}
    save_file(tensors, path / FILE)
    slots = OneRank(path).model.weight_slots()
    assert len(plain) == 4
    for name, values in plain.items():
        assert torch.equal(slots[name].target.flatten(), values.flatten())


@pytest.mark.parametrize("family", ["mixtral", "minimax_m2"])
def test_experts_under_the_names_of_llm_compressor(tmp_path: Path, family: str) -> None:
    """llm-compressor 0.14 splits the experts that transformers fuses, by its own names of their parts."""
    shape = SHAPE | {"family": family, "intermediate_size": None}
    shape |= {"quantization": "compressed-channel"}
    path = small_checkpoint(tmp_path, **shape)
    before, tensors = logits_of(path), load_file(path / FILE)
    parts = {".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
    for part, written in parts.items():
        tensors = {name.replace(part, written): tensor for name, tensor in tensors.items()}
    assert "model.layers.1.block_sparse_moe.experts.3.gate_proj.weight_scale" in tensors
    save_file(tensors, path / FILE)
    assert torch.equal(logits_of(path), before)
