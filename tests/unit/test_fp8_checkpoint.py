"""FP8 checkpoints: exactly what their values and scales stand for, held in FP8 where that is computed with."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.activation import Activation
from kernels.backends import select
from kernels.block_fp8 import BlockWeights, dequantise, quantise_blocks
from kernels.grouped_gemm.base import Biases
from kernels.grouped_gemm.reference import ReferenceGroupedGemm
from kernels.interface.config import KernelsConfig
from kernels.routing.expert_map import ContiguousMap
from tests.unit.model_case import OneRank, make_batch, small_checkpoint
from tests.unit.test_kernels_select import CUDA
from workers.models.registry import load_model_config
from workers.weights.initial_weights import draw_weights
from workers.weights.loader import CheckpointError
from workers.weights.slots import BlockSlot
from workers.weights.tensors import rank_weight_bytes, stores_fp8_experts

torch.set_num_threads(1)
SHAPE = {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 40, "num_layers": 2}
PROMPTS = make_batch([[1, 2, 3, 4], [200, 100]], [0, 0])
FILE, SCALE = "model.safetensors", "_scale_inv"


class Fp8Gemm(ReferenceGroupedGemm):
    """Holds its weights in FP8, as DeepGEMM's does, and computes with what they stand for."""

    fp8_weights = True

    def empty_weights(self, *shape: int, device: Any, dtype: torch.dtype) -> BlockWeights:
        return BlockWeights.empty(*shape, device=device)

    def __call__(
        self,
        expert_input: Any,
        w13: BlockWeights,
        w2: BlockWeights,
        activation: Activation = "silu",
        biases: Biases | None = None,
        adapters: None = None,
    ) -> torch.Tensor:
        assert adapters is None, "weights in FP8 take no adapters"
        plain = (
            torch.stack([dequantise(w.values[e], w.scales[e]) for e in range(len(w.values))])
            for w in (w13, w2)
        )
        w13, w2 = (w.to(expert_input.x_RD.dtype) for w in plain)
        return super().__call__(expert_input, w13, w2, activation, biases)


def rewrite(path: Path, change: Any) -> None:
    """Save the checkpoint's tensors again after `change(tensors)`."""
    tensors = load_file(path / FILE)
    change(tensors)
    save_file(tensors, path / FILE)


def unpacked(path: Path, **shape: Any) -> Path:
    """The same model without quantisation: each weight multiplied out in float32."""
    tensors = load_file(path / FILE)
    scales = {n.removesuffix(SCALE): tensors.pop(n) for n in list(tensors) if n.endswith(SCALE)}
    for name, scale in scales.items():
        values, (rows, columns) = tensors[name].float(), tensors[name].shape
        for row in range(rows):
            for block in range(-(-columns // 128)):
                values[row, block * 128 : block * 128 + 128] *= scale[row // 128, block].float()
        tensors[name] = values
    plain = small_checkpoint(path.with_name(f"{path.name}-plain"), **shape)
    save_file(tensors, plain / FILE)
    return plain


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape", [{}, SHAPE, {"mlp_only_layers": [1]}], ids=["cut", "whole", "mlp"]
)
def test_without_fp8_products_it_is_multiplied_out(tmp_path: Path, shape, scale_dtype) -> None:
    path = small_checkpoint(tmp_path / "fp8", fp8=True, **shape)
    scales = {name for name in load_file(path / FILE) if name.endswith(SCALE)}
    rewrite(path, lambda t: t.update({name: t[name].to(scale_dtype) for name in scales}))
    plain = unpacked(path, **shape)
    assert torch.equal(OneRank(path).logits(PROMPTS), OneRank(plain).logits(PROMPTS))
    half = torch.bfloat16
    assert torch.equal(OneRank(path, half).logits(PROMPTS), OneRank(plain, half).logits(PROMPTS))
    assert load_file(path / FILE)["model.layers.0.self_attn.q_proj.weight"].itemsize == 1


def test_near_the_unquantised_model(tmp_path: Path) -> None:
    fp8 = OneRank(small_checkpoint(tmp_path / "fp8", fp8=True, **SHAPE))
    plain = OneRank(small_checkpoint(tmp_path / "plain", **SHAPE))
    for name, slot in fp8.model.weight_slots().items():
        found, exact = slot.target, plain.model.weight_slots()[name].target
        close = (found - exact).abs() <= exact.abs() / 16 + 1e-4
        assert close.all() and (torch.equal(found, exact) != name.endswith("_proj.weight"))


def test_transformers_reads_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    path = small_checkpoint(tmp_path, fp8=True, **SHAPE | {"head_dim": 64})
    model = AutoModelForCausalLM.from_pretrained(
        path, quantization_config=FineGrainedFP8Config(dequantize=True), dtype=torch.float32
    )
    ids = [5, 6, 7, 8, 9]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].float()
    found = OneRank(path).logits(make_batch([ids], [0]))
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


def test_experts_stay_in_fp8_where_that_is_computed_with(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path / "fp8", fp8=True, **SHAPE)
    model = OneRank(path, grouped_gemm=Fp8Gemm())
    disk = load_file(path / FILE)
    slots = model.model.weight_slots()
    experts = [name for name in slots if ".experts." in name]
    for name in experts:
        slot = slots[name]
        assert isinstance(slot, BlockSlot)
        assert torch.equal(slot.target.values.view(torch.uint8), disk[name].view(torch.uint8))
        assert torch.equal(slot.target.scales, disk[name + SCALE])
    assert len(experts) == 2 * 8 * 3
    torch.testing.assert_close(model.logits(PROMPTS), OneRank(path).logits(PROMPTS))


def test_other_weights_are_rounded_as_they_come(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path, dtype="bfloat16", **SHAPE)
    model = OneRank(path, torch.bfloat16, grouped_gemm=Fp8Gemm())
    disk = load_file(path / FILE)
    for name, slot in model.model.weight_slots().items():
        if ".experts." in name:
            expected = quantise_blocks(disk[name])
            assert torch.equal(slot.target.values.float(), expected.values.float())
            assert torch.equal(slot.target.scales, expected.scales)


def test_check_counts_what_the_experts_take(tmp_path: Path) -> None:
    from cluster.commands.check import check
    from cluster.config.load import load_config

    def weights(folder: str, gemm: str, device: str = "cuda") -> int:
        yaml = tmp_path / f"{folder}.yaml"
        yaml.write_text(f"model: {{path: {folder}, dtype: bfloat16}}\n")
        settings = [f"kernels.grouped_gemm={gemm}", f"cluster.device={device}"]
        report = check(load_config(yaml, settings))
        return report.ranks[0].weight_bytes

    for name in ("fp8", "plain"):
        small_checkpoint(tmp_path / name, fp8=name == "fp8", **SHAPE)
    values = 2 * 8 * 3 * 128 * 256
    saved = values - values // 128**2 * 4
    whole = weights("plain", "triton")
    assert weights("fp8", "triton") == weights("fp8", "auto", "cpu") == whole
    assert weights("fp8", "auto") == weights("fp8", "deepgemm_fp8") == whole - saved
    assert weights("plain", "auto") == whole
    assert weights("plain", "deepgemm_fp8") == whole - saved


@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_memory_table_tells_the_truth(tmp_path: Path, dtype: str, fp8: bool) -> None:
    path = small_checkpoint(tmp_path, fp8=fp8, **SHAPE)
    config, expert_map = load_model_config(path), ContiguousMap(8, 1)
    for gemm in (ReferenceGroupedGemm(), Fp8Gemm()):
        model = OneRank(path, getattr(torch, dtype), grouped_gemm=gemm)
        targets = []
        for slot in model.model.weight_slots().values():
            whole = slot.target
            targets += [whole.values, whole.scales] if isinstance(slot, BlockSlot) else [whole]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in targets}
        told = rank_weight_bytes(config, expert_map, 0, dtype, fp8_experts=gemm.fp8_weights)
        norms = 2 * 2 * 256 + 256 + 2 * 6 * 40  # in float32 on CPU, q's and k's for each head
        slack = norms * 4 - (2 * 2 * 256 + 256 + 2 * 2 * 40) * (4 if dtype == "float32" else 2)
        assert sum(storages.values()) == told + slack


def test_random_weights_are_rounded_too(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path, fp8=True, **SHAPE)
    model = OneRank(path, grouped_gemm=Fp8Gemm())
    before = {n: s for n, s in model.model.weight_slots().items() if ".experts." in n}
    kept = {name: slot.target.values.float() for name, slot in before.items()}
    for slot in before.values():
        slot.target.values.zero_()
    where = {"expert_map": ContiguousMap(8, 1), "rank": 0, "device": torch.device("cpu")}
    draw_weights(model.model, config=model.config, **where)
    assert all(torch.equal(slot.target.values.float(), kept[n]) for n, slot in before.items())


def test_modules_that_are_not_quantised_are_read_as_they_are(tmp_path: Path) -> None:
    quantization = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.1.self_attn", "down_proj"],
    }
    path = small_checkpoint(tmp_path, quantization_config=quantization, fp8=True, **SHAPE)
    disk = load_file(path / FILE)
    assert disk["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    assert disk["model.layers.1.self_attn.q_proj.weight"].dtype == torch.float32
    assert disk["model.layers.1.mlp.experts.3.down_proj.weight"].dtype == torch.float32
    assert OneRank(path).logits(PROMPTS).isfinite().all()
    assert not stores_fp8_experts(load_model_config(path))


def test_what_does_not_fit_its_config_is_named(tmp_path: Path) -> None:
    path = small_checkpoint(tmp_path / "model", fp8=True, num_layers=1)
    prefix = "model.layers.0.self_attn."

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[f"{prefix}q_proj.weight_scale_inv"]
        tensors[f"{prefix}k_proj.weight"] = tensors[f"{prefix}k_proj.weight"].bfloat16()
        tensors[f"{prefix}v_proj.weight_scale_inv"] = torch.zeros(2, 1)
        tensors["model.layers.0.mlp.gate.weight_scale_inv"] = torch.zeros(1, 1)
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)

    rewrite(path, change)
    with pytest.raises(CheckpointError) as caught:
        OneRank(path)
    message = str(caught.value)
    assert f"1 missing: {prefix}q_proj.weight_scale_inv" in message
    assert f"1 misshaped: {prefix}v_proj.weight_scale_inv [2, 1] instead of [1, 1]" in message
    assert "1 surplus: model.layers.0.mlp.gate.weight_scale_inv" in message
    assert "1 not floating point: model.norm.weight F8_E4M3" in message
    assert f"as in quantization_config: {prefix}k_proj.weight BF16" in message
    plain = small_checkpoint(tmp_path / "plain", num_layers=1)
    shutil.copy(path / FILE, plain / FILE)
    with pytest.raises(CheckpointError, match=r"F8_E4M3\), but its config.json has no quant"):
        OneRank(plain)


@pytest.mark.parametrize(
    ("stored", "unavailable", "name"),
    [
        (True, {}, "deepgemm_fp8"),
        (False, {}, "triton"),
        (True, {"grouped_gemm.deepgemm_fp8": "x"}, "triton"),
    ],
)
def test_auto_takes_fp8_for_checkpoints_that_have_it(stored, unavailable, name) -> None:
    shape = replace(CUDA, hidden_size=2048, moe_intermediate_size=768, fp8_checkpoint=stored)
    chosen = select.select(KernelsConfig(), unavailable, shape)
    assert chosen.grouped_gemm.name == name
    assert chosen.fp8_experts == (name == "deepgemm_fp8")
