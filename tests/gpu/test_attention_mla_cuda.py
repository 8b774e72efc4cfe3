"""flashinfer's latent attention (MLA): dense attention, graphs, long contexts, and the kernels that it compiles."""

from dataclasses import replace

import pytest
import torch

from kernels.attention.flashinfer_mla import FlashInferMlaAttention
from kernels.attention.flashinfer_mla_fp8 import FlashInferMlaFp8Attention
from kernels.attention.flashinfer_modules import latent_modules
from kernels.attention.fp8_latents import latent_parts
from kernels.attention.latent_up import LatentHeads
from kernels.backends.select import probe
from kernels.interface.attention_spec import AttentionSpec, MlaDims
from kernels.interface.kv_layout import layout_of
from tests.fused_latents import DTYPE, FusedRows, check
from tests.unit.test_kernels_attention import BATCHES, Pages, Seqs

MISSING = (
    probe("cuda").get("attention.flashinfer_mla") if torch.cuda.is_available() else "needs a GPU"
)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]


def spec(num_heads: int, *, glm: bool = False) -> AttentionSpec:
    nope, value = (192, 256) if glm else (128, 128)
    dims = MlaDims(rank=512, rope_dim=64, nope_dim=nope, value_dim=value)
    return AttentionSpec(num_heads, 1, nope + 64, 0.1, mla=dims)


SPECS = {
    "16_heads": spec(16),
    "128_heads": spec(128),
    "3_heads": spec(3),
    "glm": spec(20, glm=True),
}
LONG: dict[str, Seqs] = {
    "long_decodes": [(8191, 1), (17, 1), (4096, 1), (2047, 1), (0, 1)],
    "long_prompt": [(0, 4096)],
    "long_continued": [(5000, 1), (7000, 1500), (16, 33), (0, 5), (3000, 2)],
    "many_decodes": [(37 * i % 900, 1) for i in range(300)],
}


def attention(
    of: AttentionSpec, block_size: int = 16, *, fp8: bool = False, num_layers: int = 1
) -> FlashInferMlaAttention:
    backend = FlashInferMlaFp8Attention if fp8 else FlashInferMlaAttention
    return backend([replace(of, fp8_cache=fp8)] * num_layers, block_size)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("label", BATCHES)
@pytest.mark.parametrize("shape", SPECS)
@torch.inference_mode()
def test_equals_dense_attention(shape: str, label: str, fp8: bool) -> None:
    check(attention(SPECS[shape], fp8=fp8, num_layers=2), BATCHES[label], device="cuda")


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("block_size", [1, 64])
@torch.inference_mode()
def test_block_sizes(block_size: int, fp8: bool) -> None:
    for label in ("mixed", "very_different_lengths"):
        check(attention(spec(16), block_size, fp8=fp8), BATCHES[label], device="cuda")


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("label", LONG)
@torch.inference_mode()
def test_long_contexts(label: str, fp8: bool) -> None:
    check(attention(spec(16), fp8=fp8), LONG[label], device="cuda")


@pytest.mark.parametrize("shape", ["16_heads", "128_heads"])
@torch.inference_mode()
def test_adapters_equal_merged_weights(shape: str) -> None:
    for label in ("decodes", "mixed"):
        check(attention(SPECS[shape]), BATCHES[label], device="cuda", adapters=True)
    check(attention(SPECS[shape]), LONG["long_continued"], device="cuda", adapters=True)
    check(attention(SPECS[shape]), [(5, 1)] * 6, device="cuda", graph=8, adapters=True)


@torch.inference_mode()
def test_a_long_prompt_in_chunks_of_any_size() -> None:
    """Each chunk of a prompt of 32,768 tokens is computed behind those before it, as in steps one after the other."""
    long, rows = FlashInferMlaAttention([spec(4)], 32), 4096
    for context in (rows, 5 * rows, 7 * rows):
        check(long, [(context, rows)], device="cuda")


STEPS: dict[int, list[Seqs]] = {
    8: [[(5, 1)] * 8, [(900, 1)] * 3, [(9, 1)], []],
    100: [[(60, 1)] * 100, [*[(33, 1)] * 80, (4047, 1), (1999, 1)], [(100, 1)] * 7, []],
}


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("shape", ["16_heads", "128_heads"])
@torch.inference_mode()
def test_graphs_equal_eager(shape: str, fp8: bool) -> None:
    """Bit by bit: graphs are replayed with other lengths than they were captured with, sizes in turn."""
    own = replace(SPECS[shape], fp8_cache=fp8)
    subject = attention(SPECS[shape], fp8=fp8)
    cases = {
        (size, i): (pages, FusedRows(pages, own, size - len(seqs), "cuda"))
        for size, batches in STEPS.items()
        for i, seqs in enumerate(batches)
        for pages in [Pages(seqs, [], 16, DTYPE, 0)]
    }
    num_blocks = max(pages.num_blocks for pages, _ in cases.values())
    shape, dtype = layout_of(own).shape(num_blocks, 16), torch.uint8 if fp8 else DTYPE
    cache = torch.zeros(shape, dtype=dtype, device="cuda")
    subject.bind([cache])
    subject.reserve_graphs(100, 100, 300)
    kv_up = cases[8, 0][1].kv_up
    graphs = {}
    for size in STEPS:
        _, rows = cases[size, 0]
        held = rows.q.clone(), rows.new.clone(), rows.rotation.clone()

        def forward(held=held, norm=rows.norm) -> torch.Tensor:
            q, new, rotation = held[0].clone(), held[1].clone(), held[2]
            subject.store_latents(q, new, 0, rotation, norm, 1e-6)
            return subject.attend_latent(q, new, LatentHeads(kv_up), 0)

        pages = cases[size, 0][0]
        pages.move("cuda")
        subject.plan_graph(pages.batch(), size, subject.forms(size, prompts=False)[-1])
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            forward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = forward()
        graphs[size] = graph, held, out, forward
    for (size, i), (pages, rows) in sorted(cases.items(), key=lambda item: item[0][1]):
        pages.move("cuda")
        graph, held, out, forward = graphs[size]
        for buffer, new in zip(held, (rows.q, rows.new, rows.rotation), strict=True):
            buffer.copy_(new)
        before = torch.zeros_like(cache)
        for new, old in zip(
            *(latent_parts(it, own, 16) for it in (before, rows.cache)), strict=True
        ):
            new.view(torch.uint8)[: pages.num_blocks] = old.view(torch.uint8)
        batch, form = pages.batch(), subject.forms(size, prompts=False)[-1]
        subject.plan_graph(batch, size, form)
        cache.copy_(before)
        graph.replay()
        replayed, written = out.clone(), cache.clone()
        cache.copy_(before)
        assert torch.equal(forward(), replayed), (size, i)
        assert torch.equal(cache, written)
        subject.plan(batch)
        cache.copy_(before)
        eager = forward()
        torch.testing.assert_close(replayed, eager, atol=1e-2, rtol=1e-2)
        assert torch.equal(cache, written) and replayed.isfinite().all()
        assert not replayed[batch.num_tokens :].count_nonzero(), (size, i)


def test_compiles_ahead_what_it_loads() -> None:
    with torch.inference_mode():
        check(FlashInferMlaAttention([spec(16)], 16), BATCHES["mixed"], device="cuda")
    found = latent_modules(DTYPE, [spec(16)])
    assert len(found) == 2 and all(wanted.module.is_compiled for wanted in found)
