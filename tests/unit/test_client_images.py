"""Images of requests in an ingress: kept for the next rank, part of the choice of a rank and of a refusal."""

import asyncio
from dataclasses import replace

import pytest

from cluster.api.work.frames import from_frames, to_frames
from cluster.client.open_request import OpenRequest
from cluster.client.refusals import Refusals, request_digest
from cluster.client.router import CHUNK, Router
from cluster.errors import PoisonRequestError
from tests.unit.client_scene import PARAMS, OfFakes, run, scene, use_fakes
from tests.unit.ray_fakes import until
from workers.wire.request import ImageInput

CAT = ImageInput(offset=1, num_tokens=2, grid_thw=(1, 2, 4), digest=b"cat", pixels=bytes(768))
DOG = replace(CAT, digest=b"dog", pixels=bytes([1] * 768))


def test_images_go_to_the_next_rank_after_a_death(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)
    monkeypatch.setattr(OfFakes, "group_options", {"rebuild_attempts": 3, "hang_timeout_s": 0.5})

    async def scenario() -> None:
        async with scene() as now:
            answer = now.ask("a", rank=1, images=(CAT, replace(DOG, offset=2)))
            await until(lambda: "a" in now.ranks[1].requests)
            first = now.ranks[1].requests["a"]
            assert first.images == (CAT, replace(DOG, offset=2))
            await now.ranks[1].emit("a", 0, 3)
            await until(lambda: len(now.answers["a"]) == 3)
            await now.kill(1)
            await until(lambda: "a~2" in now.ranks[1].requests)
            again = now.ranks[1].requests["a~2"]
            assert next(iter(now.group.open.values())).prompt_part(99).images == first.images
            assert again.images == first.images and len(again.emitted_token_ids) == 3
            await now.ranks[1].emit("a~2", 3, 1, finish=True)
            await asyncio.gather(answer)
            assert not now.group.open

    run(scenario())


def test_a_rank_with_the_same_image_is_preferred() -> None:
    router = Router([2], cache_tokens=100_000)
    prompt = [7] * (8 * CHUNK)  # placeholders: the tokens of all images are equal

    def prefill(image: ImageInput | None, rank: int) -> int:
        """The tokens of the prompt that the rank lacks."""
        images = () if image is None else (image,)
        request = OpenRequest("a", prompt, PARAMS, 0, "", (0, rank), len(prompt), images=images)
        request.route(router, (0,))
        assert request.prompt_token_ids == prompt == [7] * (8 * CHUNK)
        return request.prefill_tokens

    long = replace(CAT, offset=CHUNK + 3, num_tokens=6 * CHUNK)
    other = replace(long, digest=DOG.digest)
    assert prefill(long, 0) == len(prompt) and prefill(long, 0) == 0
    # The chunk before the image is shared, the chunks behind are not.
    assert prefill(other, 0) == 7 * CHUNK and prefill(other, 0) == 0
    assert prefill(None, 0) == 7 * CHUNK
    assert prefill(other, 1) == len(prompt)


def test_a_refusal_is_of_the_images_too() -> None:
    refusals = Refusals()
    refusals.add(request_digest([1, 2], PARAMS, 0, (CAT,)))
    refusals.check([1, 2], PARAMS, 0, (DOG,))
    refusals.check([1, 2], PARAMS)
    with pytest.raises(PoisonRequestError):
        refusals.check([1, 2], PARAMS, 0, (CAT,))


@pytest.mark.parametrize("size", [0, 100, 64 * 1024, 300_000])
def test_large_bytes_travel_beside_the_pickle(size: int) -> None:
    image = replace(CAT, pixels=bytes(size))
    head, *frames = to_frames({"images": (image, image), "n": [1, b"x"]})
    assert len(head) == 8 * (1 + len(frames)) and int.from_bytes(head[:8]) == len(frames)
    assert (len(frames) > 1) == (size >= 64 * 1024)
    assert all(frame is image.pixels for frame in frames[:-1])  # no copy
    assert len(frames[-1]) < 64 * 1024 + 2000
    assert from_frames(frames) == {"images": (image, image), "n": [1, b"x"]}
