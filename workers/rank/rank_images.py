"""The vision tower of a rank at work: its encoder, and its calls before there are requests."""

import torch

from workers.config import RankConfig
from workers.images.encoder import ImageEncoder
from workers.images.limits import ImageLimits
from workers.models.decoder import DecoderLM
from workers.specs.vision import Grid, VisionSpec
from workers.wire.request import ImageInput


def make_encoder(model: DecoderLM, config: RankConfig) -> ImageEncoder | None:
    """Return the encoder of a model with weights; None: it takes no images."""
    tower = model.vision
    return None if tower is None else ImageEncoder(tower, ImageLimits.of(config, tower.spec))


def run_largest(encoder: ImageEncoder) -> int:
    """Compute an image of as many tokens as one may have; return the bytes that this takes on a GPU.

    The memory of outputs that are kept is included, although the cache is empty.
    """
    spec, limits = encoder.spec, encoder.limits
    image = blank_image(spec, largest_grid(limits.image, spec.merge_size))
    on_gpu = torch.cuda.is_available() and encoder.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    (outputs_TXD,) = encoder.compute([image])
    if not on_gpu:
        return 0
    torch.cuda.synchronize()
    return (
        torch.cuda.max_memory_allocated()
        - before
        + limits.cache_bytes(spec, outputs_TXD.element_size())
    )


def measure_time(encoder: ImageEncoder) -> None:
    """Measure how long the tower takes for a token of an image that fills a GPU, or of the largest image."""
    spec = encoder.spec
    encoder.measure(blank_image(spec, largest_grid(encoder.limits.batch, spec.merge_size)))


def largest_grid(num_tokens: int, merge_size: int) -> Grid:
    """Return the grid of an image of `num_tokens` tokens or a few less, as square as it can be."""
    height = max(1, int(num_tokens**0.5))
    return 1, height * merge_size, num_tokens // height * merge_size


def blank_image(spec: VisionSpec, grid: Grid) -> ImageInput:
    """Return a black image."""
    num_tokens = spec.num_tokens(grid)
    pixels = bytes(num_tokens * spec.merged * spec.patch_dim)
    return ImageInput(offset=0, num_tokens=num_tokens, grid_thw=grid, digest=b"", pixels=pixels)
