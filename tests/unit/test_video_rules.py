"""Frames, sizes and times of videos equal those of transformers' video processors."""

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
from transformers.video_utils import VideoMetadata

from cluster.api.videos.rules import VideoRules
from cluster.api.videos.sampling import Clip
from cluster.errors import BadRequestError

QWEN = VideoRules(style="qwen3_vl", min_pixels=4096, max_pixels=25_165_824, most_frames=10_000)
GLM = VideoRules(
    style="glm4v", patch_size=14, min_pixels=12_544, max_pixels=47_040_000, most_frames=10_000
)
GLM46 = replace(GLM, style="glm46v")


@pytest.fixture
def glm46(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """transformers' class, which imports torchvision to resize frames: the tests resize none."""
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        module = ModuleType(name)
        module.functional = None  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    found = import_module("transformers.models.glm46v.video_processing_glm46v")
    yield found.Glm46VVideoProcessor
    del sys.modules[found.__name__]


def processor(kind: Any, rules: VideoRules) -> Any:
    size = {"shortest_edge": rules.min_pixels, "longest_edge": rules.max_pixels}
    return kind(size=size, patch_size=rules.patch_size)


def clips() -> list[Clip]:
    draw = random.Random(0)
    found = [Clip(count, fps, 64, 48) for count in (2, 3, 5, 30, 31) for fps in (1.0, 24.0, 29.97)]
    for longest in (40, 900, 20_000):
        for _ in range(60):
            fps = draw.choice((1.0, 5.0, 23.976, 25.0, 30.0, 59.94, 60.0))
            found.append(Clip(draw.randint(2, longest), fps, 64, 48))
    return found


def metadata(clip: Clip) -> VideoMetadata:
    return VideoMetadata(total_num_frames=clip.num_frames, fps=clip.fps, duration=clip.duration)


def check_frames(theirs: Any, rules: VideoRules, **options: Any) -> None:
    for clip in clips():
        expected = theirs.sample_frames(metadata(clip), **options).tolist()
        assert rules.frames(clip) == expected, clip


def test_frames_of_qwen() -> None:
    theirs = processor(Qwen3VLVideoProcessor, QWEN)
    check_frames(theirs, QWEN)
    check_frames(theirs, QWEN.with_options(0.7, None), fps=0.7)
    for clip in clips():
        ours = QWEN.with_options(None, 7).frames(clip)
        count = min(7, clip.num_frames)  # transformers takes frames twice
        assert ours == theirs.sample_frames(metadata(clip), num_frames=count).tolist()


def test_frames_of_glm() -> None:
    theirs = processor(Glm4vVideoProcessor, GLM)
    check_frames(theirs, GLM)
    check_frames(theirs, GLM.with_options(5, None), fps=5)


def test_frames_of_glm_46(glm46: Any) -> None:
    theirs = processor(glm46, GLM46)
    for clip in clips():
        expected = theirs.sample_frames(metadata(clip)).tolist()
        if expected:  # of a video that is too short for one pair it takes none
            assert GLM46.frames(clip) == expected, clip
        assert len(GLM46.frames(clip)) >= 2


@pytest.mark.parametrize(
    ("kind", "rules"),
    [(Qwen3VLVideoProcessor, QWEN), (Glm4vVideoProcessor, GLM)],
    ids=["qwen", "glm"],
)
def test_sizes(kind: Any, rules: VideoRules) -> None:
    theirs, draw = processor(kind, rules), random.Random(0)
    capped = processor(kind, rules)
    capped.cap_pixels_per_frame = kind is Qwen3VLVideoProcessor
    bounded = replace(rules, frame_tokens=768) if capped.cap_pixels_per_frame else rules
    for limit in (40, 900, 9000) * 150:
        frames = draw.randint(2, 40)
        width, height = draw.randint(1, limit), draw.randint(1, limit)
        for own, found in ((rules, theirs), (bounded, capped)):
            try:
                expected = found.get_num_of_video_patches(frames, height, width)
            except ValueError:
                with pytest.raises(BadRequestError, match="one side may be 200 times"):
                    own.grid(frames, width, height)
                continue
            times, rows, columns = own.grid(frames, width, height)
            assert times == (frames + 1) // 2 and times * rows * columns == expected


def test_frames_fit_the_limit_of_a_rank() -> None:
    draw = random.Random(0)
    rules = replace(QWEN, rank_tokens=100)
    for _ in range(300):
        size = draw.randint(2, 40), draw.randint(30, 3000), draw.randint(30, 3000)
        _, rows, columns = rules.grid(*size)
        assert rows * columns // 4 <= 100


def test_times() -> None:
    marks = "<|vision_start|><|video_pad|><|vision_end|>"
    image = "<|begin_of_image|><|image|><|end_of_image|>"
    for frames in ([0, 7, 15, 22], [0, 30, 61], [5, 5, 9]):
        times = Qwen3VLProcessor._calculate_timestamps(None, list(frames), 10.0, 2)
        expected = [f"<{seconds:.1f} seconds>{marks}" for seconds in times]
        assert QWEN.texts(frames, 10.0) == expected
        firsts = VideoMetadata(99, 10.0, frames_indices=frames).timestamps[::2]
        theirs = [
            Glm4vProcessor.replace_frame_token_id(Named("<|image|>"), seconds) for seconds in firsts
        ]
        assert GLM.texts(frames, 10.0) == theirs
        assert GLM46.texts(frames, 10.0) == [f"{image}{seconds:.1f} seconds" for seconds in firsts]


class Named:
    """What Glm4vProcessor's method reads of itself."""

    def __init__(self, token: str) -> None:
        self.image_token = token


def test_limits_of_a_request() -> None:
    clip = Clip(1000, 25.0, 64, 48)
    assert len(QWEN.with_options(None, 12).frames(clip)) == 12
    assert len(QWEN.with_options(1, None).frames(clip)) == 40
    thin = replace(QWEN, most_frames=10)
    found = thin.frames(clip)
    assert len(found) == 10 and (found[0], found[-1]) == (0, 999)
    for rules, fps, num_frames, message in (
        (QWEN, 2, 4, "exclude each other"),
        (QWEN, 0, None, "fps must be more than 0"),
        (QWEN, True, None, "fps must be"),
        (QWEN, 1e9, None, "at most 120"),
        (thin, None, 11, "num_frames must be 2 to 10"),
        (QWEN, None, 2.5, "num_frames must be"),
        (GLM, None, 4, "takes no num_frames"),
    ):
        with pytest.raises(BadRequestError, match=message) as error:
            rules.with_options(fps, num_frames)
        assert error.value.param == "mm_processor_kwargs"
