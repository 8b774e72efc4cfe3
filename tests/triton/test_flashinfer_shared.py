"""Plans of flashinfer whose decodes share leading blocks: our kernels for decodes, fakes for its prompts."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.attention.base import AttentionBatch, GraphForm
from kernels.attention.flashinfer import FlashInferAttention
from kernels.attention.flashinfer_decodes import Pages as PageLists
from kernels.attention.flashinfer_decodes import Shape
from kernels.attention.flashinfer_graphs import GraphPlans
from kernels.attention.flashinfer_plans import EagerPlans
from kernels.attention.flashinfer_shared import SharedDecodes
from kernels.attention.shared_prefixes import FLASHINFER_MIB, SharingCost
from kernels.attention.triton_paged import TritonPagedAttention
from kernels.interface.attention_spec import AttentionSpec
from kernels.interface.kv_layout import PagedFp8Heads, PagedHeads
from kernels.interface.shared_reads import SharedReads
from kernels.triton.paged import list_pages
from tests.shared_case import ANY, Groups, share, with_groups
from tests.triton.device import DEVICE
from tests.unit.test_flashinfer_rows import Kernel, without_flashinfer
from tests.unit.test_kernels_attention import Pages, Seqs

KV_LAYOUTS = {False: PagedHeads, True: PagedFp8Heads}
SPECS = (AttentionSpec(8, 1, 16, 0.3), AttentionSpec(16, 2, 16, 0.2))
SEQS: Seqs = [(50, 1), (7, 1), (49, 1), (0, 3), (20, 5)]
GROUPS: Groups = [((0, 2), 3)]
NUM_DECODES, MAX_SEQS, ROWS = 3, 6, 16


class Prompts(Kernel):
    """Writes a number to the rows of its plan."""

    number = 3.0

    def plan(self, query_starts: torch.Tensor, *rest: Any, **options: Any) -> None:
        super().plan(query_starts, *rest, **options)
        if "causal" not in options and not self.is_decode:
            raise AssertionError("decodes were planned for flashinfer's kernel too")

    is_decode = False

    def run(self, q_THd: torch.Tensor, *_: Any, out: torch.Tensor) -> torch.Tensor:
        return super().run(q_THd, out=out)


class Refuses(Prompts):
    """Plans of decodes, which our kernels compute here."""

    is_decode = True

    def run(self, *_: Any, **__: Any) -> torch.Tensor:
        raise AssertionError("decodes that share blocks ran in flashinfer's kernel")


FLASHINFER = SimpleNamespace(
    BatchDecodeWithPagedKVCacheWrapper=Refuses,
    BatchPrefillWithPagedKVCacheWrapper=Prompts,
    BatchPrefillWithRaggedKVCacheWrapper=Prompts,
    fast_decode_plan=None,
)


def case(seqs: Seqs) -> tuple[Pages, AttentionBatch, SharedDecodes]:
    pages = Pages(seqs, SPECS, 16, torch.float32, 0)
    share(pages, GROUPS)
    for layer in pages.layers:  # the caches with the new rows too
        for seq, slots in enumerate(pages.slots_of):
            layer._write(slots, layer.keys[seq], layer.values[seq])
    pages.move(DEVICE)
    sharing = SharedDecodes(SPECS, 16, SharedReads(), pages.caches)
    sharing._attention.sharing_cost = ANY
    return pages, with_groups(pages.batch(), GROUPS), sharing


def check_decodes(pages: Pages, number: int, out: torch.Tensor) -> None:
    layer = pages.layers[number]
    for seq in range(NUM_DECODES):
        expected = layer.dense(seq, layer.q[seq : seq + 1].cpu())
        torch.testing.assert_close(out[seq : seq + 1].cpu(), expected, atol=1e-5, rtol=1e-5)


def plans_of(sharing: SharedDecodes) -> GraphPlans:
    shapes = [Shape(spec, 16, torch.float32, 66) for spec in SPECS]
    sharing.reserve_graphs(MAX_SEQS, 8)
    sizes = {"max_rows": ROWS, "max_seqs": MAX_SEQS, "max_blocks": 8}
    return GraphPlans(FLASHINFER, list_pages, shapes, torch.device(DEVICE), **sizes)


@pytest.mark.parametrize("fp8_cache", [False, True])
def test_our_kernels_share_where_that_paid_for_their_cache(fp8_cache: bool) -> None:
    """And wherever flashinfer's decodes do, because they take the plans of our kernels then."""
    spec = AttentionSpec(32, 4, 128, 0.1, fp8_cache=fp8_cache)
    cost, layout = TritonPagedAttention([spec], 16).sharing_cost, KV_LAYOUTS[fp8_cache].of(spec)
    assert cost == SharingCost.of_triton(layout)
    assert cost.saved_tokens <= SharingCost.on_gpu(layout, FLASHINFER_MIB).saved_tokens


@torch.inference_mode()
def test_a_graph_of_decodes():
    pages, batch, sharing = case(SEQS[:NUM_DECODES])
    plans = plans_of(sharing)
    planned = plans.plan(batch, 4, GraphForm.SHARED_DECODES, sharing)
    assert plans.slots[:4].tolist() == [*pages.slots.tolist(), -1]
    for number, (layer, plan) in enumerate(zip(pages.layers, planned, strict=True)):
        q = torch.cat((layer.q, layer.q[:1]))
        out = plan.run((q, q, q), tuple(layer.cache))
        check_decodes(pages, number, out)
        assert not out[NUM_DECODES:].count_nonzero()


@torch.inference_mode()
def test_a_graph_with_prompts():
    pages, batch, sharing = case(SEQS)
    plans = plans_of(sharing)
    planned = plans.plan(batch, ROWS, GraphForm.SHARED_MIXED, sharing)
    rows = batch.num_tokens
    assert plans.slots[:ROWS].tolist() == [*pages.slots.tolist(), *[-1] * (ROWS - rows)]
    for number, (layer, plan) in enumerate(zip(pages.layers, planned, strict=True)):
        q = torch.cat((layer.q, layer.q[: ROWS - rows]))
        out = plan.run((q, q, q), tuple(layer.cache))
        check_decodes(pages, number, out)
        assert (out[NUM_DECODES:rows] == 3).all() and not out[rows:].count_nonzero()


@torch.inference_mode()
def test_eager():
    pages, batch, sharing = case(SEQS)
    sharing.plan(batch)
    for number, spec in enumerate(SPECS):
        shape = Shape(spec, 16, torch.float32, 66)
        workspace = torch.zeros(2**20, dtype=torch.uint8)
        plans = EagerPlans(FLASHINFER, shape, workspace, hopper=True)
        lists = PageLists(batch.seq_lens_cpu, 16)
        lists.ship(torch.zeros(lists.total, dtype=torch.int32))
        plans.plan(batch, lists, all_new=False, shared=sharing.of(spec))
        layer = pages.layers[number]
        out = plans.run((layer.q, layer.k, layer.v), tuple(layer.cache))
        check_decodes(pages, number, out)
        assert (out[NUM_DECODES:] == 3).all()


def test_forms():
    """Without sharing they are the forms of before; the last form serves any batch."""
    attention = without_flashinfer(list(SPECS[:1]))
    even, cut = GraphForm.EVEN_DECODES, GraphForm.DECODES
    assert attention.forms(64, prompts=False) == (even, cut)
    attention.shared_reads = SharedReads()
    assert attention.forms(64, prompts=False) == (GraphForm.SHARED_DECODES, even, cut)
    assert attention.forms(4, prompts=False) == (even, cut)
    assert attention.forms(512, prompts=True) == (GraphForm.SHARED_MIXED, GraphForm.MIXED)
    assert attention.forms(2048, prompts=True)[-1] == GraphForm.MIXED
    assert GraphForm.SHARED_MIXED not in attention.forms(2048, prompts=True)


@pytest.mark.parametrize("other", [AttentionSpec(4, 1, 16, 0.3)])
def test_layers_with_other_groups_of_heads_do_not_share(other: AttentionSpec):
    refusal = FlashInferAttention.cascade_refusal([SPECS[0], other])
    assert refusal is not None and "groups" in refusal
    assert FlashInferAttention.cascade_refusal(SPECS) is None
