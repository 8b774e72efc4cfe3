"""Images on a GPU: the tower in bfloat16 is near the CPU's float32, and steps with images replay graphs."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from kernels.backends.select import probe
from tests.closeness import calc_diff
from tests.devices import take_gpu
from tests.distributed.engine_harness import rank_config
from tests.gpu.test_graph_equality_cuda import compare
from tests.gpu_families import released_vision
from tests.image_case import FAMILIES, Prompt, random_image
from tests.unit.model_case import OneRank
from workers.images.encoder import ImageEncoder
from workers.images.limits import ImageLimits
from workers.models.registry import load_model_config
from workers.models.vision.tower import VisionTower
from workers.rank.rank_images import measure_time, run_largest
from workers.specs.vision import Grid, VisionSpec
from workers.wire.request import EngineRequest

MISSING = probe("cuda").get("attention.flashinfer") if torch.cuda.is_available() else "needs a GPU"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
BFLOAT16 = 2e-3  # over three layers; another image gives 0.1 and more
GRIDS: tuple[Grid, ...] = ((1, 2, 2), (1, 4, 6), (1, 34, 22), (1, 16, 16), (1, 16, 16))


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return released_vision(tmp_path_factory.mktemp("images") / "model", request.param)


def towers(folder: Path, dtype: torch.dtype = torch.bfloat16) -> tuple[VisionTower, VisionTower]:
    """On the CPU in float32, on the GPU in `dtype`."""
    here, there = OneRank(folder).model.vision, OneRank(folder, dtype, device="cuda:0").model.vision
    assert here is not None and there is not None
    return here, there


def pixels_of(spec: VisionSpec, grids: tuple[Grid, ...]) -> torch.Tensor:
    images = [random_image(seed, grid, spec) for seed, grid in enumerate(grids)]
    flat = np.concatenate([np.frombuffer(image.pixels, dtype=np.uint8) for image in images])
    return torch.from_numpy(flat.reshape(-1, spec.patch_dim))


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 1e-6), (torch.bfloat16, BFLOAT16)], ids=str
)
def test_the_tower_equals_the_cpu(folder: Path, dtype: torch.dtype, most: float) -> None:
    here, there = towers(folder, dtype)
    pixels_NP = pixels_of(here.spec, GRIDS)
    expected = here.forward(pixels_NP, GRIDS)
    found = there.forward(pixels_NP.cuda(), GRIDS)
    assert found.dtype == dtype and found.isfinite().all()
    for output in range(here.spec.num_outputs):
        assert calc_diff(found[:, output].cpu(), expected[:, output]) < most
    other = there.forward(pixels_NP.flip(0).cuda(), GRIDS)
    assert calc_diff(other[:, 0].cpu(), expected[:, 0]) > 10 * most


def test_the_encoder_computes_beside_another_stream(folder: Path) -> None:
    """The outputs of its own stream are whole when the order is complete."""
    _, tower = towers(folder)
    encoder = ImageEncoder(tower, ImageLimits(1024, 64, 4096))
    try:
        images = [random_image(seed, grid, tower.spec) for seed, grid in enumerate(GRIDS)]
        busy = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        ready = threading.Event()
        encoder.pace.stepped(8)
        order = encoder.order(images, ready.set)
        while not ready.is_set():
            busy = (busy @ busy).tanh_()
            encoder.pace.stepped(64)
        assert order.complete and busy.isfinite().all()
        for image in images:
            (alone,) = encoder.compute([image])
            assert calc_diff(order.of(image), alone) < BFLOAT16
        order.close()
        encoder.pace.free()
        assert run_largest(encoder) > encoder.limits.cache_bytes(tower.spec, 2)
        measure_time(encoder)
        assert encoder.token_s is not None and 0 < encoder.token_s < 1
    finally:
        encoder.close()


def waves(spec: VisionSpec) -> list[list[EngineRequest]]:
    """Prompts with images of several chunks beside decodes, text between, and the same images again."""
    generator = np.random.default_rng(5)

    def text(length: int) -> list[int]:
        return generator.integers(0, 256, length).tolist()

    images = [random_image(seed, grid, spec) for seed, grid in enumerate(GRIDS)]
    first = [
        Prompt.of([text(5), images[2], text(9)]),
        Prompt.of([text(30)]),
        Prompt.of([text(1), images[0], text(2), images[3], text(40), images[1], text(3)]),
    ]
    second = [first[0], Prompt.of([text(3)]), Prompt.of([text(70), images[3], text(2)])]
    return [
        [prompt.request(f"{number}-{place}", max_tokens=8) for place, prompt in enumerate(prompts)]
        for number, prompts in enumerate((first, second))
    ]


@pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
def test_replays_with_images_equal_eager_forwards(folder: Path) -> None:
    """Also of ubatches, bit by bit: graphs read the mask and the embeddings at fixed addresses."""
    take_gpu(0)
    spec = load_model_config(folder).vision
    assert spec is not None
    config = rank_config(
        folder,
        1,
        "cuda",
        model={"dtype": "bfloat16", "max_model_len": 1024},
        scheduler={"max_num_seqs": 12, "max_num_batched_tokens": 96, "max_image_tokens": 256},
        cache={"num_blocks": 256},
        overlap={"mode": "on"},
    )
    compared = compare(config, waves(spec))
    assert "DECODE" in {mode for mode, _, _ in compared.kinds}, compared.kinds
    assert not compared.wrong
