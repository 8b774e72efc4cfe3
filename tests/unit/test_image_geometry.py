"""Sizes and patches of images equal those of transformers' processors on PIL, bit for bit."""

import random
from typing import Any

import numpy as np
import pytest
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from cluster.api.images.geometry import Geometry
from cluster.errors import BadRequestError
from tests.unit.image_case import noise

QWEN = Geometry(min_pixels=65_536, max_pixels=16_777_216)
GLM = Geometry(patch_size=14, min_pixels=12_544, max_pixels=9_633_792, counts_frames=True)


def processor_of(kind: Any, geometry: Geometry) -> Any:
    size = {"shortest_edge": geometry.min_pixels, "longest_edge": geometry.max_pixels}
    return kind(size=size, patch_size=geometry.patch_size)


CASES = [
    pytest.param(processor_of(Qwen2VLImageProcessorPil, QWEN), QWEN, id="qwen"),
    pytest.param(processor_of(Glm4vImageProcessorPil, GLM), GLM, id="glm4v"),
    pytest.param(processor_of(Glm46VImageProcessorPil, GLM), GLM, id="glm46v"),
]


@pytest.mark.parametrize(("processor", "geometry"), CASES)
def test_sizes(processor: Any, geometry: Geometry) -> None:
    draw = random.Random(0)
    sizes = [(draw.randint(1, limit), draw.randint(1, limit)) for limit in (40, 900, 9000) * 150]
    for width, height in (*sizes, (1, 200), (200, 1), (28, 28), (2000, 1500)):
        try:
            expected = processor.get_number_of_image_patches(height, width)
        except ValueError:
            with pytest.raises(BadRequestError, match=f"{max(width, height)}"):
                geometry.grid(width, height)
            continue
        rows, columns = geometry.grid(width, height)
        assert rows * columns == expected == 4 * geometry.num_tokens(width, height)
        # An image that is turned has as many tokens.
        assert geometry.num_tokens(height, width) == geometry.num_tokens(width, height)


@pytest.mark.parametrize(("processor", "geometry"), CASES)
@pytest.mark.parametrize("size", [(28, 28), (1, 5), (3, 3), (640, 480), (33, 1021)], ids=str)
def test_patches(processor: Any, geometry: Geometry, size: tuple[int, int]) -> None:
    image = noise(*size)
    expected = processor(images=[image], do_rescale=False, do_normalize=False, return_tensors="np")
    assert expected["image_grid_thw"].tolist() == [[1, *geometry.grid(*size)]]
    patches = geometry.patches(image)
    assert patches.dtype == np.uint8 and np.array_equal(patches, expected["pixel_values"])
    assert patches.size == geometry.num_tokens(*size) * geometry.bytes_of_token


def test_limits_of_a_request() -> None:
    geometry = QWEN.within(None, 100_352)
    processor = processor_of(Qwen2VLImageProcessorPil, geometry)
    for size in ((1000, 800), (64, 64), (5000, 40)):
        rows, columns = geometry.grid(*size)
        assert rows * columns == processor.get_number_of_image_patches(size[1], size[0])
    assert QWEN.within(None, 1024).min_pixels == 1024  # an enlarged image would be too large
    assert QWEN.within(2**20, None).num_tokens(10, 10) == 1024
    for limits in ((None, 2**24 + 1), (0, None), (2000, 1000), (2**25, None)):
        with pytest.raises(BadRequestError, match="_pixels"):
            QWEN.within(*limits)
