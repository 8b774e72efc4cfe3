"""Paged attention against dense attention in float32, for every kind of batch."""

import math
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention.base import Attention
from kernels.attention.kv_layout import PagedHeads
from kernels.attention.native import NativeAttention
from kernels.attention.sdpa import CALL_COST, SdpaAttention, length_groups
from kernels.attention.spec import AttentionSpec
from kernels.backends.select import probe
from tests.closeness import calc_diff

NUM_LAYERS = 2
NATIVE_MISSING = probe("cpu").get("attention.native")
needs_native = pytest.mark.skipif(NATIVE_MISSING is not None, reason=str(NATIVE_MISSING))
Seqs = list[tuple[int, int]]  # (context, new tokens) of each sequence; decodes first


class LayerRows:
    """One layer's random rows and cache: new rows and padding of q, k, v; keys and values of whole sequences."""

    def __init__(self, pages: "Pages", spec: AttentionSpec, dtype: torch.dtype, padding: int):
        self.spec, self.dtype, self._generator = spec, dtype, pages.generator
        shape = PagedHeads.of(spec).shape(pages.num_blocks, pages.block_size)
        self.cache = torch.zeros(shape, dtype=dtype)
        self.keys, self.values = [], []
        for (context, new), slots in zip(pages.seqs, pages.slots_of, strict=True):
            key, value = (self._random(context + new, spec.num_kv_heads) for _ in "kv")
            for rows, cache in zip((key, value), self.cache, strict=True):
                cache.flatten(0, 1)[slots[:context]] = rows[:context]
            self.keys.append(key)
            self.values.append(value)
        pad = self._random(padding, spec.num_kv_heads)
        self.k, self.v = (
            torch.cat(
                [*(rows[context:] for rows, (context, _) in zip(of, pages.seqs, strict=True)), pad]
            )
            for of in (self.keys, self.values)
        )
        self.q = self._random(len(self.k), spec.num_heads)

    def _random(self, rows: int, heads: int) -> torch.Tensor:
        shape = (rows, heads, self.spec.head_dim)
        return torch.randn(shape, generator=self._generator).to(self.dtype)

    def move(self, device: str) -> None:
        for name in ("cache", "q", "k", "v"):
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
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


class Pages:
    """Sequences on a random set of blocks; each layer has random rows, with the context in its cache already."""

    def __init__(
        self,
        seqs: Seqs,
        specs: Sequence[AttentionSpec],
        block_size: int,
        dtype: torch.dtype,
        padding: int,
    ):
        self.seqs, self.block_size = seqs, block_size
        self.generator = torch.Generator().manual_seed(3)
        needed = [-(-(context + new) // block_size) for context, new in seqs]
        self.num_blocks = sum(needed) + 3
        free = torch.randperm(self.num_blocks, generator=self.generator).tolist()
        self.block_table = torch.zeros(len(seqs), max(needed, default=0) + 1, dtype=torch.int64)
        self.slots_of = []  # of each sequence's tokens
        for seq, (context, new) in enumerate(seqs):
            blocks = torch.tensor([free.pop() for _ in range(needed[seq])])
            self.block_table[seq, : needed[seq]] = blocks
            position = torch.arange(context + new)
            slots = blocks[position // block_size] * block_size + position % block_size
            self.slots_of.append(slots)
        new_slots = [
            slots[len(slots) - new :] for slots, (_, new) in zip(self.slots_of, seqs, strict=True)
        ]
        self.slots = torch.cat([torch.empty(0, dtype=torch.int64), *new_slots])
        self.layers = [LayerRows(self, spec, dtype, padding) for spec in specs]

    @property
    def caches(self) -> list[torch.Tensor]:
        return [layer.cache for layer in self.layers]

    def move(self, device: str) -> None:
        self.block_table, self.slots = self.block_table.to(device), self.slots.to(device)
        for layer in self.layers:
            layer.move(device)

    def batch(self) -> SimpleNamespace:
        new = [count for _, count in self.seqs]
        decodes = next((i for i, count in enumerate(new) if count != 1), len(new))
        return SimpleNamespace(
            num_tokens=sum(new),
            num_seqs=len(new),
            num_decodes=decodes,
            query_start_loc_cpu=np.cumsum([0, *new], dtype=np.int32),
            seq_lens_cpu=np.array([sum(seq) for seq in self.seqs], dtype=np.int32),
            block_table=self.block_table,
            slot_mapping=self.slots,
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
    attention: Attention | None = None,
    backend: type[Attention] = SdpaAttention,
    device: str = "cpu",
) -> Attention:
    """Run one batch through all layers (specs: one a layer, None: equal layers); also run by the GPU tests."""
    if specs is None:
        specs = [AttentionSpec(*heads, head_dim, scale=0.85 * head_dim**-0.5)] * NUM_LAYERS
    pages = Pages(seqs, specs, block_size, dtype, padding)
    pages.move(device)
    attention = attention or backend(specs, block_size)
    attention.bind(pages.caches)
    attention.plan(pages.batch())
    for number, layer in enumerate(pages.layers):
        out = attention(layer.q, layer.k, layer.v, number)
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
    written = layer.cache.flatten(1, 2)[:, pages.slots]
    assert torch.equal(written, torch.stack((layer.k[:start], layer.v[:start])))


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
@settings(max_examples=40, deadline=None)
def test_any_batch(contexts: list[int], extends: Seqs, block_size: int):
    seqs = [(context, 1) for context in contexts] + extends
    check(seqs, block_size=block_size, padding=1)
    if NATIVE_MISSING is None:
        check(seqs, block_size=block_size, padding=1, backend=NativeAttention)


@given(st.lists(st.integers(1, 500), max_size=40), st.sampled_from([1, 16]))
@settings(max_examples=200, deadline=None)
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
