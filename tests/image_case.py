"""Random checkpoints with vision towers, prompts with images, and what transformers generates for them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.checkpoints.families import PROCESSOR
from tests.checkpoints.writer import make_checkpoint
from tests.distributed.engine_harness import Event, make_request
from tests.distributed.reference import NEW_TOKENS, Reference
from tests.family_cases import SIZES
from workers.models.registry import load_model_config
from workers.specs.vision import Grid, VisionSpec
from workers.wire.request import EngineRequest, ImageInput

FAMILIES = ("qwen3_5_moe", "qwen3_vl_moe", "glm4v_moe")
PLACEHOLDER = 300
# Grids of images, the smallest one merged patch: of thumbnails, and of different sides.
GRIDS: tuple[Grid, ...] = ((1, 2, 2), (1, 4, 6), (1, 10, 4), (1, 6, 12), (1, 12, 14))


def image_checkpoint(path: Path, family: str, **changes: Any) -> Path:
    """A random checkpoint of a family with its tower, as releases have it.

    transformers 5.23 does not transpose square matrices of experts, which Qwen3-VL's releases store transposed.
    """
    sizes = SIZES | {"moe_intermediate_size": 48} | changes
    return make_checkpoint(path, family=family, vision=True, **sizes)


def random_image(seed: int, grid: Grid, spec: VisionSpec) -> ImageInput:
    """An image at offset 0 whose pixels depend on seed and grid alone."""
    size = grid[0] * grid[1] * grid[2] * spec.patch_dim
    pixels = np.random.default_rng((seed, *grid)).integers(0, 256, size, dtype=np.uint8).tobytes()
    digest = hashlib.sha256(pixels).digest()
    num_tokens = spec.num_tokens(grid)
    return ImageInput(offset=0, num_tokens=num_tokens, grid_thw=grid, digest=digest, pixels=pixels)


def scaled(image: ImageInput, spec: VisionSpec) -> torch.Tensor:
    """The inputs of transformers' tower, float32 [patches, patch_dim]."""
    pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8)
    channels = pixels.view(-1, spec.channels, spec.patch_dim // spec.channels)
    mean, std = (torch.tensor(PROCESSOR[key])[:, None] for key in ("image_mean", "image_std"))
    return ((channels * PROCESSOR["rescale_factor"] - mean) / std).flatten(1)


@dataclass(frozen=True)
class Prompt:
    """Tokens, and images at their places."""

    token_ids: list[int]
    images: tuple[ImageInput, ...]

    @classmethod
    def of(cls, parts: list[list[int] | ImageInput]) -> "Prompt":
        """A prompt of texts and images in this order."""
        token_ids: list[int] = []
        images = []
        for part in parts:
            if isinstance(part, ImageInput):
                images.append(replace(part, offset=len(token_ids)))
                token_ids += [PLACEHOLDER] * part.num_tokens
            else:
                token_ids += part
        return cls(token_ids, tuple(images))

    def inputs(self, spec: VisionSpec) -> dict[str, torch.Tensor]:
        """What transformers' model takes beside the tokens."""
        if not self.images:
            return {}
        return {
            "pixel_values": torch.cat([scaled(image, spec) for image in self.images]),
            "image_grid_thw": torch.tensor([image.grid_thw for image in self.images]),
            "mm_token_type_ids": (torch.tensor([self.token_ids]) == PLACEHOLDER).int(),
        }

    def request(self, name: str, **params: Any) -> EngineRequest:
        """A greedy request."""
        return replace(make_request(name, self.token_ids, **params), images=self.images)


def prompts(spec: VisionSpec, count: int) -> list[Prompt]:
    """Prompts with 0 to 4 images of different sizes between texts; some share a beginning, some an image alone."""
    generator = np.random.default_rng(3)

    def text(length: int) -> list[int]:
        return generator.integers(0, 256, length).tolist()

    shared = [text(19), random_image(1, GRIDS[3], spec), text(7)]
    found = []
    for number in range(count):
        num_images = number % 5
        parts: list[list[int] | ImageInput] = [text(int(generator.integers(1, 40)))]
        if number % 3 == 2:
            parts = [*shared]
            num_images -= 1
        for place in range(num_images):
            grid = GRIDS[(number + place) % len(GRIDS)]
            parts += [
                random_image((number + place) % 4, grid, spec),
                text(int(generator.integers(1, 30))),
            ]
        found.append(Prompt.of(parts))
    return found


def references(folder: Path, asked: Sequence[Prompt], device: str = "cpu") -> list[Reference]:
    """What transformers generates in float32, greedily."""
    from transformers import AutoModelForImageTextToText

    spec = load_model_config(folder).vision
    assert spec is not None
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).to(device)
    model = model.eval()
    found = []
    for prompt in asked:
        ids = torch.tensor([prompt.token_ids], device=device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
            **{name: value.to(device) for name, value in prompt.inputs(spec).items()},
        )
        logits = torch.cat(out.logits).float().cpu().numpy()
        tokens = out.sequences[0, len(prompt.token_ids) :].tolist()
        found.append(Reference(prompt.token_ids, tokens, logits))
    return found


def arrivals(asked: Sequence[Prompt], num_ranks: int) -> list[Event]:
    """All prompts in turn at all ranks, in the first steps."""
    return [
        Event(
            index % 5,
            index % num_ranks,
            prompt.request(str(index), max_tokens=NEW_TOKENS),
        )
        for index, prompt in enumerate(asked)
    ]
