"""How flashinfer's latent attention plans and calls: its kernels in torch's operators, ours in Triton's interpreter."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import flashinfer_mla
from kernels.attention.base import GraphForm
from kernels.attention.context_chunks import Piece, chunk_limit, cut_contexts
from kernels.attention.flashinfer_mla import FlashInferMlaAttention
from kernels.attention.flashinfer_mla_fp8 import FlashInferMlaFp8Attention
from kernels.interface.attention_spec import AttentionSpec, MlaDims
from tests.fused_latents import check, fake_flashinfer
from tests.shared_case import reads, use_cascade
from tests.triton.device import COMPILED
from tests.unit.test_kernels_attention import BATCHES

SPEC = AttentionSpec(3, 1, 24, 0.2, mla=MlaDims(rank=32, rope_dim=8, nope_dim=16, value_dim=16))
pytestmark = pytest.mark.skipif(COMPILED, reason="tests/gpu runs flashinfer itself")


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flashinfer's calls, and CUDA's that the host makes, on a machine without both."""
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer())
    for backend in (FlashInferMlaAttention, FlashInferMlaFp8Attention):
        monkeypatch.setattr(backend, "compile_kernels", lambda *_: None)
    event = SimpleNamespace(synchronize=lambda: None, record=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


def attention(block_size: int = 4, num_layers: int = 1, *, fp8: bool = False) -> Any:
    backend = FlashInferMlaFp8Attention if fp8 else FlashInferMlaAttention
    return backend([replace(SPEC, fp8_cache=fp8)] * num_layers, block_size)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("padding", [0, 3])
def test_equals_dense_attention(padding: int, fp8: bool) -> None:
    """Batches of few rows, because Triton's interpreter takes milliseconds for a row."""
    for label in ("decodes", "first_chunks", "continued_chunks", "mixed", "idle"):
        check(attention(fp8=fp8), BATCHES[label], padding=padding)


@pytest.mark.parametrize("fp8", [False, True])
def test_contexts_in_many_chunks(monkeypatch: pytest.MonkeyPatch, fp8: bool) -> None:
    """Chunks end within sequences and hold several; a new prompt lies between two with contexts."""
    monkeypatch.setattr(flashinfer_mla, "chunk_limit", lambda rows, block_size: 4 * block_size)
    seqs = [(5, 1), (9, 3), (0, 4), (21, 2), (3, 5), (2, 1)]
    check(attention(fp8=fp8), seqs)
    check(attention(block_size=2, fp8=fp8), seqs[1:5])
    check(attention(fp8=fp8), seqs, adapters=True)


@pytest.mark.parametrize("graph", [0, 8])
def test_adapters_beside_the_product_of_latents(graph: int) -> None:
    """Of two slots and none; rows of padding have none."""
    check(attention(), [(5, 1), (0, 1), (30, 1), (7, 1)], graph=graph, adapters=True)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("rows", [3, 8])
def test_planned_for_graphs(rows: int, fp8: bool) -> None:
    """Rows behind the decodes are empty; their output is zero and their latents are not stored."""
    for seqs in ([(5, 1), (0, 1), (30, 1)], [(7, 1)], []):
        check(attention(fp8=fp8), seqs, graph=rows)


SHARING = [(40, 1), (37, 1), (9, 1), (33, 1), (50, 1), (7, 1)]
SHARED_GROUPS = [((0, 1, 3), 8), ((2, 5), 1)]


def sharing() -> FlashInferMlaAttention:
    one = attention()
    use_cascade(one)
    return one


@pytest.mark.parametrize("rows", [0, 8, 10])
def test_latents_that_decodes_share(rows: int) -> None:
    """In a graph of 8 or 10 rows, or planned for one step, beside a prompt."""
    one = sharing()
    seqs = SHARING if rows else [*SHARING, (5, 4)]
    check(one, seqs, graph=rows, groups=SHARED_GROUPS)
    assert reads(one) == (5, (2 * 8 + 1) * 4)
    check(one, seqs, graph=rows, groups=SHARED_GROUPS[1:])
    check(one, seqs, graph=rows)


def test_one_graph_serves_steps_without_shared_latents() -> None:
    """A form that shares has all rows in one sequence without tokens then."""
    one, rows = sharing(), 8
    forms = one.forms(rows, prompts=False)
    assert forms == (GraphForm.SHARED_DECODES, GraphForm.DECODES)
    check(one, SHARING, graph=rows, form=GraphForm.SHARED_DECODES)


def test_few_heads_share() -> None:
    many = replace(SPEC, num_heads=128)
    assert "128 heads" in str(FlashInferMlaAttention.cascade_refusal([many]))
    assert FlashInferMlaAttention.cascade_refusal([SPEC]) is None
    assert FlashInferMlaFp8Attention.cascade_refusal([SPEC]) is not None


def test_long_decodes_are_cut() -> None:
    """Beside short ones, in a plan of a step and of a graph."""
    seqs = [(700, 1), (3, 1)]
    for graph in (0, 3):
        one = attention(block_size=16, fp8=True)
        one._programs = 8
        check(one, seqs, graph=graph)
        assert one._decode_chunks.cut
    even = attention(fp8=True)
    check(even, BATCHES["decodes"])
    assert not even._decode_chunks.cut


@pytest.mark.parametrize("fp8", [False, True])
def test_a_plan_leaves_nothing_to_the_next(fp8: bool) -> None:
    one = attention(fp8=fp8)
    for label in ("continued_chunks", "idle", "decodes", "mixed"):
        check(one, BATCHES[label])


@given(st.lists(st.integers(0, 60), max_size=6), st.integers(1, 5), st.sampled_from([1, 4, 16]))
@settings(max_examples=100)
def test_chunks_hold_each_token_once(contexts: list[int], blocks: int, block_size: int) -> None:
    limit = blocks * block_size
    chunks = cut_contexts(np.array(contexts, np.int32), limit, block_size)
    pieces = [piece for chunk in chunks for piece in chunk]
    tokens = [(it.seq, token) for it in pieces for token in range(it.start, it.end)]
    assert tokens == [(seq, i) for seq, count in enumerate(contexts) for i in range(count)]
    for chunk in chunks:
        seqs = [piece.seq for piece in chunk]
        assert seqs == list(range(seqs[0], seqs[-1] + 1))
        assert sum(piece.end - piece.start for piece in chunk) <= limit
        assert all(piece.start % block_size == 0 for piece in chunk)


def test_chunks_are_as_large_as_the_memory_of_new_rows_allows() -> None:
    assert cut_contexts(np.array([9, 0, 3]), 8, 4) == [
        [Piece(0, 0, 8)],
        [Piece(0, 8, 9)],
        [Piece(2, 0, 3)],
    ]
    sizes = [chunk_limit(rows, 16) for rows in (1, 2048, 8192)]
    assert sizes == [1024, 1424, 4096]
    assert chunk_limit(1, 2048) == 2048


def test_layers_of_one_shape_in_bfloat16() -> None:
    from tests.unit.test_kernels_select import CUDA

    def reason(spec: AttentionSpec, *others: AttentionSpec, dtype=torch.bfloat16) -> str:
        shape = replace(CUDA, attention_specs=(spec, *others), dtype=dtype)
        return str(FlashInferMlaAttention.unsupported_reason(shape))

    glm = AttentionSpec(20, 1, 256, 0.1, mla=MlaDims(512, 64, 192, 256))
    assert reason(glm) == "None"
    assert "latents of 512 and rotated keys of 64 values, the model's have 32 and 8" in reason(SPEC)
    narrow = replace(glm, head_dim=128, mla=MlaDims(512, 64, 64, 128))
    assert "192 and 128 or 256 and 256 values in k and v, the model's have 128 and 128" in reason(
        narrow
    )
    assert "layers of one shape" in reason(glm, replace(glm, num_heads=10))
    assert "it computes in bfloat16, model.dtype is float16" in reason(glm, dtype=torch.float16)
