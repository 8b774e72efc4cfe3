"""Ranks that fail under many requests, in steps: engines, schedulers, open requests and suspects are those of the code.

Forwards, processes and messages are played. A rank fails in the middle of a step: by chance, or because a request that
ends ranks is in the step. Then all ranks form the next epoch, and each ingress submits its open requests again.
"""

import random
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

from cluster.client.open_request import OpenRequest
from cluster.client.router import RankLoad
from cluster.client.suspects import Suspects, turn
from kernels.pending import Pending
from tests.unit.schedulers import make_scheduler
from workers.config import SchedulerConfig
from workers.engine.engine import Engine
from workers.engine.vote_transport import LocalVoteTransport
from workers.step.step_output import StepOutput
from workers.step.step_sync import PlanConfig
from workers.wire.request import RequestOutput, SamplingParams

RANKS = (0, 1)


class KilledError(BaseException):
    """The end of a process: no code of an engine catches it."""


@dataclass
class Ingress:
    """An ingress: its open requests by their id in their rank, and what it found."""

    suspects: Suspects = field(default_factory=Suspects)
    open: dict[str, OpenRequest] = field(default_factory=dict)
    set_aside: list[str] = field(default_factory=list)

    def receive(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            request = self.open[output.request_id]
            request.put(output)
            if request.finished:
                del self.open[output.request_id]


class World:
    """Two ranks, and ingresses that keep `num_streams` requests open.

    copies     requests of each name that the ingresses send at once, with one prompt, as for `n`
    poison     the number of tokens at which each request of these names ends its rank
    mute       ranks end before their notices leave, unless a request is on trial
    """

    def __init__(
        self,
        seed: int,
        num_streams: int,
        *,
        num_ingresses: int = 1,
        copies: int = 1,
        poison: dict[str, int] | None = None,
        mute: bool = False,
    ):
        self.chance = random.Random(seed)
        self.num_streams, self.copies = num_streams, copies
        self.poison, self.mute = poison or {}, mute
        self.ingresses = [Ingress() for _ in range(num_ingresses)]
        self.num_asked = self.failures = self.excused = self.trials = 0
        self.stalls: list[
            int
        ] = []  # steps of each epoch until all requests of its beginning have a token
        self.kill_in = -1
        self._begin_epoch()

    def ask(self, name: str, ingress: int) -> None:
        """Send the copies of a request to ranks."""
        length, tokens = self.chance.randint(4, 40), self.chance.randint(8, 60)
        params = SamplingParams(max_tokens=tokens)
        prompt = [*[1] * (length - 1), crc32(name.encode()) >> 1]  # another one for each name
        for number in range(self.copies):
            request_id = f"{name}.{number}" if number else name
            self._submit(ingress, OpenRequest(request_id, prompt, params, 0, "", None, 1))

    def run(self, num_failures: int, every: tuple[int, int] | None) -> None:
        """Run until so many failures have happened; by chance, `every` so many steps of the ranks, if given."""
        while self.failures < num_failures:
            if every is not None and self.kill_in < 0:
                self.kill_in = self.chance.randint(*every)
            self.step()

    def step(self) -> None:
        """Let each rank run a step; fill up with new requests."""
        for number, ingress in enumerate(self.ingresses):
            while len(ingress.open) < self.num_streams // len(self.ingresses):
                self.num_asked += 1
                self.ask(f"r{self.num_asked}", number)
        for rank in self.chance.sample(RANKS, 2):
            self.kill_in -= 1
            try:
                self.engines[rank].step()
            except KilledError:
                self._fail(rank)
                return
        self.steps += 1
        if self.replayed and not any(request.fresh for request in self.replayed):
            self.stalls.append(self.steps)
            self.replayed = []

    def _begin_epoch(self) -> None:
        self.engines = [self._engine(rank) for rank in RANKS]
        self.steps, self.replayed = 0, []
        for number, ingress in enumerate(self.ingresses):
            requests, ingress.open = sorted(ingress.open.values(), key=turn), {}
            for request in requests:
                self._submit(number, request)
            self.replayed += requests

    def _submit(self, ingress: int, request: OpenRequest) -> None:
        request.begin_attempt()
        rank = self.chance.choice(RANKS)
        request.load = RankLoad((0, rank))
        self.ingresses[ingress].open[request.wire_id] = request
        self.engines[rank].submit(replace(request.to_engine(), ingress_id=str(ingress)))

    def _fail(self, rank: int) -> None:
        self.failures += 1
        for ingress in self.ingresses:
            found = ingress.suspects.judge(ingress.open.values(), lambda place: place[1] == rank)
            self.excused += ingress.suspects.verdict is True
            for request in found:
                ingress.set_aside.append(request.request_id)
                del ingress.open[request.wire_id]
            self.trials += sum(request.on_trial for request in ingress.open.values())
        self._begin_epoch()

    def _engine(self, rank: int) -> Engine:
        config = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=128)
        world = self
        scheduler = make_scheduler(config, num_blocks=4096, block_size=16, max_model_len=256)

        class Runner:
            """Ends the rank, or draws a token for each sequence."""

            def launch(self, batch: Any, _plan: Any) -> Pending[StepOutput]:
                for seq in batch.seqs:
                    name = seq.request.request_id.split("~")[0]
                    if seq.num_tokens - len(seq.request.prompt_token_ids) >= world.poison.get(
                        name, 1000
                    ):
                        raise KilledError
                if world.kill_in in (0, 1):
                    world.kill_in = -1
                    raise KilledError
                return Pending.ready(StepOutput.of(batch, [7] * len(batch.logits_seqs)))

        def publish(ingress_id: str, outputs: list[RequestOutput]) -> None:
            ingress = world.ingresses[int(ingress_id)]
            lost = world.mute and bool(outputs) and outputs[0].begins
            if not lost or ingress.open[outputs[0].request_id].on_trial:
                ingress.receive(outputs)

        return Engine(
            scheduler,
            Runner(),  # type: ignore[arg-type]
            LocalVoteTransport(),
            PlanConfig(equal_tokens=False),
            epoch=0,
            publish=publish,
            wake_peers=lambda step: None,
        )
