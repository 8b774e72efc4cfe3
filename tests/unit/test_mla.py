"""Latent attention (MLA) against dense attention in float32, its merging of chunks, and its cache."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.commands.check_memory import rank_rows
from cluster.config.load import load_config
from cluster.config.resolve import resolve_rank_config
from kernels.attention import mla
from kernels.attention.fp8_latents import Fp8Latents
from kernels.attention.fp8_pages import round_heads, widen
from kernels.attention.latent_cache import Fp8LatentCache, LatentCache
from kernels.attention.latent_up import LatentHeads
from kernels.attention.mla import MlaAttention, merge_partial, partial_attention
from kernels.backends.select import BackendChoiceError
from kernels.interface.attention_spec import AttentionSpec, MlaDims
from kernels.interface.kv_layout import (
    PagedFp8Latents,
    PagedLatents,
    group_layers,
    kv_block_bytes,
    layout_of,
)
from kernels.lora.product import LoraWeights
from kernels.lora.rows import AdapterRows
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

        self.dtype, self._block_size = dtype, pages.block_size
        shape = layout_of(spec).shape(pages.num_blocks, pages.block_size)
        self.cache = torch.zeros(shape, dtype=torch.uint8 if spec.fp8_cache else dtype)
        if pages.stale:
            self.cache.fill_(
                255 if spec.fp8_cache else math.nan
            )  # 255: not a number, times infinity
        self.latents = [random(sum(seq), self.dims.width) for seq in pages.seqs]
        new = []
        for rows, (context, _), slots in zip(self.latents, pages.seqs, pages.slots_of, strict=True):
            new.append(rows[context:].clone())
            rows.copy_(self.as_cached(rows))
            self.view().store(rows[:context], slots[:context])
        self.new = torch.cat([*new, random(padding, self.dims.width)])
        self.q = random(len(self.new), spec.num_heads, spec.head_dim)
        up = (spec.num_heads, self.dims.nope_dim + self.dims.value_dim, self.dims.rank)
        self.kv_up = random(*up)
        # Of adapters: one for each sequence, by its slot; 0: none.
        self.lora: LoraWeights | None = None
        self.seq_slots: list[int] = []
        self.row_slots = torch.zeros(len(self.new), dtype=torch.int64)

    def give_adapters(self, pages: Pages, rank: int = 3) -> None:
        """Give the sequences the adapters of two slots in turn, and every third none."""
        heads, width, columns = self.kv_up.shape
        a = torch.randn(2, rank, columns, generator=pages.generator) / columns**0.5
        b = torch.randn(2, heads * width, rank, generator=pages.generator) / rank**0.5
        device = self.kv_up.device
        matrices = (it.to(device, self.dtype) for it in (a, b))
        self.lora = LoraWeights(*matrices, ((0, heads * width, 0),))
        self.seq_slots = [number % 3 for number in range(len(pages.seqs))]
        counts = torch.tensor([new for _, new in pages.seqs], dtype=torch.int64)
        slots = torch.tensor(self.seq_slots, dtype=torch.int64).repeat_interleave(counts)
        self.row_slots[: len(slots)] = slots

    @property
    def heads(self) -> LatentHeads:
        """The product that attention takes."""
        if self.lora is None:
            return LatentHeads(self.kv_up)
        rows = AdapterRows.of(self.row_slots.to(self.kv_up.device))
        return LatentHeads(self.kv_up, self.lora, rows)

    def _up(self, seq: int) -> torch.Tensor:
        """The product of a sequence in float32, its adapter merged."""
        if self.lora is None or not (slot := self.seq_slots[seq]):
            return self.kv_up.float()
        a, b = (it[slot - 1].float().cpu() for it in (self.lora.a_SQK, self.lora.b_SNr))
        return self.kv_up.float() + (b @ a).view(self.kv_up.shape)

    def view(self) -> LatentCache:
        """The cache as torch's operators read and write it."""
        if self.spec.fp8_cache:
            return Fp8LatentCache(self.spec, self.cache, self._block_size)
        return LatentCache(self.spec, self.cache)

    def as_cached(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows as the cache holds them."""
        if not self.spec.fp8_cache:
            return rows
        latents = widen(*round_heads(rows[:, None, : self.dims.rank]), self.dtype)[:, 0]
        return torch.cat((latents, rows[:, self.dims.rank :].bfloat16().to(self.dtype)), -1)

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """The cached latents of these slots, [T, W]."""
        blocks = slots // self._block_size
        rows = self.view().read(blocks, self.dtype).unflatten(0, (len(slots), self._block_size))
        return rows[torch.arange(len(slots)), slots % self._block_size]

    def dense(self, seq: int, q_MHd: torch.Tensor) -> torch.Tensor:
        """Attention of a sequence's last rows in float32, with heads of K and V."""
        rows, dims = self.latents[seq].float(), self.dims
        up = torch.einsum("lc,huc->lhu", rows[:, : dims.rank], self._up(seq))
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
    fp8: bool = False,
    adapters: bool = False,
) -> None:
    pages = Pages(seqs, [], block_size, dtype, padding, stale=stale)
    specs = [replace(spec, fp8_cache=fp8) for spec in SPECS]
    layers = [LatentRows(pages, spec, dtype, padding) for spec in specs]
    if adapters:
        for layer in layers:
            layer.give_adapters(pages)
    attention = MlaAttention(specs, block_size)
    attention.bind([layer.cache for layer in layers])
    attention.plan(pages.batch())
    # A CPU converts another dtype, a GPU reads it as the queries' own.
    masks = {g.mask_B11L.dtype for g in attention._decodes if g.mask_B11L is not None}
    assert masks <= {torch.float32 if fp8 else dtype}
    tolerance = 2e-5 if dtype == torch.float32 else 8e-2
    for number, layer in enumerate(layers):
        out = attention.attend_latent(layer.q, layer.new, layer.heads, number)
        assert out.dtype == dtype and out.shape == (*layer.q.shape[:2], layer.dims.value_dim)
        start = 0
        for seq, (_, new) in enumerate(seqs):
            rows = slice(start, start + new)
            expected = layer.dense(seq, layer.q[rows])
            torch.testing.assert_close(out[rows].float(), expected, atol=tolerance, rtol=tolerance)
            start += new
        assert torch.count_nonzero(out[start:]) == 0
        assert torch.equal(layer.read(pages.slots), layer.as_cached(layer.new[:start]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("label", BATCHES)
def test_equals_dense_attention(label: str, dtype: torch.dtype) -> None:
    for padding in (0, 3):
        check(BATCHES[label], padding=padding, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("label", BATCHES)
def test_fp8_cache_equals_dense_attention_over_rounded_latents(
    label: str, dtype: torch.dtype
) -> None:
    check(BATCHES[label], padding=3, dtype=dtype, fp8=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("label", BATCHES)
def test_adapters_equal_merged_weights(label: str, dtype: torch.dtype) -> None:
    """Of two slots and none in one batch: decodes, prompts, and prompts behind computed tokens."""
    check(BATCHES[label], padding=2, dtype=dtype, adapters=True)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("label", ["decodes", "mixed", "very_different_lengths"])
def test_what_a_request_left_in_a_block_does_not_matter(label: str, fp8: bool) -> None:
    check(BATCHES[label], stale=True, fp8=fp8)


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


def test_a_token_of_deepseek_v3_takes_641_bytes_a_layer_in_fp8() -> None:
    groups = group_layers([layout_of(replace(DEEPSEEK_V3, fp8_cache=True))] * 61)
    assert [group.layout for group in groups] == [PagedFp8Latents(512, 64)]
    assert kv_block_bytes(groups, 32, 2) == kv_block_bytes(groups, 32, 4) == 61 * 32 * 641


def test_the_views_of_an_fp8_cache_share_no_byte_and_leave_none() -> None:
    spec = replace(SPECS[0], fp8_cache=True)
    cache = torch.zeros(layout_of(spec).shape(3, 16), dtype=torch.uint8)
    assert spec.mla is not None
    latents = Fp8Latents(cache, spec.mla, 16)
    assert [tuple(it.shape) for it in latents.tensors] == [(3, 16, 12), (3, 16, 4), (3, 16)]
    for number, tensor in enumerate(latents.tensors):
        assert tensor.is_contiguous()
        tensor.view(torch.uint8).add_(number + 1)
    counts = torch.bincount(cache.long()).tolist()
    assert counts == [0, *(tensor.nbytes for tensor in latents.tensors)]


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


@pytest.mark.parametrize(
    ("shape", "absent", "name"),
    [
        (CPU, {}, "mla"),
        (CUDA, {}, "flashinfer_mla_fp8"),
        (CUDA, {"attention.flashinfer_mla_fp8": "it needs a Hopper GPU"}, "mla"),
    ],
)
def test_select_takes_what_reads_latents_in_fp8(shape, absent, name: str) -> None:
    latents = replace(shape, attention_specs=(replace(DEEPSEEK_V3, fp8_cache=True),))
    assert choose(latents, absent).attention.name == name
    with pytest.raises(BackendChoiceError, match=r"cache\.dtype is fp8"):
        choose(replace(latents, device="cuda"), attention="flashinfer_mla")
    wide = replace(shape, device="cuda", attention_specs=(DEEPSEEK_V3,))
    with pytest.raises(BackendChoiceError, match=r"cache\.dtype is not fp8"):
        choose(wide, attention="flashinfer_mla_fp8")


def test_a_gpu_refuses_latents_with_the_reason() -> None:
    with pytest.raises(BackendChoiceError, match=r"no latent attention.*latents of 576 values"):
        choose(CUDA, attention="flashinfer", attention_specs=(DEEPSEEK_V3,))


def test_latents_in_fp8_take_fewer_bytes_of_a_cpu(tmp_path: Path) -> None:
    folder = family_checkpoint(tmp_path, "deepseek_v3", "untied")
    path = tmp_path / "phalanx.yaml"
    path.write_text(f"model: {{path: {folder}}}")
    options = ["cluster.device=cpu", "cache.cpu_memory_gib=0.5", "cache.dtype=fp8"]
    resolved = resolve_rank_config(load_config(path, options))
    layers = load_model_config(folder).num_layers
    # a latent of 32 values and its scale, and a key of 8 values in bfloat16
    assert resolved.cache.num_blocks == 2**29 // (layers * 16 * (32 + 1 + 2 * 8))


@pytest.mark.parametrize("fp8", [False, True])
def test_check_estimates_the_cache_that_a_rank_allocates(tmp_path: Path, fp8: bool) -> None:
    config = rank_config(
        family_checkpoint(tmp_path, "deepseek_v3", "untied"),
        1,
        model={"weights": "dummy", "max_model_len": 64},
        cache={"num_blocks": 24, "dtype": "fp8" if fp8 else "auto"},
    )
    model = load_model_config(config.model.folder)
    process = RankProcess(0, config)
    try:
        epoch = Epoch(process, Rendezvous("", 0, "latents"), 5)
        epoch.load()
        info = epoch.start_engine(lambda *_: None, lambda _: None)
        caches = process.caches.kv_caches
        token_bytes = 32 + 1 + 2 * 8 if fp8 else 4 * (32 + 8)  # kv_lora_rank, qk_rope_head_dim
        shape = backend_shape(config, model)
        (row,) = rank_rows(
            config, model, process.selection, shape, num_ubatches=0, graphs=GraphSizes()
        )
        assert row.kv_bytes == info.memory_bytes["kv_cache"] == sum(c.nbytes for c in caches)
        assert row.kv_bytes == 24 * 16 * token_bytes * model.num_layers
        epoch.close()
    finally:
        process.close()
