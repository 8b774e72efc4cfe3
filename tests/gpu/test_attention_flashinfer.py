"""flashinfer's attention: the contract of all backends, graphs, and the kernels of ours around it."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.attention.base import GraphForm
from kernels.attention.flashinfer import HEAD_DIMS, FlashInferAttention
from kernels.attention.flashinfer_modules import modules
from kernels.backends.select import probe
from kernels.fused import fused_kernels
from kernels.interface.attention_spec import AttentionSpec
from tests.unit.test_kernels_attention import BATCHES, NUM_LAYERS, Pages, Seqs, check
from workers.kv_cache.caches import allocate_kv_caches

MISSING = probe("cuda").get("attention.flashinfer") if torch.cuda.is_available() else "needs a GPU"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

LONG: dict[str, Seqs] = {
    "long_decodes": [(8191, 1), (17, 1), (4096, 1), (2047, 1), (0, 1)],
    "long_prompt": [(0, 4096)],
    "long_continued": [(5000, 1), (7000, 1500), (16, 33)],
    "many_decodes": [(37 * i % 900, 1) for i in range(300)],
}
QWEN3 = {"heads": (32, 4), "head_dim": 128}
EXACTLY = {"atol": 0, "rtol": 0, "equal_nan": True}  # one block of the pages holds NaN


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
    for label in ("mixed", "long_first_chunks"):
        run(BATCHES[label], heads=heads, head_dim=128)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("label", ["mixed", "very_different_lengths", "long_first_chunks"])
def test_head_dims(label: str, head_dim: int):
    run(BATCHES[label], heads=(8, 1), head_dim=head_dim)


@pytest.mark.parametrize("label", [*BATCHES, *LONG])
def test_layers_of_different_shapes(label: str):
    run((BATCHES | LONG)[label], specs=DIFFERENT_LAYERS)


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
DRAFT_STEPS: dict[int, list[Seqs]] = {
    4: [[(700, 4)], [(9, 1)], [(33, 2), (5, 2)][::-1], []],
    24: [[(2040, 4), (3, 4), (100, 4)], [(17, 1), (15, 1), *[(64, 3)] * 5], [(31, 1)] * 24, []],
    # More rows than a table of sequences has.
    320: [
        [(60, 4)] * 80,
        [*[(33, 1)] * 20, (1999, 1), *[(500, 4)] * 60, (2040, 3)],
        [(100, 1)] * 7,
        [],
    ],
}
MIXED_STEPS: dict[int, list[Seqs]] = {
    16: [[(0, 16)], [(33, 1), (5, 1), (7, 9), (0, 4)], [(900, 1)] * 5, []],
    # Enough rows for a form of prompts that are all new: alone, behind decodes, none; one that is not.
    1024: [
        [(0, 700), (0, 130), (0, 194)],
        [*[(100, 1)] * 60, (1999, 1), (0, 33), (0, 800)],
        [(50, 1)] * 90,
        [],
        [(3, 1), (0, 500), (1, 500)],
    ],
    # More rows than sequences; contexts; a prompt of one token; all decodes; nothing.
    600: [
        [(0, 300), (0, 299), (40, 1)][::-1],
        [*[(100, 1)] * 90, (1000, 1), (1, 1), (0, 200), (64, 130), (7, 2)],
        [(1500, 500), (17, 33), (15, 1)][::-1],
        [(0, 1)] * 100,
        [],
    ],
}
MAX_SEQS = 100


QWEN3_SPEC = AttentionSpec(32, 4, 128, 0.1)
# Layers of one model with other heads, head dims, groups and scales; the third as the first.
DIFFERENT_LAYERS = (
    QWEN3_SPEC,
    AttentionSpec(16, 8, 64, 0.2),
    QWEN3_SPEC,
    AttentionSpec(8, 1, 128, 0.05),
)


class Replayed:
    """Attention of all layers, captured with fixed inputs in several sizes and forms."""

    def __init__(self, steps: dict[int, list[Seqs]], specs: Sequence[AttentionSpec]):
        self.attention = FlashInferAttention(specs, 16)
        self.pages = {
            (size, i): Pages(seqs, specs, 16, torch.bfloat16, padding=0)
            for size, batches in steps.items()
            for i, seqs in enumerate(batches)
        }
        for page in self.pages.values():
            page.move("cuda")
        num_blocks = max(page.num_blocks for page in self.pages.values())
        new = {"device": "cuda", "dtype": torch.bfloat16}
        groups = FlashInferAttention.kv_groups(specs)
        self.caches = allocate_kv_caches(
            groups, num_blocks, 16, torch.bfloat16, torch.device("cuda")
        )
        self.attention.bind(self.caches)
        self.attention.reserve_graphs(max(steps), MAX_SEQS, 128)
        self.new = [  # q, k, v of each layer
            [
                torch.zeros(max(steps), heads, spec.head_dim, **new)
                for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
            ]
            for spec in specs
        ]
        self.graphs: dict[tuple[int, GraphForm], tuple] = {}

    def forward(self, size: int) -> list[torch.Tensor]:
        return [
            self.attention(*(rows[:size] for rows in new), layer).clone()
            for layer, new in enumerate(self.new)
        ]

    def capture(self, size: int, form: GraphForm) -> None:
        self.attention.plan_graph(self.pages[size, 0].batch(), size, form)
        with torch.cuda.stream(torch.cuda.Stream()):
            self.forward(size)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = self.forward(size)
        self.graphs[size, form] = graph, out

    def check(
        self, size: int, i: int, forms: tuple[GraphForm, ...], *, most_behind: int = 0
    ) -> None:
        """Every form against the plain plan, in output and caches.

        most_behind   sequences are up to so many tokens shorter than the host believes
        """
        page = self.pages[size, i]
        num_tokens = len(page.slots)
        for new, layer in zip(self.new, page.layers, strict=True):
            for buffer, rows in zip(new, (layer.q, layer.k, layer.v), strict=True):
                buffer.fill_(7.0)[:num_tokens] = rows

        def reset() -> None:
            for mine, theirs in zip(self.caches, page.caches, strict=True):
                mine.zero_()[:, : theirs.shape[1]] = theirs

        reset()
        self.attention.plan(page.batch())
        expected = self.forward(size)
        written = [cache.clone() for cache in self.caches]
        for form in forms:
            reset()
            batch = page.batch()
            if most_behind:
                behind = np.arange(batch.num_seqs, dtype=np.int32) % (1 + most_behind)
                longer = batch.seq_lens_cpu + behind
                more = -(-int(longer.max(initial=1)) // 16) - batch.block_table.shape[1]
                batch = replace(
                    batch,
                    seq_lens_cpu=longer,
                    block_table=torch.nn.functional.pad(batch.block_table, (0, max(0, more))),
                    behind=torch.from_numpy(behind.astype(np.int64)).cuda(),
                )
            self.attention.plan_graph(batch, size, form)
            graph, out = self.graphs[size, form]
            graph.replay()
            for layer in range(len(self.new)):
                found, padding = out[layer][:num_tokens], out[layer][num_tokens:]
                close = {"atol": 1e-2, "rtol": 1e-2}
                torch.testing.assert_close(found, expected[layer][:num_tokens], **close)
                assert padding.isfinite().all(), (size, i, form)
                assert form >= GraphForm.NEW_PROMPTS or not padding.count_nonzero(), (size, i, form)
                torch.testing.assert_close(
                    *(self.caches[layer], written[layer]), **EXACTLY, msg=str((size, i, form))
                )


@pytest.mark.parametrize("specs", [(QWEN3_SPEC,) * NUM_LAYERS, DIFFERENT_LAYERS])
@torch.inference_mode()
def test_graphs_equal_eager(specs: Sequence[AttentionSpec]):
    """Graphs are replayed with other lengths than they were captured with, sizes and forms in turn."""
    case = Replayed(STEPS, specs)
    attention, pages = case.attention, case.pages
    even, cut = GraphForm.EVEN_DECODES, GraphForm.DECODES
    for case_of, form in (((8, 0), even), ((8, 1), cut), ((100, 0), even), ((100, 1), cut)):
        assert attention.forms(case_of[0], prompts=False) == (even, cut)
        if len(set(specs)) == 1:
            assert attention.form(pages[case_of].batch(), case_of[0], prompts=False) == form
    for size in reversed(STEPS):
        for form in attention.forms(size, prompts=False):
            case.capture(size, form)
    for size, i in sorted(pages, key=lambda key: key[1]):
        case.check(size, i, attention.forms(size, prompts=False))


@pytest.mark.parametrize("specs", [(QWEN3_SPEC,) * NUM_LAYERS, DIFFERENT_LAYERS])
@torch.inference_mode()
def test_captured_decodes_may_be_shorter_than_planned(specs: Sequence[AttentionSpec]):
    """Lengths on the device against a plan of these lengths: less by a page and more, and on other chunks."""
    sizes = {size: batches[:2] for size, batches in STEPS.items()}
    case = Replayed(sizes, specs)
    attention = case.attention
    lens, slots = torch.zeros(100, dtype=torch.int32).cuda(), torch.full((100,), -1).cuda()

    def forward(size: int) -> list[torch.Tensor]:
        attention.shorten(lens[:size].clone().clamp(max=1), slots[:size] * 0 - 1)
        attention.shorten(lens[:size], slots[:size])
        return case.forward(size)

    for size, form in ((size, form) for size in sizes for form in (0, 1)):
        attention.plan_graph(case.pages[size, 0].batch(), size, GraphForm(form))
        with torch.cuda.stream(torch.cuda.Stream()):
            forward(size)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = forward(size)
        for i in range(len(sizes[size])):
            page = case.pages[size, i]
            batch, count = page.batch(), len(page.slots)
            for new, layer in zip(case.new, page.layers, strict=True):
                for buffer, rows in zip(new, (layer.q, layer.k, layer.v), strict=True):
                    buffer.fill_(7.0)[:count] = rows
            for mine, theirs in zip(case.caches, page.caches, strict=True):
                mine.zero_()[:, : theirs.shape[1]] = theirs
            attention.plan(batch)
            expected = case.forward(size)
            more = np.arange(count, dtype=np.int32) * 13 % 40
            table = torch.cat((page.block_table, page.block_table[:, :1].expand(-1, 3)), 1)
            longer = replace(batch, seq_lens_cpu=batch.seq_lens_cpu + more, block_table=table)
            attention.plan_graph(longer, size, GraphForm(form))
            lens.zero_()[:count] = torch.from_numpy(batch.seq_lens_cpu).cuda()
            slots.fill_(-1)[:count] = page.slots
            graph.replay()
            for found, wanted in zip(out, expected, strict=True):
                close = {"atol": 1e-2, "rtol": 1e-2, "msg": str((size, i, form))}
                torch.testing.assert_close(found[:count], wanted[:count], **close)
                assert not found[count:].count_nonzero(), (size, i, form)


@pytest.mark.parametrize("specs", [(QWEN3_SPEC,) * NUM_LAYERS, DIFFERENT_LAYERS])
@torch.inference_mode()
def test_graphs_of_prompts_equal_eager(specs: Sequence[AttentionSpec]):
    case = Replayed(MIXED_STEPS, specs)
    if not case.attention.mixed_graph:
        pytest.skip("this GPU has no FlashAttention 3")
    attention, new = case.attention, []
    for size in sorted(MIXED_STEPS, reverse=True):
        for form in attention.forms(size, prompts=True):
            case.capture(size, form)
    for size, i in sorted(case.pages, key=lambda key: key[1]):
        best = attention.form(case.pages[size, i].batch(), size, prompts=True)
        case.check(size, i, tuple({best, GraphForm.MIXED}))
        new += [(size, i)] if best == GraphForm.NEW_PROMPTS else []
    assert new == [(1024, i) for i in range(4)]


@pytest.mark.parametrize("specs", [(QWEN3_SPEC,) * NUM_LAYERS, DIFFERENT_LAYERS])
@torch.inference_mode()
def test_graphs_of_drafts_equal_eager(specs: Sequence[AttentionSpec]):
    """Decodes with drafts and without, of very different lengths; the largest graph is captured first."""
    case = Replayed(DRAFT_STEPS, specs)
    if not case.attention.mixed_graph:
        pytest.skip("this GPU has no FlashAttention 3")
    for size in sorted(DRAFT_STEPS, reverse=True):
        assert case.attention.drafts_form(size) == GraphForm.DRAFTS
        case.capture(size, GraphForm.DRAFTS)
        assert case.attention.follows(size)
    for size, i in sorted(case.pages, key=lambda key: key[1]):
        case.check(size, i, (GraphForm.DRAFTS,))
        case.check(size, i, (GraphForm.DRAFTS,), most_behind=3)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("padding", [0, 2])
@pytest.mark.parametrize("label", ["decodes", "mixed", "idle"])
def test_fused_norm_rotate_and_store(label: str, padding: int, norm: bool):
    """One kernel writes what norm, rotation and write to the cache do one after the other."""
    heads, kv_heads, head_dim = 32, 4, 128
    spec = AttentionSpec(heads, kv_heads, head_dim, 0.1)
    pages = Pages(BATCHES[label], [spec], 16, torch.bfloat16, padding)
    pages.move("cuda")
    layer = pages.layers[0]
    generator = torch.Generator().manual_seed(5)
    rows = len(layer.q)
    qkv = torch.cat((layer.q, layer.k, layer.v), dim=1)
    weight = None
    if norm:
        weight = torch.rand(heads + kv_heads, head_dim, generator=generator).cuda().bfloat16()
    angles = torch.randn(rows, 1, head_dim // 2, generator=generator).cuda()
    rotation = torch.polar(torch.ones_like(angles), angles)
    fused_caches = [cache.clone() for cache in pages.caches]
    attention = FlashInferAttention([spec], 16)

    attention.bind(pages.caches)
    attention.plan(pages.batch())
    qk = qkv[:, : heads + kv_heads].clone()
    fused_kernels("cuda").norm_rotate(qk, weight, 1e-6, rotation)
    expected = attention(qk[:, :heads], qk[:, heads:], layer.v, 0)

    attention.bind(fused_caches)
    attention.plan(pages.batch())
    attention.store(qkv, 0, rotation, weight, 1e-6)
    assert torch.equal(qkv[:, : heads + kv_heads], qk) and torch.equal(qkv[:, -kv_heads:], layer.v)
    torch.testing.assert_close(fused_caches[0], pages.caches[0], **EXACTLY)
    assert torch.equal(attention.attend(qkv, 0), expected)


def test_compiles_ahead_what_it_loads():
    run(BATCHES["mixed"], **QWEN3)
    from flashinfer.jit.core import jit_spec_registry

    known = jit_spec_registry.get_all_specs()
    loaded = {name for name in known if "dtype_q_bf16" in name and "head_dim_qk_128" in name}
    found = modules(torch.bfloat16, 128)
    assert {wanted.module.name for wanted in found} == loaded
    assert all(wanted.module.is_compiled for wanted in found)
