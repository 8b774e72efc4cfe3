"""Dense products in FP8: which parameters a checkpoint gives for them, what a model holds, and what `check` counts.

DeepGEMM and the Triton kernels are replaced by torch; see tests/triton and tests/gpu.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kernels import dense_fp8
from kernels.block_fp8 import BlockWeights, Fp8Rows, dequantise, quantise_blocks
from kernels.gated_activation import gated_activation
from kernels.routing.expert_map import ContiguousMap
from tests.checkpoints.families import names_of
from tests.checkpoints.writer import make_checkpoint
from tests.unit.draft_case import OneRankDraft
from tests.unit.model_case import SMALL, OneRank, make_batch, small_checkpoint
from tests.unit.test_fp8_checkpoint import FILE, SCALE, Fp8Gemm
from workers.layers.linear import DenseLinear, Fp8Linear
from workers.models.registry import load_model_config
from workers.weights.slots import BlockSlot
from workers.weights.tensors import draft_head_bytes, fp8_parameters, rank_weight_bytes

torch.set_num_threads(1)
PROMPTS = make_batch([[1, 2, 3, 4], [200, 100]], [0, 0])
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "head_dim": 64,
    "num_heads": 4,
    "num_kv_heads": 2,
    "num_layers": 2,
}
LATENT = {
    "num_kv_heads": 4,
    "kv_lora_rank": 128,
    "q_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
}


DELTA_NETS = {
    "shared_expert_intermediate_size": 128,
    "head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 64,
}
OF_FAMILY = {
    "deepseek_v3": LATENT,
    "qwen2_moe": {"shared_expert_intermediate_size": 128},
    "qwen3_next": DELTA_NETS,
    "qwen3_5_moe": DELTA_NETS,
    "qwen3_5_moe_text": DELTA_NETS,
}


class DenseFp8Gemm(Fp8Gemm):
    """Experts as Fp8Gemm, and dense products in FP8 beside them."""

    fp8_dense = True


@pytest.fixture(autouse=True)
def in_torch(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Multiply what the weights stand for with rows as they are; yields the weights' shapes, call by call."""
    shapes = []

    def multiply(x: Fp8Rows, weights: BlockWeights, *, partial: bool = False) -> torch.Tensor:
        shapes.append((len(x.values), *weights.shape))
        return x.values @ dequantise(weights.values, weights.scales).to(x.values.dtype).t()

    def rows(x: torch.Tensor) -> Fp8Rows:
        return Fp8Rows(x, x)

    monkeypatch.setattr(dense_fp8, "multiply", multiply)
    monkeypatch.setattr(dense_fp8, "quantise", rows)
    monkeypatch.setattr(dense_fp8, "activate", lambda h, name: rows(gated_activation(h, name)))
    return shapes


def checkpoint(path: Path, family: str, **changes: Any) -> Path:
    """A random checkpoint of the family in FP8, with each field that the family has."""
    sizes = SMALL | SIZES | OF_FAMILY.get(family, {}) | changes
    names = names_of(family)
    sizes = {key: value for key, value in sizes.items() if names.get(key, key) is not None}
    return make_checkpoint(path, family=family, fp8=True, **sizes)


FAMILIES = ["qwen3_moe", "deepseek_v3", "qwen2_moe", "glm4_moe", "qwen3_next", "qwen3_5_moe"]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_weights_multiplied_out(family: str, tmp_path: Path, in_torch):
    """Rows of heads are reordered and parts joined alike in both forms."""
    path = checkpoint(tmp_path, family)
    model = OneRank(path, grouped_gemm=DenseFp8Gemm())
    found = model.logits(PROMPTS)
    assert in_torch, "no product ran in FP8"
    plain = OneRank(path, grouped_gemm=Fp8Gemm())
    torch.testing.assert_close(found, plain.logits(PROMPTS), atol=2e-4, rtol=2e-4)


def held_bytes(model: Any) -> int:
    """Bytes of all parameters, each counted once."""
    storages = {}
    for slot in model.weight_slots().values():
        target = slot.target
        parts = [target.values, target.scales] if isinstance(slot, BlockSlot) else [target]
        storages |= {part.untyped_storage().data_ptr(): part.untyped_storage() for part in parts}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_memory_table_counts_them(family: str, tmp_path: Path) -> None:
    path = checkpoint(tmp_path, family)
    config, expert_map = load_model_config(path), ContiguousMap(8, 1)
    names = fp8_parameters(config)
    assert any(name.endswith(("attention.qkv.weight", "attention.down.weight")) for name in names)
    assert any("shared" in name for name in names) == (family != "qwen3_moe")
    held, told = [], []
    for gemm in (Fp8Gemm(), DenseFp8Gemm()):
        held.append(held_bytes(OneRank(path, grouped_gemm=gemm).model))
        told.append(
            rank_weight_bytes(
                config, expert_map, 0, "float32", fp8_experts=True, fp8_dense=gemm.fp8_dense
            )
        )
    assert held[0] - held[1] == told[0] - told[1] > 0


def test_a_head_for_multi_token_prediction_drafts_with_a_copy_of_the_output_head(
    tmp_path: Path, in_torch: list[tuple[int, ...]]
) -> None:
    """Its drafts are those of the rounded head; the copy is counted; models in other dtypes have none."""
    path = checkpoint(tmp_path, "qwen3_next", mtp=True, vocab_size=576)
    plain = OneRankDraft(path, grouped_gemm=Fp8Gemm())
    draft = OneRankDraft(path, grouped_gemm=DenseFp8Gemm())
    config, head = draft.target.config, draft.head
    width = config.hidden_size
    states_LD = torch.randn(40, width, generator=torch.Generator().manual_seed(3))
    in_torch.clear()
    found_L = head.draft(states_LD)
    assert in_torch == [(40, 576, width)]
    weight = draft.target.model.lm_head.weight
    blocks = quantise_blocks(weight)
    rounded = dequantise(blocks.values, blocks.scales)
    assert torch.equal(found_L, (states_LD @ rounded.t()).argmax(-1))
    assert not torch.equal(rounded, weight) and torch.equal(
        plain.head.draft(states_LD), (states_LD @ plain.target.model.lm_head.weight.t()).argmax(-1)
    )
    size = draft_head_bytes(config, fp8_dense=True)
    assert size == sum(it.nbytes for it in blocks.tensors)
    assert draft_head_bytes(config, fp8_dense=False) == 0
    assert draft_head_bytes(replace(config, vocab_size=600), fp8_dense=True) == 0


def test_values_and_scales_are_the_checkpoint_s(tmp_path: Path) -> None:
    """Rows of a head change places inside their block, so no value is rounded again."""
    path = checkpoint(tmp_path, "qwen3_moe")
    model, disk = OneRank(path, grouped_gemm=DenseFp8Gemm()), load_file(path / FILE)
    attention = model.model.layers[0].attention
    name = "model.layers.0.self_attn.{}_proj.weight"
    q, k, v = (disk[name.format(part)].view(torch.uint8) for part in "qkv")
    q_heads, k_heads = (
        part.view(-1, 2, 32, 256).transpose(1, 2).reshape(-1, 256) for part in (q, k)
    )
    values = attention.qkv.weight.values.view(torch.uint8)
    assert torch.equal(values, torch.cat((q_heads, k_heads, v)))
    scales = [disk[name.format(part) + SCALE] for part in "qkv"]
    assert torch.equal(attention.qkv.weight.scales, torch.cat(scales))


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"num_kv_heads": 1}, "qkv.weight"),  # k ends inside a block
        ({"head_dim": 96, "num_kv_heads": 4}, "qkv.weight"),  # a head lies in two blocks
        ({"hidden_size": 192}, "qkv.weight"),  # groups of a row would be cut
    ],
)
def test_parameters_that_blocks_do_not_hold_stay_in_the_models_dtype(
    changes: dict[str, int], missing: str, tmp_path: Path
) -> None:
    path = checkpoint(tmp_path, "qwen3_moe", **changes)
    names = fp8_parameters(load_model_config(path))
    assert not any(missing in name for name in names)
    model = OneRank(path, grouped_gemm=DenseFp8Gemm())
    assert isinstance(model.model.layers[0].attention.qkv, DenseLinear)
    assert model.logits(PROMPTS).isfinite().all()


def test_only_checkpoints_in_fp8_have_any(tmp_path: Path) -> None:
    plain = small_checkpoint(tmp_path / "plain", **SIZES)
    assert fp8_parameters(load_model_config(plain)) == frozenset()
    quantization = {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["model.layers.1.self_attn.k_proj"],
    }
    path = checkpoint(tmp_path / "fp8", "qwen3_moe", quantization_config=quantization)
    names = fp8_parameters(load_model_config(path))
    assert names == {
        "layers.0.attention.qkv.weight",
        *(f"layers.{n}.attention.o.weight" for n in (0, 1)),
    }


@pytest.mark.parametrize(
    ("rows", "width", "partial", "chosen"),
    [
        (64, 512, False, "thin 1"),
        (64, 512, True, "thin 1"),
        (65, 512, False, "deep_gemm"),
        (8, 64, False, "deep_gemm"),
        (8, 64, True, "thin 2"),
    ],
)
def test_few_rows_have_a_kernel_of_their_own(
    rows: int, width: int, partial: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums stay apart only where the caller adds them."""
    monkeypatch.undo()
    calls = []
    thin = SimpleNamespace(
        takes=lambda x, weights, parts: len(x.values) <= 64,
        parts_of=lambda weights: 1 if len(weights.values) >= 512 else 2,
        skinny_fp8=lambda x, weights, parts: calls.append(f"thin {parts}"),
    )
    deep_gemm = SimpleNamespace(fp8_gemm_nt=lambda *_: calls.append("deep_gemm"))
    monkeypatch.setattr(dense_fp8, "_skinny", lambda: thin)
    monkeypatch.setattr(dense_fp8, "_deep_gemm", lambda: deep_gemm)
    x = torch.zeros(rows, 128)
    dense_fp8.multiply(Fp8Rows(x, x), BlockWeights.empty(width, 128, device="cpu"), partial=partial)
    assert calls == [chosen]


def test_sums_stay_apart_only_without_start_and_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def multiply(x: Fp8Rows, weights: BlockWeights, *, partial: bool) -> torch.Tensor:
        asked.append(partial)
        return torch.zeros(len(x.values), len(weights.values))

    monkeypatch.setattr(dense_fp8, "multiply", multiply)
    x, held = torch.zeros(2, 128), BlockWeights.empty(64, 128, device="cpu")
    for bias, start, partial in (
        (None, None, False),
        (None, None, True),
        (None, torch.ones(2, 64), True),
        (torch.ones(64), None, True),
    ):
        Fp8Linear(held, bias)(x, start, partial=partial)
    assert asked == [False, True, False, False]


def test_ranks_begin_to_compile_at_different_sizes(in_torch: list[tuple[int, ...]]) -> None:
    """Each compiles every size of each shape of weights, whole and in parts."""
    weights = [quantise_blocks(torch.ones(rows, 128)) for rows in (64, 64, 192)]
    shapes = ((64,), (192,))
    calls = [(rows, *shape, 128) for shape in shapes for rows in (8, 4, 1) for _ in range(2)]
    for rank in range(2):
        in_torch.clear()
        dense_fp8.compile_products(weights, (8, 4, 1), rank, 2)
        assert in_torch == calls[6 * rank :] + calls[: 6 * rank]
