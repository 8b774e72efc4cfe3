"""Decodes whose leading blocks are read once on a GPU: kernels of real shapes, graphs, whole engines."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.attention.base import AttentionBatch, GraphAttention, GraphForm
from kernels.attention.flashinfer import FlashInferAttention
from kernels.attention.flashinfer_fp8 import FlashInferFp8Attention
from kernels.attention.flashinfer_mla import FlashInferMlaAttention
from kernels.attention.shared_prefixes import SharingCost
from kernels.attention.triton_paged import TritonPagedAttention
from kernels.backends.select import probe
from kernels.interface.attention_spec import AttentionSpec, MlaDims
from tests import fused_latents
from tests.distributed.engine_harness import Event, make_request
from tests.gpu.test_cuda_graphs import alone, check_answers, configure
from tests.gpu.test_cuda_graphs import checkpoint as checkpoint
from tests.shared_case import Groups, reads, share, share_latents, use_cascade, with_groups
from tests.unit.test_kernels_attention import Pages, Seqs, check_layer

pytestmark = pytest.mark.gpu
MISSING = probe("cuda") if torch.cuda.is_available() else None
BLOCK, ROWS, BLOCKS = 16, 64, 600
SHAPES = [(32, 4, 128), (16, 2, 256), (64, 8, 64), (8, 8, 128), (40, 2, 128), (12, 1, 128)]
BATCHES: dict[str, tuple[Seqs, Groups]] = {
    "one_group": ([(4096 + 37 * row, 1) for row in range(60)], [(range(60), 256)]),
    "two_rows": ([(2100, 1), (2048, 1), (9, 1)], [((0, 1), 128)]),
    "several_groups": (
        [(640 + row % 5 * 300, 1) for row in range(50)],
        [(range(10), 40), (range(10, 12), 21), (range(15, 40), 33), ((41, 49), 1)],
    ),
}
MIXED: tuple[Seqs, Groups] = (
    [*[(1000 + row, 1) for row in range(20)], (0, 30), (100, 13)],
    [(range(3, 17), 60)],
)


def needs(backend: type[GraphAttention]) -> None:
    """Skip where the backend cannot run."""
    if MISSING is not None and (reason := MISSING.get(f"attention.{backend.name}")):
        pytest.skip(reason)


def prepare(
    backend: type[GraphAttention],
    spec: AttentionSpec,
    case: tuple[Seqs, Groups],
    dtype: torch.dtype = torch.bfloat16,
    rows: int = ROWS,
) -> tuple[Pages, AttentionBatch, GraphAttention]:
    needs(backend)
    seqs, groups = case
    padding = rows - sum(count for _, count in seqs)
    pages = Pages(seqs, [spec], BLOCK, dtype, padding)
    share(pages, groups)
    pages.move("cuda")
    attention = backend([spec], BLOCK)
    use_cascade(attention)
    attention.bind(pages.caches)
    # Backends take the cost from the shape when they are built, or bound.
    attention.sharing_cost = SharingCost(1, 1)
    if isinstance(attention, FlashInferAttention):
        assert attention._sharing is not None
        attention._sharing._attention.sharing_cost = SharingCost(1, 1)
    return pages, with_groups(pages.batch(), groups), attention


def check_output(pages: Pages, attention: GraphAttention) -> None:
    (layer,) = pages.layers
    check_layer(pages, layer, attention(layer.q, layer.k, layer.v, 0, layer.sinks))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("label", BATCHES)
@torch.inference_mode()
def test_triton(label: str, shape: tuple[int, int, int], dtype: torch.dtype):
    heads, kv_heads, head_dim = shape
    spec = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, sinks=True)
    pages, batch, attention = prepare(TritonPagedAttention, spec, BATCHES[label], dtype)
    attention.plan(batch)
    check_output(pages, attention)
    assert reads(attention)[0] > 1


@pytest.mark.parametrize("shape", SHAPES[:4])
@pytest.mark.parametrize("label", BATCHES)
@torch.inference_mode()
def test_fp8(label: str, shape: tuple[int, int, int]):
    heads, kv_heads, head_dim = shape
    spec = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5, fp8_cache=True)
    pages, batch, attention = prepare(FlashInferFp8Attention, spec, BATCHES[label])
    attention.plan(batch)
    check_output(pages, attention)
    assert reads(attention)[0] > 1


@pytest.mark.parametrize("shape", SHAPES[:3])
@pytest.mark.parametrize("case", [*BATCHES.values(), MIXED], ids=[*BATCHES, "mixed"])
@torch.inference_mode()
def test_flashinfer(case: tuple[Seqs, Groups], shape: tuple[int, int, int]):
    """Its own kernels compute the prompts beside the decodes."""
    heads, kv_heads, head_dim = shape
    spec = AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5)
    pages, batch, attention = prepare(FlashInferAttention, spec, case)
    attention.plan(batch)
    check_output(pages, attention)
    assert reads(attention)[0] > 1


GRAPHS = [
    (FlashInferAttention, "one_group", False),
    (FlashInferAttention, "several_groups", False),
    (FlashInferAttention, "mixed", False),
    (FlashInferFp8Attention, "several_groups", True),
    (TritonPagedAttention, "one_group", False),
    (TritonPagedAttention, "mixed", False),
    (TritonPagedAttention, "mixed", True),
]


@pytest.mark.parametrize(("backend", "label", "fp8"), GRAPHS)
@torch.inference_mode()
def test_a_graph_captured_without_sequences(backend: type[GraphAttention], label: str, fp8: bool):
    """One graph serves steps with groups, without any, and with groups again."""
    spec = AttentionSpec(32, 4, 128, 0.1, fp8_cache=fp8)
    case = MIXED if label == "mixed" else BATCHES[label]
    pages, batch, attention = prepare(backend, spec, case)
    prompts = label == "mixed"
    if prompts and not attention.mixed_graph:
        pytest.skip("its steps with prompts are not captured")
    (layer,) = pages.layers
    attention.reserve_graphs(ROWS, ROWS, BLOCKS)
    form = attention.form(batch, ROWS, prompts=prompts)
    assert form == (GraphForm.SHARED_MIXED if prompts else GraphForm.SHARED_DECODES)
    dummy = AttentionBatch.dummy_decodes(ROWS, torch.device("cuda"))
    attention.plan_graph(dummy, ROWS, form)
    given = [layer.q.clone(), layer.k.clone(), layer.v.clone()]
    rows = [it.clone() for it in given]
    attention(*rows, 0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(*rows, 0)
    alone = replace(batch, prefix_groups_cpu=None, prefix_blocks_cpu=None)
    for planned, shares in ((batch, True), (alone, False), (batch, True)):
        before, _ = reads(attention)
        for row, values in zip(rows, given, strict=True):
            row.copy_(values)
        out.fill_(7)
        attention.plan_graph(planned, ROWS, form)
        graph.replay()
        check_layer(pages, layer, out)
        assert (reads(attention)[0] > before) == shares


LATENTS: tuple[Seqs, Groups] = (
    [(2000 + 11 * row, 1) for row in range(50)],
    [(range(20), 100), (range(22, 30), 120), (range(31, 50), 7)],
)


def latent_attention(num_heads: int) -> FlashInferMlaAttention:
    dims = MlaDims(rank=512, rope_dim=64, nope_dim=128, value_dim=128)
    spec = AttentionSpec(num_heads, 1, 192, 0.1, mla=dims)
    needs(FlashInferMlaAttention)
    attention = FlashInferMlaAttention([spec], BLOCK)
    use_cascade(attention)
    return attention


@pytest.mark.parametrize("num_heads", [16, 20, 64])
@pytest.mark.parametrize("graph", [0, ROWS])
@torch.inference_mode()
def test_latents(num_heads: int, graph: int):
    attention = latent_attention(num_heads)
    seqs, groups = LATENTS
    fused_latents.check(attention, seqs, device="cuda", graph=graph, groups=groups)
    assert reads(attention)[0] == 47
    fused_latents.check(attention, seqs, device="cuda", graph=graph)


@pytest.mark.parametrize("num_heads", [16, 20])
@torch.inference_mode()
def test_a_graph_of_latents(num_heads: int):
    """Captured without sequences; replayed with groups, without any, and with groups again."""
    attention = latent_attention(num_heads)
    seqs, groups = LATENTS
    padding = ROWS - len(seqs)
    pages = Pages(seqs, [], BLOCK, torch.bfloat16, padding)
    layer = fused_latents.FusedRows(pages, attention.spec, padding, "cuda")
    share_latents(pages, [layer], groups)
    pages.move("cuda")
    batch = with_groups(pages.batch(), groups)
    attention.bind([layer.cache])
    attention.reserve_graphs(ROWS, ROWS, BLOCKS)
    form = attention.form(batch, ROWS, prompts=False)
    assert form == GraphForm.SHARED_DECODES
    dummy = AttentionBatch.dummy_decodes(ROWS, torch.device("cuda"))
    attention.plan_graph(dummy, ROWS, form)
    given = layer.q.clone(), layer.new.clone()

    def forward() -> torch.Tensor:
        layer.q, layer.new = (it.clone() for it in given)
        return layer.attend(attention, 0)

    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = forward()
    kv_up = layer.kv_up
    alone = replace(batch, prefix_groups_cpu=None, prefix_blocks_cpu=None)
    for planned in (batch, alone, batch):
        out.fill_(7)
        attention.plan_graph(planned, ROWS, form)
        graph.replay()
        layer.kv_up = kv_up
        fused_latents.check_layer(pages, layer, out)


def shared_traffic() -> list[Event]:
    """Requests with two beginnings that arrive and end at any step."""
    chance = random.Random(3)
    stems = [[chance.randrange(256) for _ in range(96)] for _ in range(2)]
    events, step = [], 0
    for number in range(60):
        step += chance.choice([0, 0, 1, 5])
        prompt = chance.choice(stems) + [chance.randrange(256) for _ in range(chance.randint(1, 9))]
        params: dict[str, Any] = {"max_tokens": chance.randint(4, 40)}
        events.append(Event(step, 0, make_request(str(number), prompt, **params)))
    return events


@pytest.mark.parametrize("graphs", ["auto", False])
def test_whole_engines(monkeypatch: pytest.MonkeyPatch, checkpoint: Path, graphs: Any):
    """Tokens that float32 would choose, with sequences that join and leave a group."""
    cost = SharingCost(1, 1)
    monkeypatch.setattr(SharingCost, "on_gpu", classmethod(lambda cls, *_: cost))
    events = shared_traffic()
    config = configure(checkpoint, cuda_graphs=graphs)
    answers = alone(config, events)
    check_answers(checkpoint, events, [answers])
    assert answers.shared_prefix_rows > 100
    kernels = config.kernels.model_copy(update={"cascade": "off"})
    off = alone(config.model_copy(update={"kernels": kernels}), events)
    assert not off.shared_prefix_rows
    check_answers(checkpoint, events, [off])
