"""Settings of images: from a checkpoint with a vision tower, its mistakes, and what `phalanx check` prints."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from cluster.api.images.geometry import Geometry
from cluster.api.images.settings import ImageSettings
from cluster.commands.check import check
from cluster.config.errors import ConfigError
from cluster.config.load import load_config
from cluster.config.phalanx_config import PhalanxConfig
from cluster.ingress import image_settings as subject
from tests.checkpoints.writer import make_checkpoint
from workers.models.registry import configured_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints without weights, by family; `text` is Qwen3-MoE."""
    parent = tmp_path_factory.mktemp("images")
    sizes = {"num_layers": 2, "hidden_size": 64, "num_experts": 4, "weights": False}
    found = {
        name: make_checkpoint(parent / name, family=name, vision=True, **sizes)
        for name in ("qwen3_5_moe", "qwen3_vl_moe", "glm4v_moe")
    }
    return found | {"text": make_checkpoint(parent / "text", **sizes)}


def config(folder: Path, **settings: Any) -> Any:
    model = {"path": str(folder), "weights": "dummy", "max_model_len": 512}
    return load_config({"model": model, "cache": {"num_blocks": 64}}, settings)


def image_settings(config: PhalanxConfig) -> ImageSettings | None:
    return subject.image_settings(config, configured_model(config.model))


def test_settings_come_from_the_checkpoint(folders: dict[str, Path]) -> None:
    for name, folder in folders.items():
        found = image_settings(config(folder))
        if name == "text":
            assert found is None
            continue
        assert found is not None and found.token_id == 300
        geometry = found.geometry
        assert (geometry.patch_size, geometry.merge_size, geometry.frames) == (4, 2, 2)
        assert (geometry.min_pixels, geometry.max_pixels) == (64, 2**16)
        assert geometry.counts_frames == (name == "glm4v_moe")


def test_settings_of_the_yaml(folders: dict[str, Path], tmp_path: Path) -> None:
    settings = {
        "serve.images.max_pixels": 4096,
        "serve.images.max_images": 3,
        "serve.allowed_media_domains": ["images.example", "*.parts.example", "[::1]:80"],
        "serve.allowed_media_folder": str(tmp_path),
    }
    found = image_settings(config(folders["qwen3_5_moe"], **settings))
    assert found is not None and found.geometry.max_pixels == 4096 and found.max_images == 3
    assert found.allowed_domains == ("images.example", "*.parts.example", "[::1]:80")
    assert found.allowed_folder == str(tmp_path)
    blind = config(folders["qwen3_5_moe"], **{"model.language_model_only": True})
    assert image_settings(blind) is None


def test_limits_of_the_ranks(folders: dict[str, Path]) -> None:
    settings = {"scheduler.max_image_tokens": 100, "cache.image_tokens": 250}
    for name in ("qwen3_vl_moe", "glm4v_moe"):
        found = image_settings(config(folders[name], **settings))
        assert found is not None and found.max_request_tokens == 250
        sizes = [found.geometry.num_tokens(*size) for size in ((4000, 4000), (900, 30), (90, 80))]
        assert 90 <= max(sizes) <= 100
    found = image_settings(config(folders["qwen3_vl_moe"]))
    assert found is not None and found.max_request_tokens == 512  # the longest sequence


@pytest.mark.parametrize("name", ["qwen3_vl_moe", "glm4v_moe"])
@pytest.mark.parametrize("most", [1, 2, 5, 30, "auto"])
def test_no_image_has_more_tokens_than_a_rank_takes(
    folders: dict[str, Path], name: str, most: int | str
) -> None:
    """Where sides are rounded up to the fewest pixels, and where an image is thinner than a token."""
    found = config(folders[name], **{"scheduler.max_image_tokens": most})
    spec = configured_model(found.model).vision
    images = image_settings(found)
    assert spec is not None and images is not None and images.videos is not None
    limit = spec.largest if most == "auto" else int(most)
    geometry, rules = images.geometry, images.videos.rules
    equal = geometry.within(geometry.max_pixels, geometry.max_pixels)
    draw = random.Random(0)
    for longest in (60, 500, 4000) * 40:
        size = draw.randint(20, longest), draw.randint(20, longest)
        for own in (geometry, equal, geometry.within(None, 1)):
            assert 1 <= own.num_tokens(*size) <= limit
            assert own.num_tokens(*size) == own.num_tokens(*size[::-1])
        _, rows, columns = rules.grid(2, *size)
        assert 1 <= rows * columns // rules.merge_size**2 <= limit


def test_limits_in_the_older_spelling(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "older"
    folder.mkdir()
    for file in folders["qwen3_vl_moe"].iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    del processor["size"]
    (folder / "preprocessor_config.json").unlink()
    limits = {"min_pixels": 128, "max_pixels": 2048}
    newer = {"image_processor": processor | limits | {"resample": None}}
    (folder / "processor_config.json").write_text(json.dumps(newer))
    found = image_settings(config(folder))
    assert found is not None
    assert (found.geometry.min_pixels, found.geometry.max_pixels) == (128, 2048)
    assert found.geometry.resample == Geometry.resample
    # transformers 5 leaves the file of an older version beside its own.
    older = processor | {"min_pixels": 64, "max_pixels": 1024, "image_mean": [0.5] * 3}
    (folder / "preprocessor_config.json").write_text(json.dumps(older))
    both = image_settings(config(folder))
    assert both is not None and both.geometry == found.geometry
    vision = configured_model(config(folder).model).vision
    assert vision is not None and list(vision.scale.mean) == processor["image_mean"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"serve.images.max_pixels": 2**17},
            "serve.images.max_pixels: 131072 is more than the 65536",
        ),
        (
            {"scheduler.max_image_tokens": 10, "serve.images.min_pixels": 641},
            "serve.images.min_pixels: 641 is more than the 640 of scheduler.max_image_tokens = 10",
        ),
        ({"serve.images.min_pixels": 900, "serve.images.max_pixels": 400}, "900 is more than"),
        ({"serve.allowed_media_folder": "/no/such"}, "there is no folder '/no/such'"),
        ({"serve.images.max_body_bytes": 2**30}, "hold no body of serve.images.max_body_bytes"),
        ({"serve.allowed_media_domains": ["https://a.example"]}, "serve.allowed_media_domains"),
    ],
)
def test_mistakes(folders: dict[str, Path], settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(folders["qwen3_vl_moe"], **settings)
    assert message in str(error.value)


def test_what_check_prints(folders: dict[str, Path]) -> None:
    report = check(config(folders["glm4v_moe"]))
    assert report.images.startswith(
        "up to 16 a request, each of at most 512 tokens (64 pixels a token); from data URLs; 0.3"
    )
    domains = {"serve.allowed_media_domains": ["images.example"]}
    report = check(config(folders["qwen3_vl_moe"], **domains))
    assert "at most 1024 tokens" in report.images
    assert "; from data URLs, http(s) URLs of images.example; " in report.images
    blind = check(config(folders["qwen3_vl_moe"], **{"model.language_model_only": True}))
    assert blind.images == "none: model.language_model_only leaves the vision tower out"
    assert check(config(folders["text"])).images == "none: the model takes text alone"
