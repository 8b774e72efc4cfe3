"""The KV cache of every family: `phalanx check` counts the bytes that a rank allocates."""

from pathlib import Path

import pytest
import torch

from cluster.commands.check_memory import rank_rows
from cluster.config.phalanx_config import PhalanxConfig
from cluster.config.resolve import resolve_rank_config
from kernels.interface.kv_layout import group_layers, kv_block_bytes, layout_of
from tests.distributed.engine_harness import rank_config
from tests.family_cases import VARIANTS, family_checkpoint
from tests.published_configs import PUBLISHED
from workers.config import CacheConfig
from workers.models.registry import load_model_config, parse_model_config
from workers.rank.backend_choice import backend_shape
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous
from workers.runner.graph_sizes import GraphSizes

BLOCKS, BLOCK_SIZE = 24, 16
# Values of a token in a layer: K and V of all heads, or a latent and the rotated key.
TINY = {
    "deepseek_v2": 32 + 8,
    "deepseek_v3": 32 + 8,
    "glm4_moe_lite": 32 + 8,
    "kimi_k2": 32 + 8,
}
# Bytes of a token in a layer of the published models, in bfloat16; all of their layers are alike.
RELEASED = {
    "deepseek_v2": 1152,
    "deepseek_v3": 1152,
    "ernie4_5_moe": 2048,
    "glm4_moe": 4096,
    "glm4_moe_lite": 1152,
    "granitemoe": 2048,
    "granitemoeshared": 2048,
    "kimi_k2": 1152,
    "minimax_m2": 4096,
    "mixtral": 4096,
    "olmoe": 8192,
    "qwen2_moe": 8192,
    "qwen3_5_moe": 2048,
    "qwen3_5_moe_text": 2048,
    "qwen3_moe": 2048,
    "qwen3_next": 2048,
}
STATES = {"qwen3_next": "bfloat16"}
DRAFTS = {"qwen3_next": {"method": "ngram", "num_draft_tokens": 3}}


@pytest.mark.parametrize("family", VARIANTS)
def test_check_counts_what_a_rank_allocates(tmp_path: Path, family: str) -> None:
    config = rank_config(
        family_checkpoint(tmp_path, family, "untied"),
        1,
        model={"weights": "dummy", "max_model_len": 64},
        cache={
            "num_blocks": BLOCKS,
            "block_size": BLOCK_SIZE,
            "state_dtype": STATES.get(family, "auto"),
        },
        speculation=DRAFTS.get(family, {}),
    )
    model = load_model_config(config.model.folder)
    process = RankProcess(0, config)
    try:
        epoch = Epoch(process, Rendezvous("", 0, family), 5)
        epoch.load()
        info = epoch.start_engine(lambda *_: None, lambda _: None)
        # layers with a window share caches with the other layers
        caches = {cache.data_ptr(): cache.nbytes for cache in process.caches.kv_caches}
        allocated = sum(caches.values())
        dtypes = {pool.state.dtype for pool in process.caches.states}
        pools = process.caches.states
        states = sum(p.conv.nbytes + p.state.nbytes + p.drafts.nbytes for p in pools)
        shape = backend_shape(config, model)
        (row,) = rank_rows(
            config, model, process.selection, shape, num_ubatches=0, graphs=GraphSizes()
        )
        epoch.close()
    finally:
        process.close()
    assert row.kv_bytes == info.memory_bytes["kv_cache"] == allocated
    assert row.state_bytes == info.memory_bytes["states"] == states
    assert any(pool.drafts.nbytes for pool in pools) == (family in DRAFTS)
    assert dtypes <= {getattr(torch, STATES.get(family, "float32"))}
    assert (states > 0) == (len(model.linear_specs) > 0)
    if family in RELEASED:
        attention = model.attention.kernel_spec
        values = TINY.get(family, 2 * attention.num_kv_heads * attention.head_dim)
        assert allocated == BLOCKS * BLOCK_SIZE * len(model.attention_specs) * values * 4
    elif family == "gpt_oss":
        assert model.windows == (9, None, 9) and len(caches) == 2
        assert allocated == BLOCKS * BLOCK_SIZE * 2 * (2 * 2 * 16) * 4


def test_a_block_of_gpt_oss_counts_half_of_its_layers() -> None:
    model = parse_model_config(PUBLISHED["gpt_oss"], {}, "config.json")
    groups = group_layers(map(layout_of, model.attention_specs), model.windows)
    assert kv_block_bytes(groups, 1, 2) == 18 * 2048


@pytest.mark.parametrize("family", RELEASED)
def test_bytes_of_a_token_of_published_models(family: str) -> None:
    model = parse_model_config(PUBLISHED[family], {}, "config.json")
    groups = group_layers(map(layout_of, model.attention_specs))
    assert kv_block_bytes(groups, 1, 2) == RELEASED[family] * len(model.attention_specs)


def test_bytes_of_a_slot_of_published_models() -> None:
    """2 MiB of recurrent state in a layer, and three tokens of 8,192 channels before the convolution."""
    for family, layers in (("qwen3_next", 36), ("qwen3_5_moe", 30)):
        specs = parse_model_config(PUBLISHED[family], {}, "config.json").linear_specs
        assert [spec.slot_bytes(2) for spec in specs] == [2**21 + 3 * 8192 * 2] * layers
        halved = CacheConfig(state_dtype="bfloat16").cached_states(specs)
        assert [spec.slot_bytes(2) for spec in halved] == [2**20 + 3 * 8192 * 2] * layers
        drafted = CacheConfig().cached_states(specs, 3)
        assert [spec.draft_bytes(2) for spec in drafted] == [3 * (8192 + 2 * 32) * 2] * layers
        assert not any(spec.draft_bytes(2) for spec in CacheConfig().cached_states(specs))


def test_precision_of_states_comes_from_the_checkpoint() -> None:
    """A setting of its own has precedence."""
    for found, expected in ((None, "float32"), ("float32", "float32"), ("bfloat16", "bfloat16")):
        raw = PUBLISHED["qwen3_5_moe"] | {"mamba_ssm_dtype": found}
        specs = parse_model_config(raw, {}, "config.json").linear_specs
        assert {spec.state_dtype for spec in CacheConfig().cached_states(specs)} == {expected}
        for chosen in ("float32", "bfloat16"):
            cached = CacheConfig(state_dtype=chosen).cached_states(specs)
            assert {spec.state_dtype for spec in cached} == {chosen}


@pytest.mark.parametrize(("family", "resolved"), [("qwen3_next", "float32"), ("qwen3_moe", "auto")])
def test_check_prints_the_precision_of_states(tmp_path: Path, family: str, resolved: str) -> None:
    """Where there are states. Without a number of blocks, their bytes bound the KV blocks on a CPU."""
    folder = family_checkpoint(tmp_path, family, "untied")
    blocks = []
    for states in ("auto", "float32", "bfloat16"):
        raw = {"model": {"path": str(folder), "max_model_len": 64}, "cluster": {"device": "cpu"}}
        cache = {"cpu_memory_gib": 0.02, "state_snapshots": 64, "state_dtype": states}
        found = resolve_rank_config(PhalanxConfig(**raw, cache=cache)).cache
        assert found.state_dtype == (resolved if states == "auto" else states)
        blocks.append(found.num_blocks)
    assert blocks[0] == blocks[1] and (blocks[2] > blocks[1]) == (family == "qwen3_next")
