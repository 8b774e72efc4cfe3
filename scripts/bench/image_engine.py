"""One rank's engine in this process, with the loads of `scripts.bench.gpu_images`. No Ray, no HTTP.

The loads run on threads of the engine's process, so nothing here may hold the interpreter lock for long while they run.
"""

import queue
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

from scripts.bench.timeline_ranks import start_epoch
from workers.config import RankConfig
from workers.rank.epoch import Epoch
from workers.rank.rank_info import Rendezvous
from workers.scheduler.prefill_cap import PrefillCap
from workers.specs.vision import Grid, VisionSpec
from workers.wire.request import EngineRequest, ImageInput, RequestOutput, SamplingParams

PLACEHOLDER = 0
TIMEOUT_S = 600


class ImageMaker:
    """Images of `side` x `side` random pixels. Only their digests differ, by which the encoder knows images."""

    def __init__(self, spec: VisionSpec, side: int):
        patches = side // spec.patch_size
        self.grid: Grid = (1, patches, patches)
        self.num_tokens = spec.num_tokens(self.grid)
        # Made once: this holds the interpreter lock for 15 ms where an image has 1,024 x 1,024 pixels.
        self._pixels = random.randbytes(patches**2 * spec.patch_dim)

    def new(self) -> ImageInput:
        """Return an image that the encoder has not computed."""
        return ImageInput(
            offset=0,
            num_tokens=self.num_tokens,
            grid_thw=self.grid,
            digest=secrets.token_bytes(32),
            pixels=self._pixels,
        )


@dataclass
class Answer:
    """The times of a request's tokens; `ended` is set behind the last."""

    sent: float
    times: list[float] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)


class Client:
    """Sends requests of random text to an engine that runs on a thread."""

    def __init__(self, epoch: Epoch, vocab_size: int):
        self._epoch, self._vocab = epoch, vocab_size
        self._answers: dict[str, Answer] = {}
        self._ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._count = 0
        self._random = random.Random(0)

    def publish(self, _ingress_id: str, outputs: list[RequestOutput]) -> None:
        """Take the outputs of a step."""
        now = time.perf_counter()
        for output in outputs:
            if output.begins:
                continue
            assert output.finish_reason in (None, "length", "abort"), output
            answer = self._answers.get(output.request_id)
            if answer is None:
                continue
            answer.times += [now] * len(output.token_ids)
            if output.finish_reason is not None:
                answer.ended.set()
                self._ended.put(output.request_id)

    def submit(self, text: int, output: int, image: ImageInput | None = None) -> str:
        """Send a request with `text` random tokens, the image in their middle; return its id."""
        ids = [self._random.randrange(1, self._vocab) for _ in range(text)]
        images = ()
        if image is not None:
            middle = text // 2
            ids[middle:middle] = [PLACEHOLDER] * image.num_tokens
            images = (replace(image, offset=middle),)
        self._count += 1
        name = str(self._count)
        self._answers[name] = Answer(time.perf_counter())
        params = SamplingParams(max_tokens=output, temperature=0.0)
        self._epoch.engine.submit(
            EngineRequest(
                request_id=name,
                ingress_id="here",
                prompt_token_ids=ids,
                params=params,
                images=images,
            )
        )
        return name

    def loop(
        self,
        count: int,
        in_flight: int,
        text: int,
        output: int,
        image: Callable[[], ImageInput] | None = None,
    ) -> float:
        """Return the seconds of `count` requests, of which `in_flight` are open at once."""
        images = [None if image is None else image() for _ in range(count)]
        self._drain()
        started = time.perf_counter()
        for number in range(min(count, in_flight)):
            self.submit(text, output, images[number])
        for number in range(in_flight, count + in_flight):
            self._ended.get(timeout=TIMEOUT_S)
            if number < count:
                self.submit(text, output, images[number])
        return time.perf_counter() - started

    def encode(self, images: list[ImageInput]) -> float:
        """Return the seconds in which the encoder computes these images, while no step runs."""
        encoder, done = self._epoch.process.images, threading.Semaphore(0)
        assert encoder is not None, "the model takes images"
        started = time.perf_counter()
        orders = [encoder.order([image], done.release) for image in images]
        for order in orders:
            assert done.acquire(timeout=TIMEOUT_S) and order.error is None
            order.close()
        return time.perf_counter() - started

    def limit(self, **limits: object) -> None:
        """Set settings of the scheduler that limit prompts beside decodes, for all later steps."""
        config = self._epoch.process.config
        scheduler = config.scheduler.model_copy(update=limits)
        cap = PrefillCap.of(scheduler, config.cache.block_size)
        self._epoch.engine._prefill_cap = cap

    def gaps(self, streams: int, text: int, seconds: float) -> list[float]:
        """Return the gaps between tokens of `streams` streams of text, after all have begun."""
        most = self._epoch.process.max_model_len - text
        names = [self.submit(text, most) for _ in range(streams)]
        while not all(self._answers[name].times for name in names):
            time.sleep(0.01)
        started = time.perf_counter()
        time.sleep(seconds)
        ended = time.perf_counter()
        for name in names:
            self._epoch.engine.abort(name)
        found = []
        for name in names:
            times = [it for it in self._answers.pop(name).times if started <= it <= ended]
            found += [after - before for before, after in pairwise(times)]
        return found

    def beside(
        self, send: Callable[[], str], per_second: float, run: Callable[[], list[float]]
    ) -> tuple[list[float], list[float]]:
        """Return what `run` returns, and the first tokens of the requests of `send` meanwhile."""
        ended, names = threading.Event(), list[str]()

        def keep_sending() -> None:
            while not ended.wait(1 / per_second):
                names.append(send())

        sender = threading.Thread(target=keep_sending, daemon=True)
        sender.start()
        found = run()
        ended.set()
        sender.join()
        return found, [self.first_token(name) for name in names]

    def first_token(self, name: str) -> float:
        """Return the seconds until the first token of a request for one token."""
        assert self._answers[name].ended.wait(TIMEOUT_S)
        answer = self._answers.pop(name)
        return answer.times[0] - answer.sent

    def _drain(self) -> None:
        while not self._ended.empty():
            self._ended.get()


@contextmanager
def start(config: RankConfig) -> Iterator[tuple[Epoch, Client]]:
    """Start a rank alone, and its step loop on a thread."""
    epoch, _ = start_epoch(0, lambda _: None, config, Rendezvous("", 0, "bench-images"))
    client = Client(epoch, epoch.process.model_config.vocab_size)
    epoch.start_engine(client.publish, lambda step: None)
    loop = threading.Thread(target=epoch.run, name="step-loop", daemon=True)
    loop.start()
    try:
        yield epoch, client
    finally:
        epoch.engine.stop()
        loop.join(60)
        epoch.process.close()
