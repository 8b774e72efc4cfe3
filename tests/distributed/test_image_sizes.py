"""A thumbnail and a photograph in one prompt, by the processors of published models: answers equal transformers'."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from cluster.api.images.geometry import Geometry
from cluster.api.images.opened import open_image
from tests.checkpoints.families import PROCESSOR, vision_of
from tests.distributed.engine_harness import rank_config, run_engines
from tests.distributed.reference import check
from tests.family_cases import SIZES
from tests.image_case import Prompt, arrivals, image_checkpoint, references, scaled
from tests.unit.image_case import as_file, image_at, noise
from workers.models.registry import load_model_config

THUMBNAIL, PHOTOGRAPH = (28, 28), (2000, 1500)
MAX_MODEL_LEN = 8192


@dataclass(frozen=True)
class Published:
    """The processor of a family, and its tower's patches, as releases have them; tokens of the two images."""

    processor: Any
    geometry: Geometry
    patches: dict[str, int]
    num_tokens: tuple[int, int]


QWEN = Published(Qwen2VLImageProcessorPil, Geometry(), {"patch_size": 16}, (64, 62 * 47))
CASES = {
    "qwen3_5_moe": QWEN,
    "qwen3_vl_moe": QWEN,
    "glm4v_moe": Published(
        Glm4vImageProcessorPil,
        Geometry(patch_size=14, min_pixels=12_544, max_pixels=9_633_792, counts_frames=True),
        {"patch_size": 14, "image_size": 84},
        (9, 71 * 54),
    ),
}


def checkpoint(path: Path, family: str, case: Published) -> Path:
    """A random checkpoint with patches of the published size, for long prompts."""
    vision = vision_of(family, SIZES["hidden_size"])["vision_config"] | case.patches
    folder = image_checkpoint(
        path, family, vision_config=vision, max_position_embeddings=MAX_MODEL_LEN
    )
    limits = {"shortest_edge": case.geometry.min_pixels, "longest_edge": case.geometry.max_pixels}
    file = folder / "preprocessor_config.json"
    file.write_text(json.dumps(PROCESSOR | case.patches | {"size": limits}))
    return folder


@pytest.mark.parametrize(
    "family",
    [
        "qwen3_5_moe",
        *(
            pytest.param(family, marks=pytest.mark.exhaustive)
            for family in ("qwen3_vl_moe", "glm4v_moe")
        ),
    ],
)
def test_a_thumbnail_and_a_photograph(rank_pool: Any, tmp_path: Path, family: str) -> None:
    case = CASES[family]
    folder = checkpoint(tmp_path, family, case)
    spec = load_model_config(folder).vision
    assert spec is not None
    pictures = [noise(*THUMBNAIL), noise(*PHOTOGRAPH)]
    images = [
        open_image(image_at("", number), as_file(picture), case.geometry, 2**26).read(0)
        for number, picture in enumerate(pictures)
    ]
    assert tuple(image.num_tokens for image in images) == case.num_tokens
    theirs = case.processor.from_pretrained(folder)(images=pictures, return_tensors="pt")
    assert theirs["image_grid_thw"].tolist() == [list(image.grid_thw) for image in images]
    mine = torch.cat([scaled(image, spec) for image in images])
    torch.testing.assert_close(mine, theirs["pixel_values"], atol=1e-5, rtol=0)
    text = np.random.default_rng(0).integers(0, 256, 30).tolist()
    prompt = Prompt.of([text[:11], images[0], text[11:13], images[1], text[13:]])
    config = rank_config(folder, 1, model={"max_model_len": MAX_MODEL_LEN})
    results = run_engines(rank_pool, config, arrivals([prompt], 1), keep_logits=True)
    check(references(folder, [prompt]), results, 1)
