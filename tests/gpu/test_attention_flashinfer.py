"""flashinfer's attention: the contract of all backends, graphs, and the kernels of ours around it."""

import pytest
import torch

from kernels.attention.base import AttentionSpec
from kernels.attention.flashinfer import HEAD_DIMS, FlashInferAttention
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


@torch.inference_mode()
def test_graphs_equal_eager():
    """Graphs of two sizes, captured on other lengths than they are replayed with, rows left empty."""
    spec = AttentionSpec(32, 4, 128, 16, 0.1)
    attention = FlashInferAttention(spec)
    steps = [[(5, 1)] * 8, [(900, 1)] * 3, [(2047, 1), (0, 1), *[(40, 1)] * 10], [(9, 1)], []]
    pages = [Pages(seqs, spec, torch.bfloat16, padding=0) for seqs in steps]
    num_blocks = max(page.caches[0].shape[1] for page in pages)
    caches = [torch.zeros(2, num_blocks, 16, 4, 128).cuda().bfloat16() for _ in range(NUM_LAYERS)]
    attention.bind(caches)
    attention.reserve_graphs(16, 128)
    q = torch.zeros(16, 32, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.zeros(16, 4, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    graphs = {}
    for page in pages:
        page.move("cuda")
    for size in (16, 8):
        attention.plan_graph(pages[0].batch(), size)
        for record in (False, True):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph) if record else torch.cuda.stream(torch.cuda.Stream()):
                out = [attention(q[:size], k[:size], v[:size], i) for i in range(NUM_LAYERS)]
            torch.cuda.synchronize()
        graphs[size] = graph, out
    for page, size in zip(pages, (8, 8, 16, 16, 8), strict=True):
        num_seqs = len(page.seqs)
        for mine, theirs in zip(caches, page.caches, strict=True):
            mine.zero_()[:, : theirs.shape[1]] = theirs
        for buffer, rows in ((q, page.q), (k, page.k), (v, page.v)):
            buffer.fill_(7.0)[:num_seqs] = rows
        attention.plan_graph(page.batch(), size)
        graph, out = graphs[size]
        graph.replay()
        found = [o.clone() for o in out]
        written = [cache.clone() for cache in caches]
        attention.plan(page.batch())
        for i, cache in enumerate(caches):
            cache.zero_()[:, : page.caches[i].shape[1]] = page.caches[i]
            expected = attention(q[:size], k[:size], v[:size], i)
            torch.testing.assert_close(found[i], expected, atol=1e-2, rtol=1e-2)
            assert torch.count_nonzero(found[i][num_seqs:]) == 0
            assert torch.equal(written[i], cache)
