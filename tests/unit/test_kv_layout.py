"""KV layouts: what layers cache, in which shape, and how many bytes a block takes."""

from dataclasses import replace

import pytest
import torch

from kernels.attention.base import Attention
from kernels.attention.kv_layout import KVGroup, PagedHeads, group_layers, kv_block_bytes
from kernels.attention.spec import AttentionSpec
from kernels.backends.registry import ATTENTION, backend_class
from tests.unit.test_kernels_select import CPU
from workers.engine.kv_caches import allocate_kv_caches

ATTENTIONS = [backend_class("attention", name) for name in ATTENTION]
WIDE, NARROW = AttentionSpec(8, 4, 16, 0.25), AttentionSpec(4, 1, 8, 0.35)


def test_layers_of_one_layout_are_one_group() -> None:
    assert group_layers([PagedHeads(4, 16)] * 3) == (KVGroup(PagedHeads(4, 16), (0, 1, 2)),)
    assert group_layers([]) == ()


def test_layers_are_grouped_by_layout() -> None:
    layouts = [PagedHeads.of(spec) for spec in (WIDE, NARROW, NARROW, WIDE)]
    assert group_layers(layouts) == (
        KVGroup(PagedHeads(4, 16), (0, 3)),
        KVGroup(PagedHeads(1, 8), (1, 2)),
    )


def test_bytes_of_a_block_are_the_sum_over_layers() -> None:
    groups = group_layers(PagedHeads.of(spec) for spec in (WIDE, NARROW, WIDE))
    values_a_token = 2 * (4 * 16 + 1 * 8 + 4 * 16)
    assert kv_block_bytes(groups, 32, 2) == values_a_token * 32 * 2
    assert kv_block_bytes(groups, 1, 4) == values_a_token * 4


def test_caches_take_the_bytes_of_their_blocks() -> None:
    groups = group_layers(PagedHeads.of(spec) for spec in (WIDE, NARROW, WIDE))
    caches = allocate_kv_caches(groups, 5, 4, torch.bfloat16, torch.device("cpu"))
    shapes = [tuple(cache.shape) for cache in caches]
    assert shapes == [(2, 5, 4, 4, 16), (2, 5, 4, 1, 8), (2, 5, 4, 4, 16)]
    assert not any(cache.any() for cache in caches)
    assert len({cache.data_ptr() for cache in caches}) == 3, "no layer shares another's cache"
    assert sum(cache.nbytes for cache in caches) == 5 * kv_block_bytes(groups, 4, 2)


@pytest.mark.parametrize("attention", ATTENTIONS, ids=ATTENTION)
def test_backends_that_run_on_cpu_page_heads(attention: type[Attention]) -> None:
    """cache.num_blocks is resolved for CPU before a backend is chosen."""
    if "cpu" in attention.devices:
        assert attention.kv_layout(WIDE) == PagedHeads.of(WIDE)


@pytest.mark.parametrize("attention", ATTENTIONS, ids=ATTENTION)
def test_a_window_is_refused(attention: type[Attention]) -> None:
    window = AttentionSpec(8, 4, 64, 0.125, window=128)
    dtype = torch.bfloat16 if attention.graph else torch.float32
    assert "window, the model has one of 128 tokens" in str(
        attention.unsupported_reason(replace(CPU, dtype=dtype, attention_specs=(window,)))
    )
