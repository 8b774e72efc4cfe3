"""What towers have where config.json has nothing equals what transformers assumes."""

from typing import Any

import pytest
from transformers import AutoConfig

from tests.published_configs import PUBLISHED
from workers.models.registry import parse_model_config
from workers.specs.vision import GlmVisionSpec

NAMES = {
    "depth": "depth",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_heads": "num_heads",
    "channels": "in_channels",
    "patch_size": "patch_size",
    "temporal_patch_size": "temporal_patch_size",
    "merge_size": "spatial_merge_size",
    "output_size": "out_hidden_size",
}


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_vl_moe", "glm4v_moe"])
@pytest.mark.parametrize("bare", [False, True], ids=["published", "bare"])
def test_sizes_of_a_tower(family: str, bare: bool) -> None:
    config: dict[str, Any] = dict(PUBLISHED[family])
    if bare:
        width = config["text_config"]["hidden_size"]
        config["vision_config"] = {"out_hidden_size": width}
    mine = parse_model_config(config, {}, "config.json").vision
    theirs = AutoConfig.for_model(**config).vision_config
    assert mine is not None
    assert {name: getattr(mine, name) for name in NAMES} == {
        name: getattr(theirs, key) for name, key in NAMES.items()
    }
    assert list(mine.deepstack) == list(getattr(theirs, "deepstack_visual_indexes", []))
    if isinstance(mine, GlmVisionSpec):
        assert mine.grid_side == theirs.image_size // theirs.patch_size
        assert mine.norm_eps == theirs.rms_norm_eps and mine.qkv_bias == theirs.attention_bias
    else:
        assert mine.grid_side**2 == theirs.num_position_embeddings
