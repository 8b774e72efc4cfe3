"""The three positions of tokens, the keys of blocks with images, and the pixels that a tower takes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.image_case import FAMILIES, GRIDS, Prompt, image_checkpoint, random_image, scaled
from tests.unit.schedulers import make_scheduler
from workers.models.config_reader import ModelConfigError
from workers.models.decoder import DecoderLM
from workers.models.registry import load_model_config
from workers.models.vision.grids import axis_weights, by_blocks
from workers.specs.rope import RopeSpec
from workers.specs.vision import Grid, VisionSpec
from workers.step.images import SequenceImages, problem_of
from workers.step.sequence import Sequence
from workers.wire.request import ImageInput


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory) -> Path:
    return image_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


def spec_of(folder: Path) -> VisionSpec:
    spec = load_model_config(folder).vision
    assert spec is not None
    return spec


def placed(offset: int, grid: Grid, digest: bytes = b"a") -> ImageInput:
    """An image without pixels."""
    tokens = grid[0] * grid[1] * grid[2] // 4
    return ImageInput(offset=offset, num_tokens=tokens, grid_thw=grid, digest=digest, pixels=b"")


def test_the_tower_and_positions_equal_transformers(folder: Path) -> None:
    """Of images alone and together, frames of a video among them."""
    from transformers import AutoModelForImageTextToText

    spec, config = spec_of(folder), load_model_config(folder)
    reference = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    tower = loaded(folder).vision
    assert tower is not None
    images = [random_image(seed, grid, spec) for seed, grid in enumerate((*GRIDS, (2, 4, 4)))]
    pixels = [np.frombuffer(image.pixels, dtype=np.uint8) for image in images]
    pixels_NP = torch.from_numpy(np.concatenate(pixels).reshape(-1, spec.patch_dim))
    found = tower.forward(pixels_NP, [image.grid_thw for image in images])
    frames = [(1, h, w) for t, h, w in (image.grid_thw for image in images) for _ in range(t)]
    inputs = torch.cat([scaled(image, spec) for image in images])
    with torch.inference_mode():
        out = reference.model.visual(inputs, grid_thw=torch.tensor(frames))
    expected = [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]
    torch.testing.assert_close(found, torch.stack(expected, 1), atol=1e-5, rtol=0)
    alone = tower.forward(torch.from_numpy(pixels[1].copy()).view(-1, spec.patch_dim), [GRIDS[1]])
    torch.testing.assert_close(found[1 : 1 + len(alone)], alone, atol=1e-5, rtol=0)

    prompt = Prompt.of([[1, 2], images[3], [3], images[1], images[0], [4, 5, 6]])
    parts = [2, images[3], 1, images[1], 0, images[0], 3]
    types = torch.tensor([[int(token == 300) for token in prompt.token_ids]])
    types[0, prompt.images[2].offset :] *= (
        2  # transformers takes neighbours of one kind for one image
    )
    positions, deltas = reference.model.get_rope_index(
        torch.tensor([prompt.token_ids]),
        mm_token_type_ids=types,
        image_grid_thw=torch.tensor([image.grid_thw for image in prompt.images[:2]]),
        video_grid_thw=torch.tensor([prompt.images[2].grid_thw]),
    )
    mine = SequenceImages(prompt.images, len(prompt.token_ids))
    assert len(parts) == 7 and mine.positions.T.tolist() == positions[:, 0].tolist()
    assert mine.delta == int(deltas)
    assert config.attention is not None and len(config.attention.rope.axes) * 2 == (
        config.attention.rope_dim
    )


def loaded(folder: Path) -> DecoderLM:
    from tests.unit.model_case import OneRank

    return OneRank(folder).model


@pytest.mark.parametrize("interleaved", [True, False])
def test_pairs_of_a_section_turn_by_its_position(interleaved: bool) -> None:
    spec = RopeSpec(sections=(4, 3, 2), interleaved_sections=interleaved)
    turns = [0, 1, 2, 0, 1, 2, 0, 1, 0] if interleaved else [0] * 4 + [1] * 3 + [2] * 2
    assert spec.axes == turns


@given(st.integers(1, 40), st.integers(1, 12), st.sampled_from(["linear", "cubic"]))
def test_weights_of_an_axis_resample_it(size: int, side: int, resampling: str) -> None:
    """They sum to 1, and an axis of its own size stays as it is."""
    weights = axis_weights(size, side, resampling)
    torch.testing.assert_close(weights.sum(1), torch.ones(size))
    if size == side:
        torch.testing.assert_close(weights, torch.eye(size), atol=1e-6, rtol=0)


def test_patches_come_by_blocks() -> None:
    places = torch.arange(24).view(4, 6)
    blocks = by_blocks(places, 2).view(2, 3, 4)
    assert blocks[0, 1].tolist() == [2, 3, 8, 9] and blocks[1, 0].tolist() == [12, 13, 18, 19]


def keys(images: tuple[ImageInput, ...], num_blocks: int = 8) -> list[bytes]:
    """Keys of a prompt of 32 equal tokens, in blocks of 4."""
    scheduler = make_scheduler(num_blocks=num_blocks * 2, block_size=4)
    request = Prompt([300] * 33, images).request("r", max_tokens=1)
    seq = Sequence.from_request(request)
    scheduler.cache.lookup(seq)
    return seq.block_keys


def test_a_block_is_keyed_by_its_images() -> None:
    """Equal images at equal places have equal keys; another image changes its first block and all behind it."""
    image = placed(5, (1, 4, 10))  # tokens 5 to 14: blocks 1 to 3
    text, one = keys(()), keys((image,))
    assert one == keys((replace(image, pixels=b"not read"),)) and len(one) == 8
    assert one[0] == text[0] and not set(one[1:]) & set(text[1:])
    others = [
        replace(image, digest=b"b"),
        replace(image, grid_thw=(1, 10, 4)),
        placed(6, (1, 4, 10)),
        placed(5, (1, 2, 2)),
    ]
    found = [keys((other,)) for other in others]
    assert all(other[0] == text[0] for other in found)
    assert len({key for other in (text, one, *found) for key in other[1:]}) == 7 * 6
    two = keys((image, placed(20, (1, 2, 2))))
    assert two[:5] == one[:5] and not set(two[5:]) & set(one[5:])


@given(
    st.lists(st.tuples(st.integers(0, 6), st.sampled_from(GRIDS)), max_size=4), st.integers(0, 9)
)
def test_positions_count_on(parts: list[tuple[int, Grid]], behind: int) -> None:
    """A token's positions are never beyond its place, text turns by one position, and nothing goes back."""
    images: list[ImageInput] = []
    place = 0
    for text, grid in parts:
        images.append(placed(place + text, grid))
        place += text + images[-1].num_tokens
    found = SequenceImages(images, place + behind)
    positions, places = found.positions, np.arange(place + behind)
    assert found.delta <= 0 and positions.shape == (place + behind, 3)
    assert (positions <= places[:, None]).all()
    text_rows = np.ones(len(places), dtype=bool)
    for image in images:
        text_rows[image.offset : image.offset + image.num_tokens] = False
    assert (np.diff(positions[text_rows], axis=1) == 0).all()
    assert (np.diff(positions[text_rows][:, 0]) > 0).all()
    assert (positions[place:, 0] == places[place:] + found.delta).all()


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ((placed(30, (1, 4, 4)),), "ends at token 34 of a prompt of 33"),
        ((placed(4, (1, 4, 4)), placed(6, (1, 2, 2))), "from 6 on; expected at least 8"),
        ((replace(placed(4, (1, 4, 4)), num_tokens=0),), "0 tokens"),
    ],
)
def test_images_must_lie_in_the_prompt(images: tuple[ImageInput, ...], words: str) -> None:
    assert words in (problem_of(images, 33) or "")


def test_a_processor_that_scales_nothing(tmp_path: Path) -> None:
    folder = image_checkpoint(tmp_path, "qwen3_5_moe", weights=False)
    file = folder / "preprocessor_config.json"
    file.write_text('{"do_rescale": false, "do_normalize": false, "max_pixels": 6400}')
    spec = spec_of(folder)
    scale = spec.scale
    assert (scale.factor, scale.mean, scale.std) == (1.0, (0.0,) * 3, (1.0,) * 3)
    assert spec.largest == 100
    file.write_text('{"image_std": [0, 1, 1]}')
    with pytest.raises(
        ModelConfigError, match=r"image_std \[0\.0, 1\.0, 1\.0\]; expected numbers > 0"
    ):
        spec_of(folder)
    file.write_text('{"image_mean": "half", "rescale_factor": "small"}')
    with pytest.raises(ModelConfigError, match=r"image_mean 'half'; .* rescale_factor 'small'"):
        spec_of(folder)
    file.write_text('{"image_mean": 0.5, "image_std": 0.25}')
    assert (spec_of(folder).scale.mean, spec_of(folder).scale.std) == ((0.5,) * 3, (0.25,) * 3)
    file.write_text('{"image_mean": [0.5]}')
    with pytest.raises(ModelConfigError, match="1 values of image_mean"):
        spec_of(folder)
    file.unlink()
    new = folder / "processor_config.json"
    new.write_text('{"image_processor": {"image_mean": [0.1, 0.2, 0.3]}}')
    assert spec_of(folder).scale.mean == (0.1, 0.2, 0.3)
