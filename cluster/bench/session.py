"""Runs a whole measurement: all servers, warm-up, rounds in turns; Ctrl-C keeps the finished answers.

Knows nothing of tables and files.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.bench.bodies import Target
from cluster.bench.load import Driver, Round
from cluster.bench.metrics import RoundResult, summarise
from cluster.bench.progress import Progress
from cluster.bench.settings import Load

WARMUP_INDEX = -1


@dataclass
class ServerRun:
    """One server and its rounds, in order. A round without an answer before Ctrl-C is left out."""

    target: Target
    rounds: list[Round] = field(default_factory=list)

    def results(self, limits: Mapping[str, float]) -> list[RoundResult]:
        """Return the figures of each round."""
        return [summarise(each.answers, each.client_cpu_s, limits) for each in self.rounds]

    @property
    def failure(self) -> str:
        """Why no request was answered, by the first of them; "" if one was."""
        ended = [answer for each in self.rounds for answer in each.answers if answer.ended]
        if not ended or any(answer.error is None for answer in ended):
            return ""
        first = ended[0]
        reason = f"{first.error}: {first.refusal}" if first.refusal else first.error
        return f"{self.target.name} completed no request: {reason}"


@dataclass
class Session:
    """The results of a run; `interrupted`: Ctrl-C ended it."""

    servers: list[ServerRun]
    interrupted: bool = False


async def run_session(
    load: Load,
    urls: Mapping[str, str],
    model: str | None,
    headers: dict[str, str],
    progress: Progress,
) -> Session:
    """Run all rounds. Cancellation (Ctrl-C) ends them early and keeps the finished answers.

    The servers take turns, in reverse order in every second round, so that a change of the machine's speed
    affects all servers alike.
    """
    driver = Driver(load, headers, progress.advance)
    session = Session([])
    try:
        targets = await driver.prepare(dict(urls), model)
        session.servers = [ServerRun(target) for target in targets]
        for target in targets if load.warmup else ():
            with progress.stage(f"{target.name}: warm-up", load.warmup):
                await driver.play(target, WARMUP_INDEX, load.warmup, Round())
        for index in range(load.rounds):
            for server in session.servers[:: -1 if index % 2 else 1]:
                title = f"{server.target.name}: round {index + 1} of {load.rounds}"
                server.rounds.append(Round())
                with progress.stage(title, load.requests):
                    await driver.play(server.target, index, load.requests, server.rounds[-1])
    except asyncio.CancelledError:
        session.interrupted = True
    if session.interrupted:
        for server in session.servers:
            server.rounds = [each for each in server.rounds if _has_answers(each)]
        session.servers = [server for server in session.servers if server.rounds]
    return session


def _has_answers(each: Round) -> bool:
    return any(answer.ended for answer in each.answers)
