"""Settings of images and videos equal those of transformers' processors that are read from the same files."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from cluster.config.load import load_config
from cluster.ingress.image_settings import image_settings
from tests.checkpoints.families import PROCESSOR
from tests.checkpoints.writer import make_checkpoint
from workers.models.registry import configured_model

OLD, VIDEO, NEW = (
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)
FAMILIES = {
    "qwen3_vl_moe": (Qwen2VLImageProcessorPil, Qwen3VLVideoProcessor),
    "qwen3_5_moe": (Qwen2VLImageProcessorPil, Qwen3VLVideoProcessor),
    "glm4v_moe": (Glm4vImageProcessorPil, Glm4vVideoProcessor),
}
RELEASED = PROCESSOR | {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
OF_VIDEOS = RELEASED | {"size": {"shortest_edge": 128, "longest_edge": 2**14}}
OTHER = {"size": {"shortest_edge": 256, "longest_edge": 2**13}}
Files = dict[str, dict[str, Any]]


def saved(family: str, **fields: Any) -> Files:
    """The file that transformers 5 writes for both processors."""
    images, videos = FAMILIES[family]
    parts = {
        "image_processor": images(**RELEASED | fields).to_dict(),
        "video_processor": videos(**OF_VIDEOS).to_dict(),
    }
    return {NEW: json.loads(json.dumps(parts))}


RELEASE: Files = {OLD: RELEASED, VIDEO: OF_VIDEOS}
LIMITS = {"min_pixels": 192, "max_pixels": 2**12}
CASES: dict[str, Callable[[str], Files]] = {
    "release": lambda _: RELEASE,
    "one file": lambda _: {OLD: RELEASED},
    "limits without values": lambda _: RELEASE | {OLD: RELEASED | dict.fromkeys(LIMITS)},
    "saved": saved,
    "saved over a release": lambda family: RELEASE | saved(family, **OTHER),
    "a name alone": lambda _: RELEASE | {NEW: {"processor_class": "Processor"}},
    "filters": lambda _: {OLD: RELEASED | {"resample": 1}, VIDEO: OF_VIDEOS | {"resample": 2}},
    "rates": lambda _: RELEASE | {VIDEO: OF_VIDEOS | {"fps": 1, "max_duration": 50}},
}
OF_QWEN: dict[str, Callable[[str], Files]] = {
    "limits apart": lambda _: RELEASE | {OLD: RELEASED | LIMITS},
    "one limit apart": lambda _: RELEASE | {OLD: RELEASED | {"max_pixels": 2**12}},
}
WITHOUT = ("image_mean", "image_std", "rescale_factor", "size")
OF_GLM: dict[str, Callable[[str], Files]] = {
    "no values": lambda _: {OLD: {key: RELEASED[key] for key in RELEASED.keys() - set(WITHOUT)}},
}


@pytest.mark.parametrize(
    ("family", "case"),
    [
        *product(FAMILIES, CASES),
        *product(("qwen3_vl_moe", "qwen3_5_moe"), OF_QWEN),
        *product(("glm4v_moe",), OF_GLM),
    ],
)
def test_settings_equal_those_of_transformers(tmp_path: Path, family: str, case: str) -> None:
    sizes = {"num_layers": 2, "hidden_size": 64, "num_experts": 4, "weights": False}
    folder = make_checkpoint(tmp_path / "model", family=family, vision=True, **sizes)
    (folder / OLD).unlink()
    for name, content in (CASES | OF_QWEN | OF_GLM)[case](family).items():
        (folder / name).write_text(json.dumps(content))
    of_images, of_videos = (kind.from_pretrained(folder) for kind in FAMILIES[family])
    model = {"path": str(folder), "weights": "dummy", "max_model_len": 4096}
    config = load_config({"model": model, "cache": {"num_blocks": 512}}, {})
    spec = configured_model(config.model)
    found = image_settings(config, spec)
    assert found is not None and found.videos is not None and spec.vision is not None
    geometry, rules, scale = found.geometry, found.videos.rules, spec.vision.scale
    for mine, theirs in ((geometry, of_images), (rules, of_videos)):
        limits = mine.min_pixels, mine.max_pixels
        assert limits == (theirs.size["shortest_edge"], theirs.size["longest_edge"])
        assert (mine.patch_size, mine.merge_size) == (theirs.patch_size, theirs.merge_size)
        assert mine.resample == theirs.resample
        assert scale.factor == theirs.rescale_factor
        assert (scale.mean, scale.std) == (tuple(theirs.image_mean), tuple(theirs.image_std))
    for name in ("fps", "min_frames", "max_frames", "max_duration"):
        if getattr(of_videos, name, None) is not None:
            assert getattr(rules, name) == getattr(of_videos, name)
