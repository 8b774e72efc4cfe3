"""KV layouts: what layers cache, in which shape, and how many bytes a block takes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.attention.base import Attention
from kernels.attention.native import NativeAttention
from kernels.attention.sdpa import SdpaAttention
from kernels.interface.attention_spec import AttentionSpec, MlaDims
from kernels.interface.kv_layout import (
    KVGroup,
    PagedHeads,
    group_layers,
    kv_block_bytes,
    layout_of,
)
from kernels.interface.registry import ATTENTION, backend_class
from tests.distributed.engine_harness import make_request, rank_config
from tests.unit.model_case import BLOCK_SIZE, OneRank, make_batch, small_checkpoint
from tests.unit.test_kernels_select import CPU
from workers.kv_cache.caches import allocate_kv_caches
from workers.models.registry import load_model_config
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous
from workers.specs.model import ModelConfig

ATTENTIONS = [backend_class("attention", name) for name in ATTENTION]
WIDE, NARROW = AttentionSpec(8, 4, 16, 0.25), AttentionSpec(4, 1, 8, 0.35)
LATENT = AttentionSpec(4, 1, 12, 0.35, mla=MlaDims(16, 4, 8, 6))


def test_layers_of_one_layout_are_one_group() -> None:
    assert group_layers([PagedHeads(4, 16)] * 3) == (KVGroup(PagedHeads(4, 16), (0, 1, 2)),)
    assert group_layers([]) == ()


def test_layers_with_a_window_share_caches_with_the_other_layers():
    (group,) = group_layers([PagedHeads(4, 16)] * 5, [128, None, 128, None, 128])
    assert (group.layers, group.window_layers) == ((1, 3), (0, 2, 4))
    assert group.caches == ((1, 0), (3, 2), (4,))
    assert kv_block_bytes([group], 16, 2) == 3 * PagedHeads(4, 16).block_bytes(16, 2)
    caches = allocate_kv_caches([group], 3, 16, torch.float32, torch.device("cpu"))
    addresses = [cache.data_ptr() for cache in caches]
    assert addresses[0] == addresses[1] and addresses[2] == addresses[3]
    assert len(set(addresses)) == 3


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


def test_an_fp8_cache_takes_a_byte_a_value_and_one_for_each_scale() -> None:
    specs = [replace(spec, fp8_cache=True) for spec in (WIDE, NARROW)]
    groups = group_layers(map(layout_of, specs))
    for value_bytes in (2, 4):
        assert kv_block_bytes(groups, 32, value_bytes) == 2 * 32 * (4 * (16 + 1) + 1 * (8 + 1))
    caches = allocate_kv_caches(groups, 5, 4, torch.bfloat16, torch.device("cpu"))
    assert {cache.dtype for cache in caches} == {torch.uint8}
    assert sum(cache.nbytes for cache in caches) == 5 * kv_block_bytes(groups, 4, 2)


@pytest.mark.parametrize("name", ATTENTION)
def test_an_fp8_cache_is_refused_by_backends_without_it(name: str) -> None:
    attention = backend_class("attention", name)
    spec = LATENT if attention.mla else AttentionSpec(8, 4, 64, 0.125)
    dtype = torch.bfloat16 if attention.graph else torch.float32
    shape = replace(CPU, dtype=dtype, attention_specs=(replace(spec, fp8_cache=True),))
    reason = attention.unsupported_reason(shape)
    if attention.fp8_cache:
        assert reason is None or "latents of 512" in reason
    else:
        assert reason is not None and "cache.dtype is fp8" in reason


def test_caches_take_the_bytes_of_their_blocks() -> None:
    groups = group_layers(PagedHeads.of(spec) for spec in (WIDE, NARROW, WIDE))
    caches = allocate_kv_caches(groups, 5, 4, torch.bfloat16, torch.device("cpu"))
    shapes = [tuple(cache.shape) for cache in caches]
    assert shapes == [(2, 5, 4, 4, 16), (2, 5, 4, 1, 8), (2, 5, 4, 4, 16)]
    assert not any(cache.any() for cache in caches)
    assert len({cache.data_ptr() for cache in caches}) == 3, "no layer shares another's cache"
    assert sum(cache.nbytes for cache in caches) == 5 * kv_block_bytes(groups, 4, 2)


@pytest.mark.parametrize("attention", ATTENTIONS, ids=ATTENTION)
def test_backends_that_run_on_cpu_declare_no_layout(attention: type[Attention]) -> None:
    """cache.num_blocks is resolved for CPU before a backend is chosen."""
    if "cpu" in attention.devices:
        for spec in (WIDE, LATENT):
            assert attention.kv_layout(spec) == layout_of(spec)


@pytest.mark.parametrize("attention", ATTENTIONS, ids=ATTENTION)
def test_a_window_is_refused(attention: type[Attention]) -> None:
    """By each backend but those that serve windows, which also serve sinks."""
    window = AttentionSpec(8, 4, 64, 0.125, window=128)
    if attention.mla:
        window = replace(LATENT, window=128)
    dtype = torch.bfloat16 if attention.graph else torch.float32
    shapes = [
        replace(CPU, dtype=dtype, attention_specs=(spec,))
        for spec in (window, replace(window, window=None, sinks=True))
    ]
    reasons = [str(attention.unsupported_reason(shape)) for shape in shapes]
    if attention.windows:
        assert attention.sinks and reasons == ["None", "None"]
    else:
        assert "window, the model has one of 128 tokens" in reasons[0]
        assert "no attention sinks" in reasons[1]


def two_layouts(config: ModelConfig) -> ModelConfig:
    """The model with fewer heads in its middle layer."""
    first, middle, last = config.layers
    narrow = replace(middle, attention=replace(middle.attention, num_heads=2, num_kv_heads=1))
    return replace(config, layers=(first, narrow, last))


@pytest.mark.parametrize("backend", [SdpaAttention, NativeAttention])
def test_a_model_of_two_layouts_runs(tmp_path: Path, backend: type[Attention]) -> None:
    """Prompts in one step or in several, with decodes: one block table serves the caches of both layouts."""
    if reason := backend.unavailable(torch.device("cpu")):
        pytest.skip(reason)
    path = small_checkpoint(tmp_path)
    config = two_layouts(load_model_config(path))
    assert [group.layers for group in backend.kv_groups(config.attention_specs)] == [(0, 2), (1,)]
    rank = OneRank(path, config=config, backend=backend)
    groups = backend.kv_groups(config.attention_specs)
    num_blocks = rank.attention.kv_caches[0].shape[1]
    kv_bytes = sum(cache.nbytes for cache in rank.attention.kv_caches)
    assert kv_bytes == num_blocks * kv_block_bytes(groups, BLOCK_SIZE, 4)
    sequences = [[7] * 3 + list(range(9)), list(range(30, 60)), [250, 4, 4, 9, 11]]
    whole = rank.logits(make_batch(sequences, [0, 0, 0])).split([12, 30, 5])
    for cache in rank.attention.kv_caches:
        cache.zero_()
    first = [11, 13, 3]
    begun = [ids[:n] for ids, n in zip(sequences, first, strict=True)]
    got = rank.logits(make_batch(begun, [0, 0, 0])).split(first)
    rest = [ids[n:] for ids, n in zip(sequences, first, strict=True)]
    more = rank.logits(make_batch(rest, first)).split([len(ids) for ids in rest])
    for start, end, expected in zip(got, more, whole, strict=True):
        torch.testing.assert_close(torch.cat((start, end)), expected, atol=1e-4, rtol=0)


def test_a_rank_sizes_and_serves_a_model_of_two_layouts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small_checkpoint(tmp_path)
    config = two_layouts(load_model_config(path))
    monkeypatch.setattr("workers.rank.process.configured_model", lambda section: config)
    tokens: list[int] = []

    def publish(_ingress_id: str, outputs: list[Any]) -> None:
        tokens.extend(token for output in outputs for token in output.token_ids)

    process = RankProcess(0, rank_config(path, 1, model={"weights": "dummy", "max_model_len": 64}))
    try:
        epoch = Epoch(process, Rendezvous("", 0, "two-layouts"), 5)
        epoch.load()
        info = epoch.start_engine(publish, lambda _: None)
        kv_heads = 2 + 1 + 2
        assert info.memory_bytes["kv_cache"] == info.num_blocks * 16 * 2 * kv_heads * 16 * 4
        epoch.engine.submit(make_request("a", list(range(40)), max_tokens=5))
        while epoch.engine.step().run:
            pass
        epoch.close()
    finally:
        process.close()
    assert len(tokens) == 5
    model = OneRank(path, config=config)
    expected = list(range(40))
    for _ in range(5):
        expected.append(int(model.logits(make_batch([expected], [0]))[-1].argmax()))
    assert tokens == expected[40:]
