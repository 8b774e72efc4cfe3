"""Weights on a GPU: read through pinned memory, in FP8 or not, or drawn there; the same as on the CPU."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from kernels.backends.select import probe
from kernels.block_fp8 import dequantise
from kernels.interface.registry import backend_class
from kernels.routing.expert_map import ContiguousMap
from tests.closeness import calc_diff
from tests.distributed.engine_harness import Event, make_request, rank_config, run_engines
from tests.distributed.rank_pool import RankPool
from tests.gpu.test_grouped_gemm_cuda import CASES, Layer, build
from tests.gpu.test_model_cuda import batches, given_experts, on_gpu
from tests.token_judge import TokenJudge
from tests.unit.model_case import OneRank, make_batch, small_checkpoint
from workers.models.registry import load_model_config
from workers.weights import reader as weight_reader
from workers.weights.files import read_headers
from workers.weights.initial_weights import draw_weights
from workers.weights.reader import SlotSource, fill_slots
from workers.weights.slots import BlockSlot, WeightSlot
from workers.weights.tensors import four_bit_experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
SHAPE = {"hidden_size": 256, "moe_intermediate_size": 128, "head_dim": 64}


@pytest.mark.parametrize("piece", [4096, 2**20])
@pytest.mark.parametrize("num_threads", [1, 6])
def test_every_tensor_is_filled(tmp_path, monkeypatch, num_threads, piece):
    monkeypatch.setattr(weight_reader, "PIECE", piece)
    sizes = [0, 1, 5, 1024, 1023, 3000, 70_001, 8, 2048] * 12
    tensors = {f"t{i}": torch.randn(size).bfloat16() for i, size in enumerate(sizes)}
    save_file(tensors, tmp_path / "model.safetensors")
    stored = read_headers(tmp_path)
    found = {name: torch.empty(t.shape, device="cuda") for name, t in tensors.items()}
    sources = [SlotSource(WeightSlot.plain(found[name]), [stored[name]]) for name in tensors]
    for _ in range(3):
        for tensor in found.values():
            tensor.fill_(float("nan"))
        fill_slots(sources, torch.device("cuda"), num_threads=num_threads)
        assert all(torch.equal(found[name].cpu(), t.float()) for name, t in tensors.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fp8", [False, True])
def test_a_model_holds_what_the_cpu_holds(tmp_path: Path, fp8: bool, dtype: torch.dtype):
    path = small_checkpoint(tmp_path, fp8=fp8, **SHAPE)
    there = OneRank(path, dtype, device="cuda").model.weight_slots()
    here = OneRank(path, dtype).model.weight_slots()
    for name, slot in there.items():
        if not name.endswith("norm.weight"):  # scaled where they are not fused
            assert torch.equal(slot.target.cpu(), here[name].target), name


@pytest.mark.parametrize(("name", "tolerance"), [("deepgemm_fp8", 2e-3), ("triton", 1e-4)])
def test_an_fp8_checkpoint_gives_the_logits_of_float32(tmp_path: Path, name: str, tolerance: float):
    """The experts are given: a router's choice between two that are nearly alike would hide the products' errors."""
    path = small_checkpoint(tmp_path, fp8=True, dtype="bfloat16", **SHAPE)
    gemm = build(name)
    here, there = (given_experts(path, device) for device in ("cpu", "cuda"))
    model = OneRank(path, torch.bfloat16, device="cuda", grouped_gemm=gemm, **there)
    slots = model.model.weight_slots().items()
    held = [key for key, slot in slots if isinstance(slot, BlockSlot)]
    assert sum("experts" in key for key in held) == (3 * 8 * 3 if gemm.fp8_weights else 0)
    reference = OneRank(path, **here)
    for batch in batches():
        found, expected = model.logits(on_gpu(batch)).cpu(), reference.logits(batch)
        assert calc_diff(found, expected) < tolerance


@pytest.mark.parametrize("form", ["int4", "gptq-ordered", "awq", "mxfp4"])
def test_a_four_bit_checkpoint_gives_the_logits_of_float32(tmp_path: Path, form: str):
    """Packed on the GPU as on the CPU, but tiled; the experts are given, see above."""
    family = "gpt_oss" if form == "mxfp4" else "qwen3_moe"
    path = small_checkpoint(
        tmp_path,
        family=family,
        quantization=form,
        dtype="bfloat16",
        intermediate_size=None,
        **SHAPE,
    )
    four_bit = four_bit_experts(load_model_config(path))
    assert four_bit is not None
    if reason := probe("cuda").get("grouped_gemm.triton_four_bit"):
        pytest.skip(reason)
    gemm = backend_class("grouped_gemm", "triton_four_bit")(four_bit)
    here, there = (given_experts(path, device) for device in ("cpu", "cuda"))
    model = OneRank(path, torch.bfloat16, device="cuda", grouped_gemm=gemm, **there)
    reference = OneRank(path, **here)
    for held, wide in zip(model.model.layers, reference.model.layers, strict=True):
        for expert in range(8):
            found = held.mlp.w13_e2ID[expert].matrix().dequantise()
            assert torch.equal(found.cpu(), wide.mlp.w13_e2ID[expert])
    for batch in batches():
        found, expected = model.logits(on_gpu(batch)).cpu(), reference.logits(batch)
        assert calc_diff(found, expected) < 1e-4


@pytest.mark.parametrize("label", ["few_rows", "decode", "prefill"])
@torch.inference_mode()
def test_fp8_products_of_stored_weights(label: str):
    """Weights that are in FP8 already lose nothing: what is left is the rounding of rows."""
    layer = Layer(build("deepgemm_fp8"), CASES[label])
    layer.w13, layer.w2 = (
        torch.stack([dequantise(v, s) for v, s in zip(w.values, w.scales, strict=True)])
        for w in layer.prepared
    )
    inputs = layer.draw(1)
    assert calc_diff(layer(*inputs), layer.expected(*inputs)) < 1e-3


@pytest.mark.parametrize("name", ["triton", "deepgemm_fp8"])
def test_drawn_weights_are_the_same_on_any_rank(tmp_path: Path, name: str):
    gemm = build(name)
    path = small_checkpoint(tmp_path, **SHAPE)
    whole = OneRank(path, torch.bfloat16, device="cuda", grouped_gemm=gemm)
    again = OneRank(path, torch.bfloat16, device="cuda", grouped_gemm=gemm)
    where = {"expert_map": ContiguousMap(8, 1), "rank": 0, "device": torch.device("cuda")}
    for model in (whole, again):
        draw_weights(model.model, config=model.config, **where)
    first, second = whole.model.weight_slots(), again.model.weight_slots()
    for key, slot in first.items():
        pairs = [(slot.target, second[key].target)]
        if isinstance(slot, BlockSlot):
            pairs = [(slot.target.values.float(), second[key].target.values.float())]
        assert all(torch.equal(one, other) and one.any() for one, other in pairs)
    for batch in batches():
        logits = whole.logits(on_gpu(batch))
        assert logits.isfinite().all() and torch.equal(logits, again.logits(on_gpu(batch)))


def test_an_engine_answers_in_fp8(tmp_path: Path):
    """From the configuration to tokens; each is near the best one of the same weights in float32.

    The experts are given, as above: no router hides the products' errors.
    """
    path = small_checkpoint(tmp_path, fp8=True, dtype="bfloat16", **SHAPE)
    build("deepgemm_fp8")
    source = random.Random(1)
    prompts = [[source.randrange(256) for _ in range(20)] for _ in range(30)]
    events = [Event(0, 0, make_request(str(i), ids)) for i, ids in enumerate(prompts)]
    float32 = OneRank(path, **given_experts(path, "cpu"))
    pool = RankPool(1)
    try:
        for gemm, margin, mean in (("deepgemm_fp8", 0.4, 0.02), ("triton", 0.2, 0.01)):
            config = rank_config(
                path,
                1,
                "cuda",
                model={"dtype": "bfloat16", "max_model_len": 64, "routing": {"kind": "uniform"}},
                kernels={"grouped_gemm": gemm, "attention": "sdpa"},
                cache={"num_blocks": "auto", "memory_fraction": 0.2},
            )
            (result,) = run_engines(pool, config, events)
            assert not result.errors and all(len(ids) == 16 for ids in result.tokens.values())
            judge = TokenJudge(lambda ids: float32.logits(make_batch([ids], [0])), margin, mean)
            for index, prompt in enumerate(prompts):
                judge.greedy(prompt, result.tokens[str(index)], f"{gemm} {index}")
            judge.close(at_least=16 * len(prompts))
    finally:
        pool.close()
