"""Latent attention with a fused store against dense attention in float32; flashinfer's calls in torch's operators."""

import math
from types import SimpleNamespace
from typing import Any

import torch

from kernels.attention.base import Attention, GraphForm
from kernels.interface.attention_spec import AttentionSpec
from tests.closeness import calc_diff
from tests.shared_case import Groups, share_latents, with_groups
from tests.unit.test_kernels_attention import Pages, Seqs
from tests.unit.test_mla import LatentRows

DTYPE = torch.bfloat16


class FusedRows(LatentRows):
    """One layer's rows, whose new latents and queries `store_latents` has yet to norm and rotate."""

    def __init__(self, pages: Pages, spec: AttentionSpec, padding: int, device: str):
        super().__init__(pages, spec, DTYPE, padding)
        self.kv_up = self.kv_up * self.dims.rank**-0.5
        angles = torch.randn(len(self.q), 1, self.dims.rope_dim // 2, generator=pages.generator)
        self.rotation = torch.polar(torch.ones_like(angles), angles)
        self.norm = torch.rand(self.dims.rank, generator=pages.generator).to(DTYPE) + 0.5
        for name in ("cache", "new", "q", "kv_up", "rotation", "norm"):
            setattr(self, name, getattr(self, name).to(device))

    def attend(self, attention: Attention, layer: int) -> torch.Tensor:
        """Store and attend; keep the stored latents for `dense`."""
        attention.store_latents(self.q, self.new, layer, self.rotation, self.norm, 1e-6)
        return attention.attend_latent(self.q, self.new, self.heads, layer)

    def keep_stored(self, seqs: Seqs) -> None:
        """Take over the new latents as they were stored."""
        start = 0
        for rows, (context, new) in zip(self.latents, seqs, strict=True):
            rows[context:] = self.new[start : start + new].cpu()
            start += new
        self.kv_up = self.kv_up.cpu()


def check(
    attention: Attention,
    seqs: Seqs,
    *,
    padding: int = 2,
    device: str = "cpu",
    graph: int = 0,
    groups: Groups = (),
    form: GraphForm | None = None,
    adapters: bool = False,
) -> None:
    """Run one batch through all layers; with `graph`, planned as for a graph of that many rows.

    adapters of the sequences, beside the up-projection of the latents
    groups   of decodes that share blocks
    form     of the graph; None: the one that shares for groups, otherwise the one for any decodes
    """
    padding = graph - sum(new for _, new in seqs) if graph else padding
    pages = Pages(seqs, [], attention.block_size, DTYPE, padding)
    layers = [FusedRows(pages, spec, padding, device) for spec in attention.specs]
    if adapters:
        for layer in layers:
            layer.give_adapters(pages)
    share_latents(pages, layers, groups)
    pages.block_table, pages.slots = pages.block_table.to(device), pages.slots.to(device)
    attention.bind([layer.cache for layer in layers])
    batch = with_groups(pages.batch(), groups)
    if graph:
        attention.reserve_graphs(graph, graph, 512)
        best = attention.form(batch, graph, prompts=False)
        assert best.shares == bool(groups)
        general = best if groups else attention.forms(graph, prompts=False)[-1]
        attention.plan_graph(batch, graph, form or general)
    else:
        attention.plan(batch)
    for number, layer in enumerate(layers):
        out = layer.attend(attention, number)
        check_layer(pages, layer, out)


def check_layer(pages: Pages, layer: FusedRows, out: torch.Tensor) -> None:
    """One layer's output against dense attention over the stored latents, and its cache."""
    layer.keep_stored(pages.seqs)
    assert out.dtype == DTYPE and out.shape == (*layer.q.shape[:2], layer.dims.value_dim)
    start = 0
    for seq, (_, new) in enumerate(pages.seqs):
        rows = slice(start, start + new)
        expected = layer.dense(seq, layer.q[rows].cpu())
        found = out[rows].float().cpu()
        torch.testing.assert_close(found, expected, atol=4e-2, rtol=4e-2)
        assert calc_diff(found, expected) < 3e-4, (seq, calc_diff(found, expected))
        start += new
    assert torch.count_nonzero(out[start:]) == 0
    assert torch.equal(layer.read(pages.slots), layer.new[:start])


class _Planned:
    def __init__(self, workspace: torch.Tensor, backend: str):
        assert backend == "fa3" and workspace.dtype == torch.uint8


class FakeMla(_Planned):
    """`flashinfer.mla.BatchMLAPagedAttentionWrapper`, whose rows see all of their sequence."""

    def plan(self, *arguments: Any) -> None:
        self.rows, self.starts, self.pages, self.lens, self.heads = arguments[:5]
        self.rank, self.rope, self.page_size, causal, self.scale = arguments[5:10]
        assert arguments[10:] == (DTYPE, DTYPE) and not causal
        assert len(self.rows) == len(self.starts) == len(self.lens) + 1
        assert self.rows.dtype == self.starts.dtype == self.pages.dtype == torch.int32
        assert self.lens.dtype == torch.int32

    def run(
        self,
        q_nope: torch.Tensor,
        q_pe: torch.Tensor,
        ckv: torch.Tensor,
        kpe: torch.Tensor,
        *,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> None:
        assert q_nope.shape == out.shape and q_nope.shape[1:] == (self.heads, self.rank)
        assert len(q_nope) >= self.rows[-1] and return_lse == (lse is not None)
        for seq, length in enumerate(self.lens.tolist()):
            rows = slice(int(self.rows[seq]), int(self.rows[seq + 1]))
            pages = self.pages[int(self.starts[seq]) : int(self.starts[seq + 1])].long()
            latents = ckv[pages].flatten(0, 1)[:length].float()
            keys = kpe[pages].flatten(0, 1)[:length].float()
            scores = q_nope[rows].float() @ latents.T + q_pe[rows].float() @ keys.T
            scores *= self.scale
            found = scores.softmax(-1) @ latents
            out[rows] = found.to(DTYPE)
            if lse is not None:
                lse[rows] = scores.logsumexp(-1) / math.log(2)


class FakeRagged(_Planned):
    """`flashinfer.BatchPrefillWithRaggedKVCacheWrapper`; its log-sum-exps are of base 2."""

    def plan(self, rows: torch.Tensor, keys: torch.Tensor, *heads: int, **options: Any) -> None:
        assert len(rows) == len(keys) and rows.dtype == keys.dtype == torch.int32
        self.rows, self.keys = rows.tolist(), keys.tolist()
        assert all(b > a for a, b in zip(self.keys, self.keys[1:], strict=False))
        self.heads, self.causal = heads, options["causal"]
        self.scale, self.value_dim = options["sm_scale"], options["head_dim_vo"]
        assert options["q_data_type"] == options["kv_data_type"] == DTYPE

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: Any = None, **options: Any
    ) -> Any:
        assert self.heads == (q.shape[1], k.shape[1], q.shape[2])
        assert len(q) == self.rows[-1] and len(k) == len(v) == self.keys[-1]
        assert v.shape[2] == self.value_dim
        out = q.new_empty(*q.shape[:2], self.value_dim) if out is None else out
        lse = torch.empty(q.shape[:2])
        bounds = zip(self.rows, self.rows[1:], self.keys, self.keys[1:], strict=False)
        for row, end_row, key, end_key in bounds:
            mine = slice(row, end_row), slice(key, end_key)
            scores = torch.einsum("qhd,khd->hqk", q[mine[0]].float(), k[mine[1]].float())
            scores *= self.scale
            if self.causal:
                num_rows, num_keys = scores.shape[1:]
                later = torch.full((num_rows, num_keys), -math.inf)
                scores += later.triu(num_keys - num_rows + 1)
            found = torch.einsum("hqk,khv->qhv", scores.softmax(-1), v[mine[1]].float())
            out[mine[0]] = found.to(DTYPE)
            lse[mine[0]] = scores.logsumexp(-1).T / math.log(2)
        return (out, lse) if options.get("return_lse") else out


def fake_flashinfer() -> SimpleNamespace:
    """Return what latent attention uses of flashinfer."""
    mla = SimpleNamespace(BatchMLAPagedAttentionWrapper=FakeMla)
    return SimpleNamespace(mla=mla, BatchPrefillWithRaggedKVCacheWrapper=FakeRagged)
