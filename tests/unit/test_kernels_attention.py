"""Paged attention against dense attention in float32, for every kind of batch."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention.base import Attention, AttentionBatch
from kernels.attention.fp8_pages import Fp8Pages, round_heads, widen
from kernels.attention.native import NativeAttention
from kernels.attention.sdpa import CALL_COST, SdpaAttention, length_groups
from kernels.backends.select import probe
from kernels.interface.attention_spec import AttentionSpec
from kernels.interface.kv_layout import layout_of
from tests.closeness import calc_diff

NUM_LAYERS = 2
NATIVE_MISSING = probe("cpu").get("attention.native")
needs_native = pytest.mark.skipif(NATIVE_MISSING is not None, reason=str(NATIVE_MISSING))
Seqs = list[tuple[int, int]]  # (context, new tokens) of each sequence; decodes first


class LayerRows:
    """One layer's random rows and cache: new rows and padding of q, k, v; keys and values of whole sequences."""

    def __init__(self, pages: "Pages", spec: AttentionSpec, dtype: torch.dtype, padding: int):
        self.spec, self.dtype, self._generator = spec, dtype, pages.generator
        shape = layout_of(spec).shape(pages.num_blocks, pages.block_size)
        self.cache = torch.zeros(shape, dtype=torch.uint8 if spec.fp8_cache else dtype)
        self._block_size = pages.block_size
        self._spoil(slice(None) if pages.stale else pages.spoiled)
        self.keys, self.values, new_rows = [], [], ([], [])
        slots_of = pages.slots_of if spec.window is None else pages.window_slots_of
        self.sinks = torch.randn(spec.num_heads, generator=self._generator) if spec.sinks else None
        for (context, new), slots in zip(pages.seqs, slots_of, strict=True):
            key, value = (self._random(context + new, spec.num_kv_heads) for _ in "kv")
            if pages.rounded:
                key, value = self._cached(key), self._cached(value)
            for rows, of in zip((key, value), new_rows, strict=True):
                of.append(rows[context:])
            key, value = self._cached(key), self._cached(value)
            self._write(slots[:context], key[:context], value[:context])
            self.keys.append(key)
            self.values.append(value)
        pad = self._random(padding, spec.num_kv_heads)
        self.k, self.v = (torch.cat([*of, pad]) for of in new_rows)
        self.q = self._random(len(self.k), spec.num_heads)

    def _spoil(self, block: int | slice) -> None:
        if self.spec.fp8_cache:
            for tensor in self._pages().tensors:
                tensor.view(torch.uint8)[block] = 255  # not a number, times infinity
        else:
            self.cache[:, block] = math.nan

    def _pages(self) -> Fp8Pages:
        return Fp8Pages(self.cache, self.spec, self._block_size)

    def _cached(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows as the cache holds them."""
        return widen(*round_heads(rows), self.dtype) if self.spec.fp8_cache else rows

    def _write(self, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        if not self.spec.fp8_cache:
            for rows, cache in zip((key, value), self.cache, strict=True):
                cache.flatten(0, 1)[slots] = rows
            return
        pages = self._pages()
        blocks, offsets = slots // self._block_size, slots % self._block_size
        for rows, values, exponents in (
            (key, pages.k, pages.k_exponents),
            (value, pages.v, pages.v_exponents),
        ):
            rounded, exponent = round_heads(rows)
            values.view(torch.uint8)[blocks, offsets] = rounded.view(torch.uint8)
            exponents[blocks, :, offsets] = exponent

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """K and V of these slots, [2, T, h, d]."""
        if not self.spec.fp8_cache:
            return self.cache.flatten(1, 2)[:, slots]
        pages = self._pages()
        blocks, offsets = slots // self._block_size, slots % self._block_size
        found = (
            (pages.k, pages.k_exponents),
            (pages.v, pages.v_exponents),
        )
        return torch.stack(
            [
                widen(
                    values.view(torch.uint8)[blocks, offsets].view(torch.float8_e4m3fn),
                    exponents[blocks, :, offsets],
                    self.dtype,
                )
                for values, exponents in found
            ]
        )

    def _random(self, rows: int, heads: int) -> torch.Tensor:
        shape = (rows, heads, self.spec.head_dim)
        return torch.randn(shape, generator=self._generator).to(self.dtype)

    def move(self, device: str) -> None:
        for name in ("cache", "q", "k", "v", "sinks"):
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name).to(device))

    def dense(self, seq: int, q_MHd: torch.Tensor) -> torch.Tensor:
        """Attention of a sequence's last rows in float32."""
        spec = self.spec
        key, value = (
            of[seq].float().repeat_interleave(spec.group_size, 1) for of in (self.keys, self.values)
        )
        new, total = len(q_MHd), len(key)
        scores = torch.einsum("qhd,khd->hqk", q_MHd.float(), key) * spec.scale
        scores += torch.full((new, total), -math.inf).triu(total - new + 1)
        if spec.window is not None:
            scores += torch.full((new, total), -math.inf).tril(total - new - spec.window)
        if self.sinks is not None:
            sinks = self.sinks.cpu().view(-1, 1, 1).expand(-1, new, 1)
            scores = torch.cat((scores, sinks), -1)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :total], value)


class Pages:
    """Sequences on a random set of blocks; each layer has random rows, with the context in its cache already.

    Layers with a window have other blocks. Those that no window touches are one block of NaN.
    """

    def __init__(
        self,
        seqs: Seqs,
        specs: Sequence[AttentionSpec],
        block_size: int,
        dtype: torch.dtype,
        padding: int,
        *,
        rounded: bool = False,
        stale: bool = False,
    ):
        """Take the sequences.

        rounded   K and V of new rows are what a cache in e4m3 can hold
        stale     slots without a token hold NaN, as after a request with NaN
        """
        self.rounded, self.stale = rounded, stale
        self.seqs, self.block_size = seqs, block_size
        self.generator = torch.Generator().manual_seed(3)
        needed = [-(-(context + new) // block_size) for context, new in seqs]
        self.num_blocks = 2 * sum(needed) + 3
        free = torch.randperm(self.num_blocks, generator=self.generator).tolist()
        self.spoiled = free.pop(-1 if free[-1] else -2)  # block 0 fills the tables
        self.block_table, self.slots_of, self.slots = self._place(free, needed)
        self.window_table, self.window_slots_of, self.window_slots = self._place(free, needed)
        windows = [spec.window for spec in specs if spec.window is not None]
        self.windows = bool(windows)
        if windows:
            for row, (context, _) in zip(self.window_table, seqs, strict=True):
                row[: max(0, context + 1 - max(windows)) // block_size] = self.spoiled
        self.layers = [LayerRows(self, spec, dtype, padding) for spec in specs]

    def _place(
        self, free: list[int], needed: list[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """Block table, slots of each sequence's tokens, slots of the new tokens."""
        size = self.block_size
        table = torch.zeros(len(needed), max(needed, default=0) + 1, dtype=torch.int64)
        slots_of, new_slots = [], [torch.empty(0, dtype=torch.int64)]
        for seq, (context, new) in enumerate(self.seqs):
            blocks = torch.tensor([free.pop() for _ in range(needed[seq])])
            table[seq, : needed[seq]] = blocks
            position = torch.arange(context + new)
            slots_of.append(blocks[position // size] * size + position % size)
            new_slots.append(slots_of[-1][context:])
        return table, slots_of, torch.cat(new_slots)

    @property
    def caches(self) -> list[torch.Tensor]:
        return [layer.cache for layer in self.layers]

    def move(self, device: str) -> None:
        for name in ("block_table", "slots", "window_table", "window_slots"):
            setattr(self, name, getattr(self, name).to(device))
        for layer in self.layers:
            layer.move(device)

    def batch(self, num_verify: int = 0) -> AttentionBatch:
        new = [count for _, count in self.seqs]
        decodes = next((i for i, count in enumerate(new) if count != 1), len(new))
        return AttentionBatch(
            num_tokens=sum(new),
            num_seqs=len(new),
            num_single_rows=decodes,
            num_verify=num_verify,
            query_start_loc_cpu=np.cumsum([0, *new], dtype=np.int32),
            seq_lens_cpu=np.array([sum(seq) for seq in self.seqs], dtype=np.int32),
            block_table=self.block_table,
            slot_mapping=self.slots,
            window_block_table=self.window_table if self.windows else None,
            window_slot_mapping=self.window_slots if self.windows else None,
        )


def check(
    seqs: Seqs,
    *,
    dtype: torch.dtype = torch.float32,
    padding: int = 0,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 8,
    specs: Sequence[AttentionSpec] | None = None,
    block_size: int = 4,
    fp8: bool = False,
    rounded: bool = False,
    stale: bool = False,
    num_verify: int = 0,
    attention: Attention | None = None,
    backend: type[Attention] = SdpaAttention,
    device: str = "cpu",
) -> Attention:
    """Run one batch through all layers (specs: one a layer, None: equal layers); also run by the GPU tests."""
    if specs is None:
        specs = [AttentionSpec(*heads, head_dim, scale=0.85 * head_dim**-0.5)] * NUM_LAYERS
    if fp8:
        specs = [replace(spec, fp8_cache=True) for spec in specs]
    pages = Pages(seqs, specs, block_size, dtype, padding, rounded=rounded, stale=stale)
    pages.move(device)
    attention = attention or backend(specs, block_size)
    attention.bind(pages.caches)
    attention.plan(pages.batch(num_verify))
    for number, layer in enumerate(pages.layers):
        out = attention(layer.q, layer.k, layer.v, number, layer.sinks)
        check_layer(pages, layer, out)
    return attention


def check_layer(pages: Pages, layer: LayerRows, out: torch.Tensor) -> None:
    """One layer's output against dense attention, and its cache."""
    assert out.shape == layer.q.shape and out.dtype == layer.dtype
    tolerance = 1e-5 if layer.dtype == torch.float32 else 3e-2
    start = 0
    for seq, (_, new) in enumerate(pages.seqs):
        rows = slice(start, start + new)
        expected = layer.dense(seq, layer.q[rows].cpu())
        found = out[rows].float().cpu()
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)
        assert calc_diff(found, expected) < 1e-5
        start += new
    assert torch.count_nonzero(out[start:]) == 0
    slots = pages.slots if layer.spec.window is None else pages.window_slots
    # From the rows before the forward: it may round them in place, and a second rounding can change them again.
    expected = [
        torch.cat(
            [of[seq][context:] for seq, (context, _) in enumerate(pages.seqs)] or [rows[:0].cpu()]
        )
        for of, rows in ((layer.keys, layer.k), (layer.values, layer.v))
    ]
    assert torch.equal(layer.read(slots).cpu(), torch.stack(expected))


BATCHES = {
    "one_decode": [(5, 1)],
    "decodes": [(5, 1), (0, 1), (30, 1), (7, 1)],
    "decodes_of_full_blocks": [(7, 1), (7, 1)],
    "first_chunks": [(0, 5), (0, 2), (0, 12)],
    "long_first_chunks": [(5, 1), (0, 300), (0, 129), (0, 65)],
    "continued_chunks": [(5, 3), (8, 8), (1, 2)],
    "mixed": [(11, 1), (2, 1), (0, 9), (3, 7), (8, 4)],
    "idle": [],
    "very_different_lengths": [(700, 1), *[(3, 1)] * 6, (40, 1), (90, 1), (9, 3)],
    "longer_than_a_query_chunk": [(0, 700), (300, 600)],
    "one_row_past_a_block": [(0, 65), (38, 65), (5, 33), (10, 129), (3, 513)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("label", BATCHES)
def test_equals_dense_attention(label: str, padding: int, dtype: torch.dtype):
    check(BATCHES[label], dtype=dtype, padding=padding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("label", BATCHES)
def test_fp8_cache_equals_dense_attention_over_rounded_values(label: str, dtype: torch.dtype):
    check(BATCHES[label], dtype=dtype, padding=3, fp8=True)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("label", ["decodes", "mixed", "very_different_lengths"])
def test_what_a_request_left_in_a_block_does_not_matter(label: str, fp8: bool):
    for specs in (None, WINDOW_LAYERS):
        check(BATCHES[label], specs=specs, stale=True, fp8=fp8)
        if NATIVE_MISSING is None and not fp8:
            check(BATCHES[label], specs=specs, stale=True, backend=NativeAttention)


@needs_native
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("label", BATCHES)
def test_native_equals_dense_attention(label: str, padding: int):
    check(BATCHES[label], padding=padding, backend=NativeAttention)


@needs_native
@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (8, 1), (6, 2)])
def test_native_head_groups(heads: tuple[int, int]):
    check(BATCHES["mixed"], heads=heads, backend=NativeAttention)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (8, 1), (6, 2)])
def test_head_groups(heads: tuple[int, int]):
    check(BATCHES["mixed"], heads=heads)


# Layers of one model with other heads, head dims, groups and scales.
DIFFERENT_LAYERS = (
    AttentionSpec(4, 2, 8, 0.3),
    AttentionSpec(8, 1, 16, 0.2),
    AttentionSpec(4, 2, 8, 0.3),
    AttentionSpec(3, 3, 8, 0.5),
)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("label", BATCHES)
def test_layers_of_different_shapes(label: str, padding: int):
    check(BATCHES[label], specs=DIFFERENT_LAYERS, padding=padding)
    if NATIVE_MISSING is None:
        check(BATCHES[label], specs=DIFFERENT_LAYERS, padding=padding, backend=NativeAttention)


# Sinks, and windows of less than a block, of some blocks, longer than most sequences.
WINDOW_LAYERS = (
    AttentionSpec(4, 2, 8, 0.3, window=9, sinks=True),
    AttentionSpec(4, 2, 8, 0.3, sinks=True),
    AttentionSpec(8, 1, 16, 0.2, window=1),
    AttentionSpec(6, 2, 8, 0.3, window=70, sinks=True),
    AttentionSpec(4, 2, 8, 0.3),
)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("label", BATCHES)
def test_windows_and_sinks(label: str, padding: int):
    check(BATCHES[label], specs=WINDOW_LAYERS, padding=padding)
    check(BATCHES[label], specs=WINDOW_LAYERS, padding=padding, dtype=torch.bfloat16)
    check(BATCHES[label], specs=WINDOW_LAYERS, padding=padding, fp8=True)
    if NATIVE_MISSING is None:
        check(BATCHES[label], specs=WINDOW_LAYERS, padding=padding, backend=NativeAttention)


def test_short_decodes_are_not_padded_to_a_long_one():
    assert len(check(BATCHES["very_different_lengths"])._decodes) > 1
    assert len(check(BATCHES["decodes"])._decodes) == 1


def test_plans_do_not_leak_into_the_next():
    attention = check(BATCHES["mixed"], padding=2)
    check(BATCHES["idle"], padding=2, attention=attention)
    check(BATCHES["decodes"], attention=attention)
    check(BATCHES["longer_than_a_query_chunk"], attention=attention)
    check(BATCHES["continued_chunks"], attention=attention)


@given(
    st.lists(st.integers(0, 20), max_size=5),
    st.lists(st.tuples(st.integers(0, 15), st.integers(1, 9)), max_size=3),
    st.sampled_from([1, 4, 16]),
)
@settings(max_examples=40)
def test_any_batch(contexts: list[int], extends: Seqs, block_size: int):
    seqs = [(context, 1) for context in contexts] + extends
    check(seqs, block_size=block_size, padding=1)
    if NATIVE_MISSING is None:
        check(seqs, block_size=block_size, padding=1, backend=NativeAttention)


@given(st.lists(st.integers(1, 500), max_size=40), st.sampled_from([1, 16]))
@settings(max_examples=200)
def test_length_groups_hold_each_decode_once(blocks: list[int], block_size: int):
    num_blocks = np.array(blocks, dtype=np.int64)
    groups = length_groups(num_blocks, block_size)
    if groups == [None]:
        groups = [np.arange(len(blocks))]
    assert sorted(i for group in groups for i in group) == list(range(len(blocks)))
    if len(groups) > 1:
        for group in groups:
            waste = num_blocks[group].max() * len(group) - num_blocks[group].sum()
            assert waste * block_size <= CALL_COST
