"""Attention over a cache in FP8 on a GPU: the contract of all backends, prompts by flashinfer, graphs of decodes."""

import pytest
import torch

from kernels.attention.base import Attention, GraphForm
from kernels.attention.flashinfer_fp8 import FlashInferFp8Attention
from kernels.attention.sdpa import SdpaAttention
from kernels.attention.triton_paged import TritonPagedAttention
from kernels.backends.select import probe
from kernels.interface.attention_spec import AttentionSpec
from tests.unit.test_kernels_attention import BATCHES, Pages, Seqs, check, check_layer

GPU = torch.cuda.is_available()
MISSING = probe("cuda").get("attention.flashinfer_fp8") if GPU else "needs a GPU"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]
LONG: dict[str, Seqs] = {
    "long_decodes": [(8191, 1), (17, 1), (4096, 1), (2047, 1), (0, 1)],
    "long_prompt": [(0, 4096)],
    "long_continued": [(5000, 1), (7000, 1500), (16, 33)],
    "many_decodes": [(37 * i % 900, 1) for i in range(300)],
}
BACKENDS = [FlashInferFp8Attention, TritonPagedAttention, SdpaAttention]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("label", [*BATCHES, *LONG])
@torch.inference_mode()
def test_equals_dense_attention_over_rounded_values(label: str, backend: type[Attention]):
    seqs = (BATCHES | LONG)[label]
    for heads, head_dim in (((32, 4), 128), ((8, 1), 64)):
        check(
            seqs,
            dtype=torch.bfloat16,
            padding=2,
            heads=heads,
            head_dim=head_dim,
            block_size=16,
            fp8=True,
            backend=backend,
            device="cuda",
        )


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (6, 2), (64, 4), (40, 2)])
@torch.inference_mode()
def test_head_groups(heads: tuple[int, int]):
    for backend in (FlashInferFp8Attention, TritonPagedAttention):
        check(
            BATCHES["mixed"],
            dtype=torch.bfloat16,
            heads=heads,
            head_dim=128,
            fp8=True,
            backend=backend,
            device="cuda",
        )


@pytest.mark.parametrize(
    ("seqs", "form"),
    [
        ([(60, 1)] * 30, GraphForm.EVEN_DECODES),
        ([(33, 1)] * 20 + [(2047, 1), (1999, 1)], GraphForm.DECODES),
    ],
)
@torch.inference_mode()
def test_captured_decodes(seqs: Seqs, form: GraphForm):
    """Captured without sequences, replayed with some; rows behind them are zero."""
    spec = AttentionSpec(32, 4, 128, 0.1, fp8_cache=True)
    pages = Pages(seqs, [spec], 16, torch.bfloat16, 32 - len(seqs))
    pages.move("cuda")
    (layer,) = pages.layers
    attention = FlashInferFp8Attention([spec], 16)
    attention.bind(pages.caches)
    attention.reserve_graphs(32, 32, 200)
    empty = Pages([], [spec], 16, torch.bfloat16, 32)
    empty.move("cuda")
    attention.plan_graph(empty.batch(), 32, form)
    rows = [layer.q.clone(), layer.k.clone(), layer.v.clone()]
    attention(*rows, 0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attention(*rows, 0)
    for row, given in zip(rows, (layer.q, layer.k, layer.v), strict=True):
        row.copy_(given)
    attention.plan_graph(pages.batch(), 32, form)
    graph.replay()
    check_layer(pages, layer, out)
