"""Decodes whose leading blocks are read once, by the Triton kernels, against dense attention in float32."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.attention.base import AttentionBatch, GraphForm
from kernels.attention.triton_paged import TritonPagedAttention
from kernels.interface.attention_spec import AttentionSpec
from tests.shared_case import Groups, reads, share, use_cascade, with_groups
from tests.triton.device import COMPILED, DEVICE, compiled_only
from tests.unit.test_kernels_attention import Pages, Seqs, check_layer

BLOCK, BLOCKS = 16, 100
PLAIN = AttentionSpec(8, 1, 16, 0.3)
SINKS = AttentionSpec(8, 1, 16, 0.3, sinks=True)
WINDOW = AttentionSpec(8, 1, 16, 0.3, window=70, sinks=True)
TWO_HEADS = AttentionSpec(6, 2, 24, 0.2)  # 3 query heads for each KV head
ROWS = 9
BATCHES: dict[str, tuple[Seqs, Groups]] = {
    "all_share": ([(100, 1), (97, 1), (96, 1)], [((0, 1, 2), 6)]),
    "two_groups": (
        [(50, 1), (700, 1), (48, 1), (5, 1), (640, 1), (49, 1)],
        [((1, 4), 40), ((0, 2, 5), 3)],
    ),
    "nine_rows": ([(400 + 3 * row, 1) for row in range(9)], [(range(9), 24)]),
    "none_share": ([(5, 1), (90, 1)], []),
}
FEW = ["all_share", "two_groups"]


def attention_of(pages: Pages, specs: Any) -> TritonPagedAttention:
    attention = TritonPagedAttention(specs, BLOCK)
    use_cascade(attention)
    attention.bind(pages.caches)
    attention.reserve_graphs(ROWS, ROWS, BLOCKS)
    return attention


def check_all(pages: Pages, attention: TritonPagedAttention) -> None:
    for number, layer in enumerate(pages.layers):
        check_layer(pages, layer, attention(layer.q, layer.k, layer.v, number, layer.sinks))


def paged(label: str, specs: Any, dtype: torch.dtype, padding: int) -> tuple[Pages, AttentionBatch]:
    seqs, groups = BATCHES[label]
    pages = Pages(seqs, specs, BLOCK, dtype, padding, rounded=not COMPILED)
    share(pages, groups)
    pages.move(DEVICE)
    return pages, with_groups(pages.batch(), groups)


@pytest.mark.parametrize("dtype", [torch.float32, *compiled_only(torch.bfloat16, torch.float16)])
@pytest.mark.parametrize("label", BATCHES)
@pytest.mark.parametrize("specs", [(PLAIN, WINDOW, SINKS), (TWO_HEADS,)], ids=["sinks", "heads"])
@torch.inference_mode()
def test_equals_dense_attention(label: str, specs: Any, dtype: torch.dtype):
    """Layers with a window beside it read their own blocks."""
    pages, batch = paged(label, specs, dtype, 0)
    attention = attention_of(pages, specs)
    attention.plan(batch)
    check_all(pages, attention)
    _, groups = BATCHES[label]
    saved = sum((len(seqs) - 1) * blocks * BLOCK for seqs, blocks in groups)
    assert reads(attention) == (sum(len(seqs) for seqs, _ in groups), saved)


@pytest.mark.parametrize("dtype", [torch.float32, *compiled_only(torch.bfloat16)])
@pytest.mark.parametrize("label", ["two_groups", *compiled_only("nine_rows", "all_share")])
@torch.inference_mode()
def test_an_fp8_cache_equals_dense_attention_over_rounded_values(label: str, dtype: torch.dtype):
    specs = [replace(PLAIN, fp8_cache=True), replace(SINKS, head_dim=32, fp8_cache=True)]
    pages, batch = paged(label, specs, dtype, 0)
    attention = attention_of(pages, specs)
    attention.plan(batch)
    check_all(pages, attention)


@pytest.mark.parametrize("label", BATCHES)
@torch.inference_mode()
def test_one_graph_serves_steps_with_and_without_shared_blocks(label: str):
    """Every plan has the addresses and launches of the first; padding rows are zero."""
    specs = (SINKS, WINDOW)
    seqs, groups = BATCHES[label]
    pages, batch = paged(label, specs, torch.float32, ROWS - len(seqs))
    attention = attention_of(pages, specs)
    dummy = AttentionBatch.dummy_decodes(ROWS, torch.device(DEVICE))
    attention.plan_graph(dummy, ROWS, GraphForm.SHARED_DECODES)
    captured = addresses(attention)
    form = attention.form(batch, ROWS, prompts=False)
    assert (form == GraphForm.SHARED_DECODES) == bool(groups)
    assert form in attention.forms(ROWS, prompts=False)
    attention.plan_graph(batch, ROWS, GraphForm.SHARED_DECODES)
    assert addresses(attention) == captured
    check_all(pages, attention)
    assert bool(reads(attention)[0]) == bool(groups)


@torch.inference_mode()
def test_a_graph_with_prompts():
    seqs, groups = [(50, 1), (49, 1), (0, 17), (20, 9)], [((0, 1), 3)]
    rows, specs = 32, (SINKS, WINDOW)
    pages = Pages(seqs, specs, BLOCK, torch.float32, rows - 28)
    share(pages, groups)
    pages.move(DEVICE)
    attention = TritonPagedAttention(specs, BLOCK)
    use_cascade(attention)
    attention.bind(pages.caches)
    attention.reserve_graphs(rows, ROWS, BLOCKS)
    batch = with_groups(pages.batch(), groups)
    assert attention.form(batch, rows, prompts=True) == GraphForm.SHARED_MIXED
    assert attention.form(pages.batch(), rows, prompts=True) == GraphForm.MIXED
    attention.plan_graph(batch, rows, GraphForm.SHARED_MIXED)
    check_all(pages, attention)
    assert reads(attention) == (2, 3 * BLOCK)


def addresses(attention: TritonPagedAttention) -> list[tuple[int, torch.Size]]:
    """Those of all tensors that the kernels of decodes read."""
    found: list[torch.Tensor] = []
    for layers in attention.layers.values():
        parts = [vars(layers), vars(layers.chunks)]
        if layers.chunks.shared is not None:
            parts.append(vars(layers.chunks.shared))
        found += [it for part in parts for it in part.values() if isinstance(it, torch.Tensor)]
    return [(it.data_ptr(), it.shape) for it in found]
