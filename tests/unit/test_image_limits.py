"""Limits and memory of images: by the configuration, in `phalanx check`, and what a rank measures at its start."""

from pathlib import Path
from typing import Any

import pytest

from cluster.commands.check import check
from cluster.config.load import load_config
from tests.distributed.engine_harness import rank_config
from tests.image_case import image_checkpoint
from tests.unit.model_case import OneRank
from workers.images.encoder import ImageEncoder
from workers.images.limits import CACHE_TOKENS, ImageLimits
from workers.models.registry import configured_model, load_model_config
from workers.rank.rank_images import largest_grid, measure_time, run_largest
from workers.specs.model import weight_map


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_checkpoint(tmp_path_factory.mktemp("limits"), "qwen3_vl_moe")


def checked(folder: Path, **sections: dict[str, Any]) -> Any:
    model = {"path": str(folder), **sections.pop("model", {})}
    return check(load_config({"model": model, "cluster": {"device": "cpu"}, **sections}), 1)


def test_limits_follow_the_processor_and_the_context(folder: Path, tmp_path: Path) -> None:
    spec = load_model_config(folder).vision
    assert spec is not None and spec.largest == 1024
    limits = ImageLimits.of(rank_config(folder, 1), spec)
    assert limits == ImageLimits(1024, None, 1024)
    assert ImageLimits.of(rank_config(folder, 1, model={"max_model_len": 500}), spec).image == 500
    glm = load_model_config(image_checkpoint(tmp_path, "glm4v_moe", weights=False)).vision
    assert glm is not None and glm.largest == 512, "its processor counts both frames of a patch"
    long = ImageLimits.of(rank_config(folder, 1, model={"max_model_len": 10**6}), spec)
    assert (long.image, long.cache) == (1024, CACHE_TOKENS)
    scheduler = {"max_image_tokens": 30, "image_tokens_per_step": 20}
    small = {"scheduler": scheduler, "cache": {"image_tokens": 50}}
    limits = ImageLimits.of(rank_config(folder, 1, **small), spec)
    assert (limits.image, limits.per_step, limits.cache, limits.batch) == (30, 20, 50, 30)
    assert limits.cache_bytes(spec, 2) == 50 * 3 * 64 * 2


def test_check_prints_images_and_counts_their_memory(folder: Path) -> None:
    report = checked(folder, scheduler={"max_image_tokens": 100}, cache={"image_tokens": 200})
    assert "each of at most 100 tokens" in report.images
    beside = "; 0.3 of a step's time beside it, or 256 tokens on a CPU, embeddings of 200 are kept"
    assert report.images.endswith(beside)
    scheduler = {"max_image_tokens": 100, "image_tokens_per_step": 512}
    more = checked(folder, scheduler=scheduler, cache={"image_tokens": 300})
    assert "; 512 tokens beside a step, embeddings of 300" in more.images
    outputs = 3 * 64 * 4  # of a token: its embedding, and what two layers add, in float32
    assert more.ranks[0].buffer_bytes - report.ranks[0].buffer_bytes == 100 * outputs
    assert not any("vision tower" in warning for warning in report.warnings)


def test_a_language_model_only_has_no_tower(folder: Path) -> None:
    report = checked(folder, model={"language_model_only": True})
    assert report.images == "none: model.language_model_only leaves the vision tower out"
    warning = "the vision tower of the checkpoint is not loaded: only text is served"
    assert warning in report.warnings
    config = rank_config(folder, 1, model={"language_model_only": True})
    model = configured_model(config.model)
    whole = weight_map(load_model_config(folder))
    assert model.vision is None
    assert {entry.name for entry in whole} - {entry.name for entry in weight_map(model)} == {
        entry.name for entry in whole if ".visual." in entry.name
    }
    assert OneRank(folder, config=None).model.vision is not None
    weights = checked(folder).ranks[0].weight_bytes - report.ranks[0].weight_bytes
    assert weights == 4 * sum(entry.size for entry in whole if ".visual." in entry.name)


def test_the_largest_image_runs(folder: Path) -> None:
    tower = OneRank(folder).model.vision
    assert tower is not None
    encoder = ImageEncoder(tower, ImageLimits(30, 8, 40))
    assert run_largest(encoder) == 0, "memory is measured on GPUs alone"
    measure_time(encoder)
    assert encoder.token_s is not None and encoder.token_s > 0
    encoder.close()
    assert [largest_grid(tokens, 2) for tokens in (1, 30, 1024)] == [
        (1, 2, 2),
        (1, 10, 12),
        (1, 64, 64),
    ]
