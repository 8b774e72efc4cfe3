"""flashinfer's attention: the contract of all backends, graphs, and the kernels of ours around it."""

import pytest
import torch

from kernels.attention.base import AttentionSpec
from kernels.attention.flashinfer import HEAD_DIMS, FlashInferAttention
from kernels.fused import fused_kernels
from kernels.select import probe
from tests.unit.test_kernels_attention import BATCHES, NUM_LAYERS, Pages, Seqs, check

MISSING = probe("cuda").missing.get("flashinfer") if torch.cuda.is_available() else "needs a GPU"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

LONG: dict[str, Seqs] = {
    "long_decodes": [(8191, 1), (17, 1), (4096, 1), (2047, 1), (0, 1)],
    "long_prompt": [(0, 4096)],
    "long_continued": [(5000, 1), (7000, 1500), (16, 33)],
    "many_decodes": [(37 * i % 900, 1) for i in range(300)],
}
QWEN3 = {"heads": (32, 4), "head_dim": 128}


def run(seqs: Seqs, dtype: torch.dtype = torch.bfloat16, **shape) -> FlashInferAttention:
    shape = {"padding": 2, "block_size": 16, **shape}
    return check(seqs, dtype=dtype, backend=FlashInferAttention, device="cuda", **shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("label", BATCHES)
def test_equals_dense_attention(label: str, dtype: torch.dtype):
    run(BATCHES[label], dtype, **QWEN3)


@pytest.mark.parametrize("label", LONG)
def test_long_contexts(label: str):
    run(LONG[label], **QWEN3)


@pytest.mark.parametrize("block_size", [1, 64])
@pytest.mark.parametrize("label", ["decodes", "mixed", "very_different_lengths"])
def test_block_sizes(label: str, block_size: int):
    run(BATCHES[label], block_size=block_size, **QWEN3)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (64, 4), (40, 2)])
def test_head_groups(heads: tuple[int, int]):
    run(BATCHES["mixed"], heads=heads, head_dim=128)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("label", ["mixed", "very_different_lengths", "longer_than_a_query_chunk"])
def test_head_dims(label: str, head_dim: int):
    run(BATCHES[label], heads=(8, 1), head_dim=head_dim)


def test_plans_do_not_leak_into_the_next():
    attention = run(BATCHES["mixed"], **QWEN3)
    for label in ("idle", "decodes", "longer_than_a_query_chunk", "idle", "continued_chunks"):
        run(BATCHES[label], attention=attention, **QWEN3)


STEPS: dict[int, list[Seqs]] = {
    8: [[(5, 1)] * 8, [(900, 1)] * 3, [(9, 1)], []],
    16: [[(2047, 1), (0, 1), *[(40, 1)] * 10], [(17, 1)] * 16, []],
    # A long one among many is cut, and the last rows are empty.
    100: [[(60, 1)] * 100, [*[(33, 1)] * 80, (2047, 1), (1999, 1)], [(100, 1)] * 7, []],
}


@torch.inference_mode()
def test_graphs_equal_eager():
    """Graphs are replayed with other lengths than they were captured with, sizes and forms in turn."""
    spec = AttentionSpec(32, 4, 128, 16, 0.1)
    attention = FlashInferAttention(spec)
    pages = {
        (size, i): Pages(seqs, spec, torch.bfloat16, padding=0)
        for size, steps in STEPS.items()
        for i, seqs in enumerate(steps)
    }
    for page in pages.values():
        page.move("cuda")
    num_blocks = max(page.caches[0].shape[1] for page in pages.values())
    caches = [torch.zeros(2, num_blocks, 16, 4, 128).cuda().bfloat16() for _ in range(NUM_LAYERS)]
    attention.bind(caches)
    attention.reserve_graphs(100, 128)
    q = torch.zeros(100, 32, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.zeros(100, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def forward(size: int) -> list[torch.Tensor]:
        return [attention(q[:size], k[:size], v[:size], layer) for layer in range(NUM_LAYERS)]

    assert attention.graph_forms(8) == (True,) and attention.graph_forms(1000) == (False, True)
    assert attention.graph_cuts(pages[100, 1].batch(), 100)
    assert not attention.graph_cuts(pages[100, 0].batch(), 100)
    graphs = {}
    for size in reversed(STEPS):
        for cuts in attention.graph_forms(size):
            attention.plan_graph(pages[size, 0].batch(), size, cuts)
            with torch.cuda.stream(torch.cuda.Stream()):
                forward(size)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = forward(size)
            graphs[size, cuts] = graph, out
    for (size, i), page in sorted(pages.items(), key=lambda item: item[0][1]):
        num_seqs = len(page.seqs)
        for buffer, rows in ((q, page.q), (k, page.k), (v, page.v)):
            buffer.fill_(7.0)[:num_seqs] = rows

        def reset(page: Pages = page) -> None:
            for mine, theirs in zip(caches, page.caches, strict=True):
                mine.zero_()[:, : theirs.shape[1]] = theirs

        reset()
        attention.plan(page.batch())
        expected = forward(size)
        written = [cache.clone() for cache in caches]
        for cuts in attention.graph_forms(size):
            reset()
            attention.plan_graph(page.batch(), size, cuts)
            graph, out = graphs[size, cuts]
            graph.replay()
            for layer in range(NUM_LAYERS):
                torch.testing.assert_close(out[layer], expected[layer], atol=1e-2, rtol=1e-2)
                assert torch.count_nonzero(out[layer][num_seqs:]) == 0, (size, i, cuts)
                assert torch.equal(caches[layer], written[layer])


@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("label", ["decodes", "mixed", "idle"])
def test_fused_norm_rotate_and_store(label: str, padding: int):
    """One kernel writes what norm, rotation and write to the cache do one after the other."""
    heads, kv_heads, head_dim = 32, 4, 128
    spec = AttentionSpec(heads, kv_heads, head_dim, 16, 0.1)
    pages = Pages(BATCHES[label], spec, torch.bfloat16, padding)
    pages.move("cuda")
    generator = torch.Generator().manual_seed(5)
    rows = len(pages.q)
    qkv = torch.cat((pages.q, pages.k, pages.v), dim=1)
    weight = torch.rand(heads + kv_heads, head_dim, generator=generator).cuda().bfloat16()
    angles = torch.randn(rows, 1, head_dim // 2, generator=generator).cuda()
    rotation = torch.polar(torch.ones_like(angles), angles)
    fused_caches = [cache.clone() for cache in pages.caches]
    attention = FlashInferAttention(spec)

    attention.bind(pages.caches)
    attention.plan(pages.batch())
    qk = qkv[:, : heads + kv_heads].clone()
    fused_kernels("cuda").norm_rotate(qk, weight, 1e-6, rotation)
    expected = attention(qk[:, :heads], qk[:, heads:], pages.v, 0)

    attention.bind(fused_caches)
    attention.plan(pages.batch())
    q = attention.norm_rotate_store(qkv, weight, 1e-6, rotation, 0)
    assert torch.equal(q, qk[:, :heads])
    assert torch.equal(fused_caches[0], pages.caches[0])
    assert torch.equal(attention.attend(q, 0), expected)
