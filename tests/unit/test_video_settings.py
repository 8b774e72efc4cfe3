"""Settings of videos: from the video processor of a checkpoint, its limits, and what `phalanx check` prints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.api.images.settings import ImageSettings
from cluster.commands.check import check
from cluster.config.errors import ConfigError
from cluster.config.load import load_config
from cluster.ingress.image_settings import image_settings
from tests.checkpoints.families import PROCESSOR
from tests.checkpoints.writer import make_checkpoint
from workers.models.registry import configured_model

Made = Callable[..., Path]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Makes a checkpoint without weights; `processor` is its video processor."""

    def make(family: str = "qwen3_vl_moe", processor: dict[str, Any] | None = None) -> Path:
        sizes = {"num_layers": 2, "hidden_size": 64, "num_experts": 4, "weights": False}
        folder = make_checkpoint(tmp_path / family, family=family, vision=True, **sizes)
        if processor is not None:
            (folder / "video_preprocessor_config.json").write_text(json.dumps(processor))
        return folder

    return make


def config(folder: Path, **settings: Any) -> Any:
    model = {"path": str(folder), "weights": "dummy", "max_model_len": 512}
    return load_config({"model": model, "cache": {"num_blocks": 64}}, settings)


def settings_of(folder: Path, **settings: Any) -> ImageSettings:
    found = config(folder, **settings)
    images = image_settings(found, configured_model(found.model))
    assert images is not None
    return images


@pytest.mark.parametrize(
    ("family", "style", "token_id"),
    [
        ("qwen3_5_moe", "qwen3_vl", 301),
        ("qwen3_vl_moe", "qwen3_vl", 301),
        ("glm4v_moe", "glm4v", 300),
    ],
)
def test_without_a_processor_of_its_own(made: Made, family: str, style: str, token_id: int) -> None:
    """The processor of images is that of videos too, as transformers has it."""
    videos = settings_of(made(family)).videos
    assert videos is not None and videos.token_id == token_id
    rules = videos.rules
    assert (rules.style, rules.patch_size, rules.merge_size, rules.per_token) == (style, 4, 2, 2)
    assert (rules.min_pixels, rules.max_pixels, rules.rank_tokens) == (64, 2**16, 512)
    assert (rules.fps, rules.frame_tokens, rules.most_frames) == (2.0, None, 768)


@pytest.mark.parametrize(
    ("family", "of_images", "style"),
    [
        ("qwen3_vl_moe", "Qwen2VLImageProcessorFast", "qwen3_vl"),
        ("glm4v_moe", "Glm4vImageProcessor", "glm4v"),
        ("glm4v_moe", "Glm46VImageProcessor", "glm46v"),
    ],
)
def test_the_name_of_the_processor_of_images(
    made: Made, family: str, of_images: str, style: str
) -> None:
    folder = made(family)
    (folder / "preprocessor_config.json").write_text(
        json.dumps(PROCESSOR | {"image_processor_type": of_images})
    )
    videos = settings_of(folder).videos
    assert videos is not None and videos.rules.style == style


def test_the_processor_of_a_checkpoint(made: Made) -> None:
    given = {
        "video_processor_type": "Glm46VVideoProcessor",
        "size": {"shortest_edge": 128, "longest_edge": 4096},
        "fps": 3,
        "max_frames": 20,
        "cap_pixels_per_frame": True,
        "max_video_tokens": 30,
    }
    folder = made("glm4v_moe", given)
    videos = settings_of(folder, **{"serve.videos.max_frames": 9}).videos
    assert videos is not None
    rules = videos.rules
    assert (rules.style, rules.min_pixels, rules.max_pixels) == ("glm46v", 128, 4096)
    assert (rules.fps, rules.max_frames, rules.frame_tokens, rules.most_frames) == (3, 20, 30, 9)
    newer = {"video_processor": given | {"fps": 1, "size": None}}
    (folder / "processor_config.json").write_text(json.dumps(newer))
    videos = settings_of(folder, **{"serve.videos.max_pixels": 10_000}).videos
    assert videos is not None and videos.rules.fps == 1
    assert (videos.rules.min_pixels, videos.rules.max_pixels) == (10_000, 10_000)


@pytest.mark.parametrize(
    ("processor", "reason"),
    [
        ({"video_processor_type": "OtherProcessor"}, "'OtherProcessor' is not known here"),
        ({"do_sample_frames": False}, "takes all frames"),
        ({"image_mean": [0.1, 0.2, 0.3]}, "scales frames otherwise than images (image_mean)"),
        ({"image_std": 0.25}, "scales frames otherwise than images (image_std)"),
    ],
)
def test_processors_that_are_not_served(made: Made, processor: dict[str, Any], reason: str) -> None:
    folder = made(processor=processor)
    found = settings_of(folder)
    assert found.videos is None and reason in found.no_videos
    assert check(config(folder)).videos == f"none: {found.no_videos}"


def test_what_check_prints(made: Made) -> None:
    folder = made()
    found = check(config(folder, **{"serve.videos.max_videos": 2})).videos
    assert found.startswith("up to 2 a request, each of at most 768 frames and 512 tokens; ")
    assert "lists of frames" in found
    blind = check(config(folder, **{"model.language_model_only": True})).videos
    assert blind == "none: model.language_model_only leaves the vision tower out"


def test_mistakes(made: Made) -> None:
    folder = made()
    with pytest.raises(
        ConfigError, match=r"serve\.videos\.max_pixels: 131072 is more than the 65536"
    ):
        config(folder, **{"serve.videos.max_pixels": 2**17})
