"""Images are computed once, kept as long as a sequence needs them, and never hold up other sequences."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.image_case import Prompt
from tests.unit.schedulers import make_scheduler
from workers.config import SchedulerConfig
from workers.images.cache import OutputCache
from workers.images.encoder import AHEAD, ImageEncoder, Order
from workers.images.limits import ImageLimits
from workers.scheduler.image_queue import ImageQueue
from workers.scheduler.scheduler import Scheduler
from workers.specs.vision import Grid, PixelScale, QwenVisionSpec
from workers.step.step_output import StepOutput
from workers.wire.request import EngineRequest, ImageInput

SPEC = QwenVisionSpec(
    depth=4,
    hidden_size=8,
    intermediate_size=8,
    num_heads=1,
    channels=1,
    patch_size=1,
    temporal_patch_size=1,
    merge_size=2,
    output_size=4,
    grid_side=2,
    norm_eps=1e-6,
    activation="gelu",
    rope_theta=1e4,
    scale=PixelScale(factor=1.0, mean=(0.0,), std=(1.0,)),
    most_pixels=256,
)


WAIT_S = 60
"""For what comes at once, unless the machine is busy."""


class FakeTower:
    """Gives the first pixel of each token. `gate` opens when it may go on; images of pixel 255 raise."""

    spec, device = SPEC, torch.device("cpu")

    def __init__(self) -> None:
        self.calls: list[int] = []  # tokens
        self.gate = threading.Event()
        self.began = threading.Semaphore(0)
        self.gate.set()

    def forward(
        self, pixels_NP: torch.Tensor, grids: Sequence[Grid], pause: Callable[[], None]
    ) -> torch.Tensor:
        self.began.release()
        assert self.gate.wait(WAIT_S)
        if (pixels_NP == 255).any():
            raise RuntimeError("a bad pixel")
        for _ in range(SPEC.depth):
            pause()
        self.calls.append(len(pixels_NP) // SPEC.merged)
        return pixels_NP[:: SPEC.merged].float().view(-1, 1, 1).expand(-1, 1, 4).contiguous()


def image(pixel: int, num_tokens: int = 4) -> ImageInput:
    pixels, grid = bytes([pixel]) * num_tokens * 4, (1, 2, 2 * num_tokens)
    return ImageInput(
        offset=0, num_tokens=num_tokens, grid_thw=grid, digest=bytes([pixel]), pixels=pixels
    )


@pytest.fixture
def tower() -> FakeTower:
    return FakeTower()


@pytest.fixture
def make(tower: FakeTower):
    """Makes encoders that end with the test."""
    made: list[ImageEncoder] = []

    def encoder(cache: int = 16, largest: int = 8, per_step: int | None = 4) -> ImageEncoder:
        made.append(ImageEncoder(tower, ImageLimits(largest, per_step, cache)))
        return made[-1]

    yield encoder
    tower.gate.set()
    for it in made:
        it.close()


def never() -> None:
    raise AssertionError("the order was complete at once")


def ordered(encoder: ImageEncoder, *images: ImageInput) -> tuple[Order, threading.Event]:
    ready = threading.Event()
    return encoder.order(images, ready.set), ready


def test_an_image_is_computed_once_for_all_orders(make: Any, tower: FakeTower) -> None:
    encoder = make()
    tower.gate.clear()
    (first, one), (second, two) = ordered(encoder, image(1)), ordered(encoder, image(2), image(1))
    tower.gate.set()
    assert one.wait(WAIT_S) and two.wait(WAIT_S) and first.complete and second.complete
    assert sum(tower.calls) == 8 and encoder.num_computed == 2
    third = encoder.order([image(2)], never)
    assert encoder.num_found == 1
    assert third.complete and third.of(image(2)).unique().tolist() == [2.0]


def test_a_known_image_does_not_wait_for_others(make: Any, tower: FakeTower) -> None:
    encoder = make()
    first, one = ordered(encoder, image(1))
    assert one.wait(WAIT_S)
    tower.gate.clear()
    other, _ = ordered(encoder, image(2))
    assert encoder.order([image(1)], never).complete and not other.complete
    tower.gate.set()
    first.close()


def test_images_stay_until_their_last_holder_leaves(make: Any, tower: FakeTower) -> None:
    """Room for two images: a third waits for a release, and drops the image that nothing holds."""
    encoder = make(cache=8)
    first, one = ordered(encoder, image(1), image(2), image(1))
    assert one.wait(WAIT_S)
    other, two = ordered(encoder, image(3))
    encoder.wait()
    last, three = ordered(encoder, image(2))
    encoder.wait()
    assert not other.complete and not last.complete, "none overtakes an order that waits for room"
    first.release(image(1))
    encoder.wait()
    assert not two.is_set(), "the sequence has the image twice"
    first.release(image(1))
    assert two.wait(WAIT_S) and three.wait(WAIT_S)
    assert encoder.num_computed == 3
    first.close()
    assert last.of(image(2)).unique().tolist() == [2.0]


def test_an_order_that_is_closed_is_not_computed(make: Any, tower: FakeTower) -> None:
    encoder = make()
    tower.gate.clear()
    first, _ = ordered(encoder, image(1))
    second, two = ordered(encoder, image(2))
    third, three = ordered(encoder, image(3))
    assert tower.began.acquire(timeout=WAIT_S)
    first.close(), second.close()
    tower.gate.set()
    assert three.wait(WAIT_S) and third.complete and not two.is_set()
    kept = encoder.order([image(1)], never)
    assert kept.complete, "what was computed already is kept"


def test_an_order_that_is_closed_while_it_is_completed_holds_nothing(
    make: Any, tower: FakeTower, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = make()
    tower.gate.clear()
    order, _ = ordered(encoder, image(1))
    assert tower.began.acquire(timeout=WAIT_S)
    hold, closing = encoder._hold, threading.Thread(target=order.close)

    def holding(held: Order) -> bool:
        closing.start()
        closing.join(0.1)  # it waits for the encoder
        return hold(held)

    monkeypatch.setattr(encoder, "_hold", holding)
    tower.gate.set()
    encoder.wait()
    closing.join(WAIT_S)
    assert order.closed and not order.held and encoder._cache.num_held == 0


def test_an_image_that_fails_ends_its_own_orders_alone(make: Any, tower: FakeTower) -> None:
    encoder = make()
    tower.gate.clear()
    orders = [ordered(encoder, image(pixel)) for pixel in (1, 255, 2)]
    tower.gate.set()
    for _, ready in orders:
        assert ready.wait(WAIT_S)
    assert [order.complete for order, _ in orders] == [True, False, True]
    assert "a bad pixel" in (orders[1][0].error or "")


def test_a_thread_that_ends_answers_every_order(make: Any, monkeypatch: Any) -> None:
    encoder = make()
    monkeypatch.setattr(OutputCache, "put", lambda *_: 1 / 0)
    order, ready = ordered(encoder, image(1))
    assert ready.wait(WAIT_S) and "takes no images any more" in (order.error or "")
    later, _ = ordered(encoder, image(2))
    assert later.error == order.error and not later.complete


def test_the_cache_drops_the_image_used_longest_ago() -> None:
    cache = OutputCache(3)
    for name in (b"a", b"b", b"c"):
        assert cache.make_room(1)
        cache.put(name, torch.zeros(1, 1, 1))
    cache.hold(b"a")
    assert cache.find(b"b") is not None
    assert cache.make_room(1) and cache.find(b"c") is None
    assert not cache.make_room(3) and cache.find(b"b") is not None, "nothing is dropped in vain"
    cache.release(b"a")
    assert cache.make_room(3) and cache.num_tokens == 0


def request(name: str, *images: ImageInput, text: int = 3) -> EngineRequest:
    parts: list[Any] = [[1] * text]
    for one in images:
        parts += [one, [2]]
    prompt = Prompt.of(parts)
    return prompt.request(name, max_tokens=2)


def scheduler_of(encoder: ImageEncoder, ready: list[str], **sizes: Any) -> Scheduler:
    scheduler = make_scheduler(SchedulerConfig(max_num_batched_tokens=8), **sizes)
    scheduler.images = ImageQueue(encoder)
    scheduler.images.notify = ready.append
    return scheduler


def step(scheduler: Scheduler) -> list[str]:
    """One step whose draws are all 7; returns the requests in it."""
    batch = scheduler.schedule()
    scheduler.launched(batch)
    num_logits = int(batch.num_logits.sum())
    scheduler.commit(batch, StepOutput.of(batch, [7] * num_logits, None))
    return [seq.request.request_id for seq in batch.seqs]


def test_prompts_behind_a_sequence_that_waits_go_on(make: Any, tower: FakeTower) -> None:
    encoder, ready = make(), []
    scheduler = scheduler_of(encoder, ready)
    tower.gate.clear()
    assert scheduler.add(request("seen", image(1))) is None
    assert not scheduler.has_work, "the group sleeps while the image is computed"
    assert scheduler.add(request("text")) is None
    assert scheduler.has_work and step(scheduler) == ["text"]
    tower.gate.set()
    encoder.wait()
    assert ready == ["seen"] and scheduler.images_ready("seen") is None
    assert step(scheduler) == ["text", "seen"] and encoder._cache.num_held == 0
    assert scheduler.images_ready("seen") is None, "a notice that comes twice is ignored"
    assert scheduler.abort("seen") is not None and not scheduler.has_work


def test_images_that_come_while_their_sequence_begins_to_wait(make: Any, tower: FakeTower) -> None:
    encoder, ready = make(), []
    scheduler = scheduler_of(encoder, ready)
    tower.gate.clear()

    class Waiting(dict[str, Any]):
        def __setitem__(self, name: str, seq: Any) -> None:
            super().__setitem__(name, seq)
            tower.gate.set()
            encoder.wait()

    assert scheduler.images is not None
    scheduler.images.waiting = Waiting()
    assert scheduler.add(request("a", image(1))) is None
    assert ready == ["a"] and scheduler.images_ready("a") is None
    assert step(scheduler) == ["a"] and step(scheduler) == ["a"] and not scheduler.has_work


def test_an_abort_and_a_failure_while_a_sequence_waits(make: Any, tower: FakeTower) -> None:
    encoder, ready = make(), []
    scheduler = scheduler_of(encoder, ready)
    tower.gate.clear()
    for name, pixel in (("gone", 1), ("bad", 255)):
        assert scheduler.add(request(name, image(pixel))) is None
    assert scheduler.abort("gone") is not None
    tower.gate.set()
    encoder.wait()
    assert ready == ["bad"]
    assert "a bad pixel" in (scheduler.images_ready("bad") or "")
    assert scheduler.images is not None and not scheduler.images.waiting and not scheduler._by_id


def test_an_epoch_that_ends_releases_its_images(make: Any, tower: FakeTower) -> None:
    """The next epoch finds an image that was computed meanwhile."""
    encoder = make()
    tower.gate.clear()
    scheduler = scheduler_of(encoder, [])
    assert scheduler.add(request("a", image(1))) is None
    assert tower.began.acquire(timeout=WAIT_S)
    scheduler.close()
    tower.gate.set()
    encoder.wait()
    again = scheduler_of(encoder, [])
    assert again.add(request("a", image(1))) is None
    assert again.has_work and encoder.num_computed == 1 and step(again) == ["a"]


def test_a_preempted_sequence_gets_its_images_again(make: Any, tower: FakeTower) -> None:
    encoder, ready = make(cache=4), []
    scheduler = scheduler_of(encoder, ready)
    assert scheduler.add(request("a", image(1))) is None
    encoder.wait()
    assert scheduler.images_ready("a") is None and step(scheduler) == ["a"]
    other = encoder.order([image(2)], lambda: None)
    encoder.wait()
    assert other.complete, "the prompt is computed, so its image was released"
    other.close()
    with scheduler.cache.off():
        seq = scheduler._preempt_last()
        tower.gate.clear()
        assert step(scheduler) == [] and not scheduler.has_work and seq.row < 0
        tower.gate.set()
        encoder.wait()
        assert ready == ["a", "a"] and scheduler.images_ready("a") is None
        assert step(scheduler) == ["a"] and encoder.num_computed == 3


@pytest.mark.parametrize(("text", "computed"), [(3, 2), (4, 3)])
def test_cached_prefixes_need_no_image(make: Any, text: int, computed: int) -> None:
    """The last token of the second image is in the third block of four tokens, or behind it."""
    encoder, ready = make(cache=8), []
    scheduler = scheduler_of(encoder, ready)
    both = image(1), image(2)
    assert scheduler.add(request("a", *both, text=text)) is None
    encoder.wait()
    scheduler.images_ready("a")
    while scheduler.has_work:
        step(scheduler)
    encoder._cache.make_room(8)  # drops both
    assert scheduler.add(request("b", *both, text=text)) is None
    encoder.wait()
    assert encoder.num_computed == computed


def test_the_thread_launches_a_few_blocks_ahead(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking, "the thread leaves its core to the step loop"

        def record(self) -> None:
            self.number = found.count("launch")
            found.append("launch")

        def synchronize(self) -> None:
            found.append(f"wait {self.number}")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    encoder = make()
    encoder.device = torch.device("cuda")
    pause = encoder._pause([image(1)])
    for _ in range(AHEAD + 2):
        pause()
    assert found == ["launch"] * AHEAD + ["wait 0", "launch", "wait 1", "launch"]
    encoder.device = torch.device("cpu")


@pytest.mark.parametrize(
    ("images", "words"),
    [
        ([image(1, 9)], "image 0 has 9 tokens; this rank takes images of at most 8"),
        (
            [image(pixel, 8) for pixel in (1, 2, 3)],
            "24 tokens; this rank keeps the embeddings of 16",
        ),
        ([replace(image(1), pixels=b"x")], "image 0: it has 1 bytes of pixels"),
        ([replace(image(1), grid_thw=(1, 3, 2))], "image 0: grid_thw is (1, 3, 2)"),
        ([replace(image(1), grid_thw=(1, 2, 2))], "image 0: num_tokens is 4"),
    ],
)
def test_refusals_name_the_image_and_the_limit(
    make: Any, images: list[ImageInput], words: str
) -> None:
    scheduler = scheduler_of(make(), [])
    assert words in (scheduler.add(request("r", *images)) or "")
    assert "takes no images" in (make_scheduler().add(request("r", image(1))) or "")
