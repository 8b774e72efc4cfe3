"""Prompts with images have the tokens and the patches that transformers' processor makes of the same chat."""

import random
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from cluster.api.images.placeholders import PlacedImage, keep_last, place_images
from cluster.api.images.reader import ImageReader
from cluster.api.images.settings import ImageSettings
from cluster.api.request.draft import Draft, Drafter, EngineFacts
from cluster.api.settings import ApiSettings
from cluster.errors import BadRequestError
from tests.unit.image_case import (
    PAD,
    SMALL,
    as_file,
    data_url,
    image_at,
    image_part,
    noise,
    text_part,
    vision_tokenizer,
)

FACTS = EngineFacts("model", 100_000, 100_000)


class Oracle(Qwen3VLProcessor):
    """Without videos, because their processor needs torchvision."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(vision_tokenizer().source[0])
    size = {"shortest_edge": SMALL.min_pixels, "longest_edge": SMALL.max_pixels}
    images = Qwen2VLImageProcessorPil(patch_size=SMALL.patch_size, size=size)
    return Oracle(
        image_processor=images, tokenizer=tokenizer, chat_template=tokenizer.chat_template
    )


def draft(messages: list[dict[str, Any]], **fields: Any) -> Draft:
    settings = ApiSettings(images=ImageSettings(token_id=PAD, geometry=SMALL, max_images=99))
    drafter = Drafter(vision_tokenizer(), settings).with_images({})
    return drafter.chat({"messages": messages, "max_tokens": 1, **fields}, FACTS)


@pytest.mark.parametrize("seed", range(8))
def test_a_random_chat(oracle: Oracle, seed: int) -> None:
    draw = random.Random(seed)
    ours: list[dict[str, Any]] = []
    theirs: list[dict[str, Any]] = []
    for role in draw.choices(("user", "tool", "assistant"), k=draw.randint(1, 6)):
        if role == "assistant":
            ours.append({"role": role, "content": "so <be> it"})
            theirs.append(ours[-1])
            continue
        found: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for _ in range(draw.randint(1, 4)):
            image = noise(draw.randint(1, 90), draw.randint(1, 90), draw.randint(0, 3))
            text = text_part(
                draw.choice(("a", " b \n", "<|vision_start|>", "\u00e9\U0001f600", ""))
            )
            pair = image_part(as_file(image)), {"type": "image", "image": image}
            found.append(pair if draw.random() < 0.6 else (text, text))
        if all(part["type"] == "text" for part, _ in found):
            found.append((image_part(as_file(image)), {"type": "image", "image": image}))
        ours.append({"role": role, "content": [part for part, _ in found]})
        theirs.append({"role": role, "content": [part for _, part in found]})
    made = draft(ours)
    expected = oracle.apply_chat_template(
        theirs,
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
        do_rescale=False,
        do_normalize=False,
    )
    assert made.prompts[0].token_ids.tolist() == expected["input_ids"][0]
    is_image = np.zeros(len(made.prompts[0].token_ids), int)
    for image in made.images:
        is_image[image.offset : image.offset + image.num_tokens] = 1
    assert is_image.tolist() == expected["mm_token_type_ids"][0]
    if not made.images:
        return
    assert [list(image.grid_thw) for image in made.images] == expected["image_grid_thw"].tolist()
    pixels = np.frombuffer(b"".join(image.pixels for image in made.images), np.uint8)
    assert np.array_equal(pixels, np.asarray(expected["pixel_values"]).ravel())


def images_of(*sizes: tuple[int, int]) -> list[Any]:
    reader = ImageReader(ImageSettings(token_id=PAD, geometry=SMALL), {})
    return reader.open([image_at(data_url(as_file(noise(*size)))) for size in sizes], {})


def test_placeholders_and_images_match() -> None:
    images = images_of((8, 8), (16, 8))
    ids, placed = place_images([1, PAD, PAD, 2], {"image": PAD}, images)
    assert ids.tolist() == [1, PAD, PAD, PAD, 2] and [it.offset for it in placed] == [1, 2]
    with pytest.raises(BadRequestError, match="contains the placeholder itself"):
        place_images([PAD] * 3, {"image": PAD}, images)
    with pytest.raises(BadRequestError, match="leaves images out"):
        place_images([1, 2], {"image": PAD}, images)


def test_cuts() -> None:
    ids, placed = place_images([1, PAD, 2, PAD, 3], {"image": PAD}, images_of((8, 16), (24, 8)))
    assert ids.tolist() == [1, PAD, PAD, 2, PAD, PAD, PAD, 3]
    offsets: dict[int, tuple[int, list[int]]] = {
        9: (8, [1, 4]),
        8: (8, [1, 4]),
        7: (7, [0, 3]),
        6: (5, [1]),  # a part of the first image would be left
        5: (5, [1]),
        4: (4, [0]),
        3: (1, []),
        1: (1, []),
    }
    for keep, (length, expected) in offsets.items():
        kept, images = keep_last(ids, placed, keep)
        assert kept.tolist() == ids.tolist()[-length:]
        assert [it.offset for it in images] == expected
        assert all(isinstance(it, PlacedImage) for it in images)


def test_a_prompt_without_images_is_as_before() -> None:
    text = [{"role": "user", "content": [text_part("a"), text_part("<|image_pad|>")]}]
    made = draft(text)
    assert made.images == () and made.prompts[0].token_ids.tolist().count(PAD) == 1
