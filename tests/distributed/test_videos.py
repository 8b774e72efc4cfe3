"""Greedy tokens and logits of prompts with videos equal transformers', which takes each video as one grid of patches.

Ranks take a video as the images of its frames, with times between them. transformers' model gets the same video whole.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cluster.api.videos.opened import OpenedVideo
from cluster.api.videos.rules import Style
from cluster.api.videos.source import FrameList
from tests.distributed.engine_harness import rank_config, run_engines
from tests.distributed.reference import Reference, check
from tests.image_case import (
    FAMILIES,
    PLACEHOLDER,
    Prompt,
    arrivals,
    image_checkpoint,
    random_image,
    references,
    scaled,
)
from tests.unit.image_case import as_file
from tests.unit.video_case import RULES, frames_of, video_at
from workers.models.registry import load_model_config
from workers.specs.vision import VisionSpec
from workers.wire.request import ImageInput

VIDEO_PLACEHOLDER = 301  # of Qwen; GLM has that of images
STYLES: dict[str, Style] = {
    "qwen3_5_moe": "qwen3_vl",
    "qwen3_vl_moe": "qwen3_vl",
    "glm4v_moe": "glm4v",
}


@dataclass(frozen=True)
class VideoPrompt(Prompt):
    """Tokens, images and videos. kinds: of each of `images`: 0 an image, n > 0 a part of the n-th video."""

    kinds: tuple[int, ...]

    def inputs(self, spec: VisionSpec) -> dict[str, torch.Tensor]:
        types = torch.zeros(1, len(self.token_ids), dtype=torch.int)
        of_images, of_videos = [], []
        grids: dict[int, list[int]] = {}
        for image, kind in zip(self.images, self.kinds, strict=True):
            types[0, image.offset : image.offset + image.num_tokens] = 2 if kind else 1
            (of_videos if kind else of_images).append(image)
            if kind:
                times, *rest = grids.get(kind, [0, *image.grid_thw[1:]])
                grids[kind] = [times + 1, *rest]
        if of_images and VIDEO_PLACEHOLDER not in self.token_ids:
            # transformers lays images and videos of GLM over each other, because they have one placeholder; it takes
            # the frames of a video as images too.
            return super().inputs(spec)
        found = {
            "mm_token_type_ids": types,
            "pixel_values_videos": torch.cat([scaled(image, spec) for image in of_videos]),
            "video_grid_thw": torch.tensor(list(grids.values())),
        }
        if of_images:
            found["pixel_values"] = torch.cat([scaled(image, spec) for image in of_images])
            found["image_grid_thw"] = torch.tensor([image.grid_thw for image in of_images])
        return found


def video_of(family: str, count: int, width: int, height: int, seed: int) -> OpenedVideo:
    rules = replace(RULES, style=STYLES[family])
    files = [as_file(frame) for frame in frames_of(count, width, height, seed)]
    return OpenedVideo.of(video_at(""), FrameList(files, 2**20, 5.0), rules, sampled=True)


def prompt_of(family: str, parts: list[list[int] | ImageInput | OpenedVideo]) -> VideoPrompt:
    """A prompt of texts, images and videos in this order; the times of frames are texts of bytes."""
    tokens: list[int] = []
    images: list[ImageInput] = []
    kinds: list[int] = []
    num_videos = 0
    for part in parts:
        if isinstance(part, list):
            tokens += part
        elif isinstance(part, ImageInput):
            images.append(replace(part, offset=len(tokens)))
            kinds.append(0)
            tokens += [PLACEHOLDER] * part.num_tokens
        else:
            num_videos += 1
            for text, frames in zip(part.texts, part.parts, strict=True):
                tokens += text.partition("<|")[0].encode()
                images.append(frames.read(len(tokens)))
                kinds.append(num_videos)
                is_qwen = STYLES[family] == "qwen3_vl"
                tokens += [VIDEO_PLACEHOLDER if is_qwen else PLACEHOLDER] * frames.num_tokens
                tokens += text.rpartition("|>")[2].encode() or [255]
    return VideoPrompt(tokens, tuple(images), tuple(kinds))


def prompts(family: str, spec: VisionSpec) -> list[VideoPrompt]:
    generator = np.random.default_rng(5)

    def text(length: int) -> list[int]:
        return generator.integers(0, 256, length).tolist()

    def video(*args: int) -> OpenedVideo:
        return video_of(family, *args)

    image = random_image(1, (1, 6, 12), spec)
    start = text(21)
    found = [
        [text(5), video(5, 24, 16, 0), text(9)],
        [start, video(8, 32, 24, 1), text(3), video(2, 40, 16, 2), text(11)],
        [start, video(8, 32, 24, 1), text(17)],
        [text(2), image, text(4), video(6, 16, 16, 3), image, text(6)],
    ]
    return [prompt_of(family, parts) for parts in found]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Checkpoint, prompts and what transformers generates, by family."""

    @cache
    def find(family: str) -> tuple[Path, list[VideoPrompt], list[Reference]]:
        path = image_checkpoint(tmp_path_factory.mktemp(family), family)
        spec = load_model_config(path).vision
        assert spec is not None
        asked = prompts(family, spec)
        return path, asked, references(path, asked)

    return find


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, {"scheduler": {"max_num_batched_tokens": 7, "max_num_seqs": 4}}),
        (2, {"cache": {"image_tokens": 150}, "scheduler": {"max_image_tokens": 60}}),
    ],
    ids=["chunks of 7", "two ranks"],
)
def test_tokens_and_logits_equal_transformers(
    rank_pool: Any,
    case: Callable[[str], Any],
    family: str,
    ranks: int,
    settings: dict[str, dict[str, Any]],
) -> None:
    path, asked, expected = case(family)
    config = rank_config(path, ranks, **settings)
    results = run_engines(rank_pool, config, arrivals(asked, ranks), keep_logits=True)
    check(expected, results, len(expected))
    if ranks == 1:  # the frames of a video that comes twice are computed once
        digests = {image.digest for prompt in asked for image in prompt.images}
        assert results[0].images_computed == len(digests)
        assert len(digests) < sum(len(prompt.images) for prompt in asked)
