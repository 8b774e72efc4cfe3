"""Prompts with videos have the tokens and the patches that transformers' processors make of the same chat."""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

from cluster.api.images.settings import ImageSettings
from cluster.api.request.draft import Draft, Drafter, EngineFacts
from cluster.api.settings import ApiSettings
from cluster.api.tokenizer import ServingTokenizer, load_tokenizer
from cluster.api.videos.settings import VideoSettings
from cluster.errors import BadRequestError
from tests.unit.api_fakes import tiny_checkpoint
from tests.unit.image_case import (
    PAD,
    SMALL,
    TEMPLATE,
    add_vision_tokens,
    as_file,
    image_part,
    noise,
    text_part,
    vision_tokenizer,
)
from tests.unit.video_case import RULES, VIDEOS, frames_of, frames_url, video_part

FACTS = EngineFacts("model", 100_000, 100_000)
GLM_TOKENS = (
    *("<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>"),
    *("<|begin_of_video|>", "<|end_of_video|>"),
)
GLM_TEMPLATE = (
    TEMPLATE.replace(
        "<|vision_start|><|image_pad|><|vision_end|>", "<|begin_of_image|><|image|><|end_of_image|>"
    )
).replace(
    "<|vision_start|><|video_pad|><|vision_end|>", "<|begin_of_video|><|video|><|end_of_video|>"
)
GLM_IMAGE = 259


class Unchecked:
    """transformers looks its parts up where torchvision is installed alone."""

    def check_argument_for_proper_class(self, name: str, part: Any) -> type:
        return type(part)


class QwenOracle(Unchecked, Qwen3VLProcessor):
    pass


class GlmOracle(Unchecked, Glm4vProcessor):
    pass


@dataclass(frozen=True)
class Side:
    """A family: what we serve it with, and transformers' processor."""

    tokenizer: ServingTokenizer
    images: ImageSettings
    oracle: Any


def sizes(geometry: Any) -> dict[str, int]:
    return {"shortest_edge": geometry.min_pixels, "longest_edge": geometry.max_pixels}


def qwen() -> Side:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(vision_tokenizer().source[0])
    oracle = QwenOracle(
        image_processor=Qwen2VLImageProcessorPil(patch_size=4, size=sizes(SMALL)),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(patch_size=4, size=sizes(RULES)),
    )
    images = ImageSettings(token_id=PAD, geometry=SMALL, videos=VIDEOS, max_images=99)
    return Side(vision_tokenizer(), images, oracle)


def glm(folder: Path) -> Side:
    add_vision_tokens(tiny_checkpoint(folder), GLM_TOKENS, GLM_TEMPLATE)
    rules = replace(RULES, style="glm4v")
    geometry = replace(SMALL, counts_frames=True, min_pixels=128, max_pixels=2**13)
    oracle = GlmOracle(
        image_processor=Glm4vImageProcessorPil(patch_size=4, size=sizes(geometry)),
        tokenizer=PreTrainedTokenizerFast.from_pretrained(folder),
        video_processor=Glm4vVideoProcessor(patch_size=4, size=sizes(rules)),
    )
    videos = VideoSettings(token_id=GLM_IMAGE, rules=rules)
    images = ImageSettings(token_id=GLM_IMAGE, geometry=geometry, videos=videos, max_images=99)
    return Side(load_tokenizer(folder), images, oracle)


@pytest.fixture(scope="module", params=["qwen", "glm"])
def side(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Side:
    return qwen() if request.param == "qwen" else glm(tmp_path_factory.mktemp("glm"))


def draft(side: Side, content: list[dict[str, Any]], **fields: Any) -> Draft:
    drafter = Drafter(side.tokenizer, ApiSettings(images=side.images)).with_images({})
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1, **fields}
    return drafter.chat(body, FACTS)


@pytest.mark.parametrize("seed", range(6))
def test_a_random_chat(side: Side, seed: int) -> None:
    draw = random.Random(seed)
    content: list[dict[str, Any]] = []
    pictures: list[Any] = []
    videos: list[np.ndarray] = []
    for number in range(draw.randint(2, 7)):
        kind = draw.choice(("text", "image", "video")) if number else "video"
        if kind == "text":
            content.append(text_part(draw.choice(("a", " b! \n", "<0.3 seconds>", "\u00e9"))))
        elif kind == "image":
            pictures.append(noise(draw.randint(8, 60), draw.randint(8, 60), seed))
            content.append(image_part(as_file(pictures[-1])))
        elif len(videos) < side.images.videos.max_videos:
            # As large as they are behind the processor, because transformers resizes them with torchvision.
            frames = frames_of(draw.randint(2, 7), 8 * draw.randint(2, 4), 8 * draw.randint(2, 4))
            videos.append(np.stack([np.asarray(frame) for frame in frames]))
            content.append(video_part(frames_url(frames)))
    made = draft(side, content, mm_processor_kwargs={"fps": 5})
    parts = [{**part, "type": part["type"].removesuffix("_url")} for part in content]
    text = side.tokenizer.render_chat(
        [{"role": "user", "content": parts}], {}, add_generation_prompt=True
    )
    as_they_are = {"do_rescale": False, "do_normalize": False}
    seen = [
        {"total_num_frames": len(video), "fps": 5.0, "frames_indices": list(range(len(video)))}
        for video in videos
    ]
    expected = side.oracle(
        text=[text],
        images=pictures or None,
        videos=videos,
        images_kwargs=as_they_are,
        videos_kwargs={
            **as_they_are,
            "do_resize": False,
            "do_sample_frames": False,
            "do_convert_rgb": False,
            "video_metadata": seen,
        },
    )
    assert made.prompts[0].token_ids.tolist() == expected["input_ids"][0]
    types = np.array(expected["mm_token_type_ids"][0])
    mine = np.zeros_like(types)
    for image in made.images:
        mine[image.offset : image.offset + image.num_tokens] = 1
    assert np.array_equal(mine, types > 0)
    assert made.num_video_tokens == int((types == 2).sum())
    for kind, names in (
        (1, ("pixel_values", "image_grid_thw")),
        (2, ("pixel_values_videos", "video_grid_thw")),
    ):
        found = [image for image in made.images if types[image.offset] == kind]
        if not found:
            continue
        pixels = np.frombuffer(b"".join(image.pixels for image in found), np.uint8)
        assert np.array_equal(pixels, np.asarray(expected[names[0]]).ravel())
        grids = np.asarray(expected[names[1]]).tolist()
        split = [[1, rows, columns] for times, rows, columns in grids for _ in range(times)]
        assert [list(image.grid_thw) for image in found] == split


def test_the_placeholder_in_a_text(side: Side) -> None:
    marker = side.images.videos.rules.marker
    content = [video_part(frames_url(frames_of(4))), text_part(f"see {marker}?")]
    with pytest.raises(BadRequestError, match="2 placeholders for 1 videos: the text of a message"):
        draft(side, content)
    assert draft(side, content[1:]).images == ()


def test_equal_frames_have_equal_digests(side: Side) -> None:
    """Wherever they are in a video, so that a longer one is computed from where it differs."""
    frames = frames_of(6)
    short = draft(side, [video_part(frames_url(frames[:4]))])
    longer = draft(side, [video_part(frames_url(frames))])
    other = draft(side, [video_part(frames_url([*frames[:3], frames[5]]))])
    digests = [[image.digest for image in it.images] for it in (short, longer, other)]
    if short.images[0].grid_thw == longer.images[0].grid_thw:
        assert digests[0] == digests[1][:2]
    assert digests[0][0] == digests[2][0] and digests[0][1] != digests[2][1]


def test_a_cut_prompt_loses_the_first_frames(side: Side) -> None:
    whole = draft(side, [video_part(frames_url(frames_of(6))), text_part("what?")])
    last = whole.images[-1]
    keep = len(whole.prompts[0].token_ids) - last.offset
    content = [video_part(frames_url(frames_of(6))), text_part("what?")]
    cut = draft(side, content, truncate_prompt_tokens=keep + 3)
    assert [image.digest for image in cut.images] == [last.digest]
    assert cut.prompts[0].token_ids.tolist() == whole.prompts[0].token_ids.tolist()[-keep - 3 :]
