"""Paged attention with sinks and windows against dense attention in float32."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.attention.base import AttentionBatch, GraphForm
from kernels.attention.triton_paged import TritonPagedAttention
from kernels.interface.attention_spec import AttentionSpec
from tests.in_turn import in_turn
from tests.triton.device import COMPILED, DEVICE, compiled_only
from tests.unit.test_kernels_attention import BATCHES, Pages, Seqs, check, check_layer

LAYERS = (
    AttentionSpec(8, 1, 16, 0.3, window=9, sinks=True),
    AttentionSpec(8, 1, 16, 0.3, sinks=True),
    AttentionSpec(16, 2, 24, 0.2, window=70, sinks=True),
    AttentionSpec(8, 1, 16, 0.3),
)
FP8_LAYERS = [
    replace(spec, head_dim=32 if spec.window == 70 else 16) for spec in LAYERS
]  # powers of two
# Batches of few tiles: the interpreter takes a second for some hundred.
SHORT = ["one_decode", "decodes", "first_chunks", "continued_chunks", "mixed", "idle"]
LONG = sorted(BATCHES.keys() - {*SHORT})


@pytest.mark.parametrize("dtype", [torch.float32, *compiled_only(torch.bfloat16, torch.float16)])
@pytest.mark.parametrize(
    "label",
    [
        *SHORT,
        pytest.param("very_different_lengths", marks=pytest.mark.exhaustive),
        *compiled_only(*LONG),
    ],
)
@torch.inference_mode()
def test_equals_dense_attention(label: str, dtype: torch.dtype):
    check(
        BATCHES[label],
        specs=LAYERS,
        padding=2,
        dtype=dtype,
        stale=True,
        backend=TritonPagedAttention,
        device=DEVICE,
    )


@pytest.mark.parametrize(
    ("label", "dtype"),
    in_turn(2, ["mixed", "decodes", *compiled_only(*BATCHES)], [torch.float32, torch.bfloat16]),
)
@torch.inference_mode()
def test_fp8_cache_equals_dense_attention_over_rounded_values(label: str, dtype: torch.dtype):
    check(
        BATCHES[label],
        specs=FP8_LAYERS,
        padding=2,
        dtype=dtype,
        fp8=True,
        rounded=not COMPILED,
        stale=True,
        backend=TritonPagedAttention,
        device=DEVICE,
    )


DECODES: dict[str, tuple[Seqs, GraphForm]] = {
    "even": ([(5, 1), (0, 1), (90, 1)], GraphForm.EVEN_DECODES),
    "one_long": ([(3, 1), (1300, 1), (70, 1)], GraphForm.DECODES),
    "all_long": ([(640, 1), (600, 1)], GraphForm.EVEN_DECODES),
    "none": ([], GraphForm.EVEN_DECODES),
}
GRAPH_ROWS = 4


@pytest.mark.parametrize("dtype", [torch.float32, *compiled_only(torch.bfloat16)])
@pytest.mark.parametrize(
    ("label", "fp8"),
    [*((label, False) for label in DECODES), ("one_long", True), *compiled_only(("even", True))],
)
@torch.inference_mode()
def test_plans_of_graphs_equal_dense_attention(label: str, dtype: torch.dtype, fp8: bool):
    """Padded rows are zero and their slots are not written; the general form serves any batch."""
    seqs, form = DECODES[label]
    specs = [replace(spec, fp8_cache=True) for spec in FP8_LAYERS] if fp8 else LAYERS
    for chosen in {form, GraphForm.DECODES}:
        pages = Pages(seqs, specs, 16, dtype, GRAPH_ROWS - len(seqs), rounded=not COMPILED)
        pages.move(DEVICE)
        attention = TritonPagedAttention(specs, 16)
        attention.bind(pages.caches)
        attention.reserve_graphs(GRAPH_ROWS, GRAPH_ROWS, 100)
        batch = pages.batch()
        if DEVICE == "cpu":  # the cut depends on the GPU's size
            assert attention.form(batch, GRAPH_ROWS, prompts=False) == form
        attention.plan_graph(batch, GRAPH_ROWS, chosen)
        for number, layer in enumerate(pages.layers):
            out = attention(layer.q, layer.k, layer.v, number, layer.sinks)
            check_layer(pages, layer, out)


@pytest.mark.parametrize("label", ["even", "one_long", *compiled_only("all_long")])
@pytest.mark.parametrize("fp8", [False, True])
@torch.inference_mode()
def test_decodes_may_be_shorter_than_planned(label: str, fp8: bool):
    """A plan for longer sequences, several of them one after the other, and one with a chunk behind the end."""
    seqs, _ = DECODES[label]
    specs = [replace((FP8_LAYERS if fp8 else LAYERS)[it], fp8_cache=fp8) for it in (1, 3)]
    padding = GRAPH_ROWS - len(seqs)
    pages = Pages(seqs, specs, 16, torch.float32, padding, rounded=not COMPILED)
    pages.move(DEVICE)
    attention = TritonPagedAttention(specs, 16)
    attention.bind(pages.caches)
    attention.reserve_graphs(GRAPH_ROWS, GRAPH_ROWS, 100)
    batch = pages.batch()
    lens = torch.zeros(GRAPH_ROWS, dtype=torch.int32)
    lens[: len(seqs)] = torch.from_numpy(batch.seq_lens_cpu)
    slots = torch.full((GRAPH_ROWS,), -1)
    slots[: len(seqs)] = batch.slot_mapping
    nowhere = torch.full_like(slots, -1)
    more = np.array([7, 300, 1][: len(seqs)], dtype=np.int32)
    longer = replace(batch, seq_lens_cpu=batch.seq_lens_cpu + more, slot_mapping=nowhere)
    for form in GraphForm.EVEN_DECODES, GraphForm.DECODES:
        attention.plan_graph(longer, GRAPH_ROWS, form)
        for shorter in (lens.clamp(max=1), lens):
            last = shorter is lens
            attention.shorten(shorter.to(DEVICE), (slots if last else nowhere).to(DEVICE))
            for number, layer in enumerate(pages.layers if last else ()):
                out = attention(layer.q, layer.k, layer.v, number, layer.sinks)
                check_layer(pages, layer, out)


MIXED_ROWS, MIXED_SEQS = 40, 6
MIXED: dict[str, Seqs] = {
    "decodes_and_prompts": [(90, 1), (3, 1), (0, 17), (20, 9)],
    "prompts_alone": [(0, 12), (70, 5)],
    "decodes_alone": [(5, 1), (700, 1)],
    "many": [(5, 1), (9, 1), (0, 2), (4, 3), (0, 9), (30, 8)],
    "full": [(2, 1), (0, 39)],
    "none": [],
}


@pytest.mark.parametrize(
    ("label", "fp8"),
    [
        *(("decodes_and_prompts", False), ("full", False)),
        *compiled_only(*((it, fp8) for it in MIXED for fp8 in (False, True))),
    ],
)
@torch.inference_mode()
def test_plans_of_graphs_with_prompts_equal_dense_attention(label: str, fp8: bool):
    """Padded rows are zero, and every plan has the addresses and launches of the first."""
    specs = [replace(spec, fp8_cache=True) for spec in FP8_LAYERS] if fp8 else LAYERS
    seqs = MIXED[label]
    padding = MIXED_ROWS - sum(count for _, count in seqs)
    pages = Pages(seqs, specs, 16, torch.float32, padding, rounded=not COMPILED)
    pages.move(DEVICE)
    attention = TritonPagedAttention(specs, 16)
    attention.bind(pages.caches)
    attention.reserve_graphs(MIXED_ROWS, MIXED_SEQS, 100)
    dummy = AttentionBatch.dummy_decodes(MIXED_SEQS, torch.device(DEVICE))
    attention.plan_graph(dummy, MIXED_ROWS, GraphForm.MIXED)
    captured = all_addresses(attention)
    batch = pages.batch()
    assert attention.form(batch, MIXED_ROWS, prompts=True) == GraphForm.MIXED
    attention.plan_graph(batch, MIXED_ROWS, GraphForm.MIXED)
    assert all_addresses(attention) == captured
    for number, layer in enumerate(pages.layers):
        out = attention(layer.q, layer.k, layer.v, number, layer.sinks)
        check_layer(pages, layer, out)
        assert not out[MIXED_ROWS - padding :].count_nonzero()


@pytest.mark.parametrize("zeros", [128, 600])
@torch.inference_mode()
def test_values_of_zeros_count_in_the_softmax_of_an_fp8_cache(zeros: int):
    """The first `zeros` values of each sequence: of whole tiles before other values, of a whole chunk of keys."""
    specs = [AttentionSpec(8, 1, 16, 0.3, fp8_cache=True)]
    seqs = [(599, 1), (150, 9)]
    pages = Pages(seqs, specs, 16, torch.float32, 0, rounded=not COMPILED)
    (layer,) = pages.layers
    new = layer.v.split([count for _, count in seqs])
    for (context, _), key, value, slots, v in zip(
        seqs, layer.keys, layer.values, pages.slots_of, new, strict=True
    ):
        value[:zeros] = 0
        v[:] = value[context:]
        layer._write(slots[:context], key[:context], value[:context])
    pages.move(DEVICE)
    attention = TritonPagedAttention(specs, 16)
    attention.bind(pages.caches)
    attention._programs = 8  # of a GPU that cuts the decode into chunks
    attention.plan(pages.batch())
    check_layer(pages, layer, attention(layer.q, layer.k, layer.v, 0))


@torch.inference_mode()
def test_plans_of_one_graph_share_addresses_and_launches():
    found = []
    attention = TritonPagedAttention(LAYERS, 16)
    first = Pages([(5, 1)], LAYERS, 16, torch.float32, 0)
    first.move(DEVICE)
    attention.bind(first.caches)
    attention.reserve_graphs(GRAPH_ROWS, GRAPH_ROWS, 100)
    batches = [
        AttentionBatch.dummy_decodes(GRAPH_ROWS, torch.device(DEVICE)),
        *(Pages(seqs, LAYERS, 16, torch.float32, 0) for seqs, _ in DECODES.values()),
    ]
    for batch in batches:
        if isinstance(batch, Pages):
            batch.move(DEVICE)
            batch = batch.batch()
        attention.plan_graph(batch, GRAPH_ROWS, GraphForm.DECODES)
        found.append({window: addresses(it) for window, it in attention.layers.items()})
    assert all(one == found[0] for one in found)


def all_addresses(attention: TritonPagedAttention) -> object:
    """Those of all layers and of the tiles of prompts."""
    prompts = attention._prompts
    assert prompts is not None
    tiles = (*prompts.tiles, prompts.starts, prompts.lens)
    return (
        {window: addresses(it) for window, it in attention.layers.items()},
        [(it.data_ptr(), it.shape) for it in tiles],
    )


def addresses(layers: object) -> list[object]:
    """Address and shape of every tensor that a captured forward reads, and all launch constants."""
    chunks = layers.chunks
    tensors = (
        *(layers.slots, layers.block_table, chunks.block_table),
        *(chunks.seqs, chunks.firsts, chunks.ends, chunks.starts),
    )
    return [chunks.cut, *((it.data_ptr(), it.shape, it.stride()) for it in tensors)]
