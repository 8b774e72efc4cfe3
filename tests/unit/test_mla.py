"""Latent attention (MLA) against dense attention in float32, its merging of chunks, and its cache."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.commands.check_memory import rank_rows
from kernels.attention import mla
from kernels.attention.mla import MlaAttention, merge_partial, partial_attention
from kernels.backends.select import BackendChoiceError
from kernels.interface.attention_spec import AttentionSpec, MlaDims
from kernels.interface.kv_layout import PagedLatents, group_layers, kv_block_bytes, layout_of
from tests.distributed.engine_harness import rank_config
from tests.family_cases import family_checkpoint
from tests.unit.test_kernels_attention import BATCHES, Pages, Seqs
from tests.unit.test_kernels_select import CPU, CUDA, choose
from workers.models.registry import load_model_config
from workers.rank.backend_choice import backend_shape
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous
from workers.runner.graph_sizes import GraphSizes

torch.set_num_threads(1)

DEEPSEEK_V3 = AttentionSpec(
    128, 1, 192, 0.1, mla=MlaDims(rank=512, rope_dim=64, nope_dim=128, value_dim=128)
)
SPECS = (
    AttentionSpec(3, 1, 10, 0.3, mla=MlaDims(rank=12, rope_dim=4, nope_dim=6, value_dim=5)),
    AttentionSpec(4, 1, 12, 0.2, mla=MlaDims(rank=8, rope_dim=2, nope_dim=10, value_dim=16)),
)


class LatentRows:
    """One layer's random rows and cache: latents of whole sequences, with their contexts in the cache already."""

    def __init__(self, pages: Pages, spec: AttentionSpec, dtype: torch.dtype, padding: int):
        assert spec.mla is not None
        self.spec, self.dims, generator = spec, spec.mla, pages.generator

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        shape = layout_of(spec).shape(pages.num_blocks, pages.block_size)
        self.cache = torch.full(shape, math.nan if pages.stale else 0.0, dtype=dtype)
        self.latents = [random(sum(seq), self.dims.width) for seq in pages.seqs]
        new = []
        for rows, (context, _), slots in zip(self.latents, pages.seqs, pages.slots_of, strict=True):
            self.cache.view(-1, self.dims.width)[slots[:context]] = rows[:context]
            new.append(rows[context:])
        self.new = torch.cat([*new, random(padding, self.dims.width)])
        self.q = random(len(self.new), spec.num_heads, spec.head_dim)
        up = (spec.num_heads, self.dims.nope_dim + self.dims.value_dim, self.dims.rank)
        self.kv_up = random(*up)

    def dense(self, seq: int, q_MHd: torch.Tensor) -> torch.Tensor:
        """Attention of a sequence's last rows in float32, with heads of K and V."""
        rows, dims = self.latents[seq].float(), self.dims
        up = torch.einsum("lc,huc->lhu", rows[:, : dims.rank], self.kv_up.float())
        rope = rows[:, None, dims.rank :].expand(-1, self.spec.num_heads, -1)
        key = torch.cat((up[..., : dims.nope_dim], rope), -1)
        scores = torch.einsum("qhd,khd->hqk", q_MHd.float(), key) * self.spec.scale
        new, total = len(q_MHd), len(rows)
        scores += torch.full((new, total), -math.inf).triu(total - new + 1)
        return torch.einsum("hqk,khv->qhv", scores.softmax(-1), up[..., dims.nope_dim :])


def check(
    seqs: Seqs,
    *,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
    block_size: int = 4,
    stale: bool = False,
) -> None:
    pages = Pages(seqs, [], block_size, dtype, padding, stale=stale)
    layers = [LatentRows(pages, spec, dtype, padding) for spec in SPECS]
    attention = MlaAttention(SPECS, block_size)
    attention.bind([layer.cache for layer in layers])
    attention.plan(pages.batch())
    # A CPU converts another dtype, a GPU reads it as the queries' own.
    assert {g.mask_B11L.dtype for g in attention._decodes if g.mask_B11L is not None} <= {dtype}
    tolerance = 2e-5 if dtype == torch.float32 else 8e-2
    for number, layer in enumerate(layers):
        out = attention.attend_latent(layer.q, layer.new, layer.kv_up, number)
        assert out.dtype == dtype and out.shape == (*layer.q.shape[:2], layer.dims.value_dim)
        start = 0
        for seq, (_, new) in enumerate(seqs):
            rows = slice(start, start + new)
            expected = layer.dense(seq, layer.q[rows])
            torch.testing.assert_close(out[rows].float(), expected, atol=tolerance, rtol=tolerance)
            start += new
        assert torch.count_nonzero(out[start:]) == 0
        written = layer.cache.view(-1, layer.dims.width)[pages.slots]
        assert torch.equal(written, layer.new[:start])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("label", BATCHES)
def test_equals_dense_attention(label: str, dtype: torch.dtype) -> None:
    for padding in (0, 3):
        check(BATCHES[label], padding=padding, dtype=dtype)


@pytest.mark.parametrize("label", ["decodes", "mixed", "very_different_lengths"])
def test_what_a_request_left_in_a_block_does_not_matter(label: str) -> None:
    check(BATCHES[label], stale=True)


@given(
    st.lists(st.integers(0, 20), max_size=4),
    st.lists(st.tuples(st.integers(0, 25), st.integers(1, 20)), max_size=3),
    st.sampled_from([1, 4, 16]),
)
@settings(max_examples=30)
def test_any_batch_in_small_chunks(contexts: list[int], extends: Seqs, block_size: int) -> None:
    """Chunks begin and end at any place of contexts and prompts, so some rows see no key of a chunk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mla, "KEY_CHUNK", 8)
        patch.setattr(mla, "QUERY_CHUNK", 5)
        seqs = [(context, 1) for context in contexts] + extends
        check(seqs, block_size=block_size, padding=1)


def test_rows_without_keys_change_nothing() -> None:
    """Their log-sum-exp is -inf; the difference of two of them would be NaN."""
    q, k, v = (torch.randn(2, rows, 6) for rows in (4, 5, 5))
    o, lse = partial_attention(q, k, v, 0.5, offset=-2)
    assert (lse[:, :2] == -math.inf).all() and (o[:, :2] == 0).all()
    assert lse[:, 2:].isfinite().all()
    total, total_lse = torch.zeros_like(o), torch.full_like(lse, -math.inf)
    merge_partial(total, total_lse, o.clone(), lse)
    torch.testing.assert_close(total, o)
    merge_partial(total, total_lse, torch.zeros_like(o), torch.full_like(lse, -math.inf))
    torch.testing.assert_close(total, o)
    assert torch.equal(total_lse, lse)


def test_a_token_of_deepseek_v3_takes_1152_bytes_a_layer() -> None:
    groups = group_layers([layout_of(DEEPSEEK_V3)] * 61)
    assert [group.layout for group in groups] == [PagedLatents(576)]
    assert kv_block_bytes(groups, 32, 2) == 61 * 32 * 1152


@pytest.mark.parametrize(
    ("shape", "absent", "name"),
    [
        (CPU, {}, "mla"),
        (replace(CPU, dtype=torch.float32), {}, "mla"),
        (CUDA, {}, "flashinfer_mla"),
        (CUDA, {"attention.flashinfer_mla": "it needs a Hopper GPU"}, "mla"),
        (replace(CUDA, dtype=torch.float32), {}, "mla"),
    ],
)
def test_select_takes_latent_attention_for_latents_alone(shape, absent, name: str) -> None:
    latents = replace(shape, attention_specs=(DEEPSEEK_V3,))
    assert choose(latents, absent).attention.name == name
    with pytest.raises(BackendChoiceError, match=r"latent attention.*caches heads of K and V"):
        choose(shape, attention=name)
    works = "auto or mla" if name == "mla" else "auto, flashinfer_mla or mla"
    for other in ("flashinfer", "native", "sdpa"):
        with pytest.raises(BackendChoiceError, match=f"What works: {works}"):
            choose(latents, absent, attention=other)


def test_a_gpu_refuses_latents_with_the_reason() -> None:
    with pytest.raises(BackendChoiceError, match=r"no latent attention.*latents of 576 values"):
        choose(CUDA, attention="flashinfer", attention_specs=(DEEPSEEK_V3,))


def test_check_estimates_the_cache_that_a_rank_allocates(tmp_path: Path) -> None:
    config = rank_config(
        family_checkpoint(tmp_path, "deepseek_v3", "untied"),
        1,
        model={"weights": "dummy", "max_model_len": 64},
        cache={"num_blocks": 24},
    )
    model = load_model_config(config.model.folder)
    process = RankProcess(0, config)
    try:
        epoch = Epoch(process, Rendezvous("", 0, "latents"), 5)
        epoch.load()
        info = epoch.start_engine(lambda *_: None, lambda _: None)
        caches = process.caches.kv_caches
        width = 32 + 8  # kv_lora_rank and qk_rope_head_dim
        assert [tuple(cache.shape) for cache in caches] == [(24, 16, width)] * model.num_layers
        shape = backend_shape(config, model)
        (row,) = rank_rows(
            config, model, process.selection, shape, num_ubatches=0, graphs=GraphSizes()
        )
        assert row.kv_bytes == info.memory_bytes["kv_cache"] == sum(c.nbytes for c in caches)
        assert row.kv_bytes == 24 * 16 * width * 4 * model.num_layers
        epoch.close()
    finally:
        process.close()
