"""Simulates sessions in turns over ranks in lockstep: the lead that lets a session stay with its rank.

Each session sends a prompt, reads the answer, pauses, and sends prompt, answer and new tokens as the next prompt. The
router is that of the server. A rank keeps prefixes in a cache that holds a share of its sessions' tokens, the least
recently used leave first. A step decodes one token of each running sequence and fills the rest of its budget with
prompts; all ranks take the time of the slowest rank, `step_ms + tokens / tokens_per_ms + context / context_per_ms`. The
context is the tokens of the sequences that decode, whose keys and values are read.

`python -m scripts.bench.sticky` writes the figures of each lead as JSON: the share of prompt tokens found in a cache,
the time to the first token, output tokens per second, and the tokens of the busiest rank over the mean.
"""

import argparse
import heapq
import json
import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

from cluster.client.router import Router
from scripts.bench.results import add_options, origin, save

LEADS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0)
WARM_SHARE = 0.3  # of the requests, which are not counted: all sessions begin together


@dataclass(frozen=True)
class Load:
    """One load. Lengths are uniform between half and one and a half of their mean.

    system     tokens that all prompts begin with
    turns      of a session, behind which another session takes its place
    cache      tokens of a rank's prefix cache
    """

    ranks: int
    sessions: int
    system: int
    first: int
    new: int
    output: int
    turns: int
    pause_ms: float
    cache: int
    budget: int = 8192
    step_ms: float = 10.0
    tokens_per_ms: float = 30.0
    context_per_ms: float = 40_000.0


LOADS = {
    # Tool calls of agents: long contexts, short answers.
    "agents": Load(4, 48, 1024, 8000, 1000, 200, 12, 2000.0, 200_000),
    "agents, cache for a third": Load(4, 48, 1024, 8000, 1000, 200, 12, 2000.0, 60_000),
    "chats": Load(4, 128, 512, 256, 128, 256, 8, 4000.0, 200_000),
    "few sessions": Load(4, 6, 1024, 4000, 500, 300, 10, 500.0, 200_000),
    "one shared document": Load(4, 64, 12_000, 128, 128, 200, 6, 1000.0, 200_000),
    "without reuse": Load(4, 64, 0, 3000, 0, 300, 1, 500.0, 200_000),
}


@dataclass(eq=False)
class _Session:
    number: int
    tokens: list[int]
    turns: int


@dataclass(eq=False)
class _Request:
    session: _Session
    arrived_ms: float
    rank: int
    left: int
    output: int
    num_tokens: int
    prefill: int
    pick: Any
    answer: list[int] = field(default_factory=list)


class _Cache:
    """The prefixes of one rank, one for each session and one for what all share."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._held: OrderedDict[int, int] = OrderedDict()

    def find(self, session: int, num_tokens: int, system: int) -> int:
        """The tokens of a prompt that need not be computed: never its last one."""
        shared = system if -1 in self._held else 0
        return min(max(self._held.get(session, 0), shared), num_tokens - 1)

    def keep(self, session: int, num_tokens: int, system: int) -> None:
        """Hold a prefix as the most recently used one."""
        self._held[-1] = system
        self._held[session] = num_tokens
        self._held.move_to_end(session)
        self._held.move_to_end(-1)
        while len(self._held) > 2 and sum(self._held.values()) > self._capacity:
            self._held.popitem(last=False)


class Simulation:
    """One load with one lead."""

    def __init__(self, load: Load, lead: float, seed: int):
        self._load, self._random = load, random.Random(seed)
        self._router = Router([load.ranks], cache_tokens=load.cache, lead=lead)
        self._caches = [_Cache(load.cache) for _ in range(load.ranks)]
        self._prompts: list[list[_Request]] = [[] for _ in range(load.ranks)]
        self._decodes: list[list[_Request]] = [[] for _ in range(load.ranks)]
        self._ids = iter(range(1 << 60))
        self._system = [next(self._ids) for _ in range(load.system)]
        self._now = 0.0
        self._due: list[tuple[float, int, _Session]] = []
        for number in range(load.sessions):
            at = self._random.uniform(0, load.pause_ms)
            heapq.heappush(self._due, (at, number, self._new_session(number)))
        self._numbers = iter(range(load.sessions, 1 << 60))
        self.first_ms: list[float] = []
        self.cached: list[tuple[int, int]] = []  # found, of a prompt
        self.outputs: list[tuple[float, int]] = []  # time, tokens
        self.imbalance: list[float] = []

    def run(self, requests: int) -> dict[str, float]:
        """Run until so many requests have their first token; return the figures."""
        while len(self.first_ms) < requests:
            self._arrive()
            self._step()
        warm = int(WARM_SHARE * requests)
        since = self.outputs[int(WARM_SHARE * len(self.outputs))][0]
        made = sum(tokens for at, tokens in self.outputs if at >= since)
        first = sorted(self.first_ms[warm:])
        return {
            "cached_share": round(
                sum(c for c, _ in self.cached[warm:]) / sum(n for _, n in self.cached[warm:]), 3
            ),
            "first_token_p50_ms": round(median(first), 1),
            "first_token_p99_ms": round(first[int(0.99 * len(first))], 1),
            "output_tokens_per_s": round(1e3 * made / (self._now - since), 1),
            "busiest_rank_over_mean": round(mean(self.imbalance), 3),
        }

    def _new_session(self, number: int) -> _Session:
        return _Session(number, [*self._system, *self._draw(self._load.first)], self._load.turns)

    def _draw(self, about: int) -> Iterator[int]:
        for _ in range(self._random.randint(about // 2, about + about // 2)):
            yield next(self._ids)

    def _arrive(self) -> None:
        if not any(self._prompts) and not any(self._decodes):
            self._now = max(self._now, self._due[0][0])
        while self._due and self._due[0][0] <= self._now:
            at, _, session = heapq.heappop(self._due)
            output = sum(1 for _ in self._draw(self._load.output))
            pick = self._router.pick(session.tokens, self._load.output)
            pick.load.begin_prefill(pick.prefill)
            rank, length = pick.load.place[1], len(session.tokens)
            found = self._caches[rank].find(session.number, length, self._load.system)
            self.cached.append((found, length))
            count = length + self._load.output
            request = _Request(session, at, rank, length - found, output, count, pick.prefill, pick)
            self._prompts[rank].append(request)

    def _step(self) -> None:
        self._now += max(self._step_rank(rank) for rank in range(self._load.ranks))
        loads = [load.outstanding for load in self._router.loads]
        if any(loads):
            self.imbalance.append(max(loads) * len(loads) / sum(loads))
        for rank in range(self._load.ranks):
            self._commit(rank)

    def _step_rank(self, rank: int) -> float:
        """Compute the prompts that fit; return the time of the step."""
        load, used = self._load, len(self._decodes[rank])
        context = sum(len(it.session.tokens) + len(it.answer) for it in self._decodes[rank])
        for request in self._prompts[rank]:
            chunk = min(request.left, load.budget - used)
            request.left -= chunk
            used += chunk
        return load.step_ms + used / load.tokens_per_ms + context / load.context_per_ms

    def _commit(self, rank: int) -> None:
        began = [request for request in self._prompts[rank] if not request.left]
        self._prompts[rank] = [request for request in self._prompts[rank] if request.left]
        for request in began:
            self.first_ms.append(self._now - request.arrived_ms)
            request.pick.load.end_prefill(request.prefill)
        running = [*self._decodes[rank], *began]
        for request in running:
            request.answer.append(next(self._ids))
        self.outputs.append((self._now, len(running)))
        self._decodes[rank] = [it for it in running if len(it.answer) < it.output]
        for request in running:
            if len(request.answer) >= request.output:
                self._end(request)

    def _end(self, request: _Request) -> None:
        session = request.session
        request.pick.load.release(request.num_tokens)
        self._router.keep(request.pick.load, request.pick.tail, request.answer)
        held = len(session.tokens) + len(request.answer)
        self._caches[request.rank].keep(session.number, held, self._load.system)
        session.turns -= 1
        if session.turns:
            session.tokens = [*session.tokens, *request.answer, *self._draw(self._load.new)]
        else:
            session = self._new_session(next(self._numbers))
        pause = self._random.uniform(0.5, 1.5) * self._load.pause_ms
        heapq.heappush(self._due, (self._now + pause, session.number, session))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=600, help="of each simulation")
    parser.add_argument("--seeds", type=int, default=2, help="simulations; their means are written")
    add_options(parser, "sticky-simulation", drawn=False)
    options = parser.parse_args()
    report = {**origin(0, options.commit), "requests": options.requests, "seeds": options.seeds}
    found: dict[str, Any] = {}
    for name, load in LOADS.items():
        found[name] = {}
        for lead in LEADS:
            runs = [
                Simulation(load, lead, seed).run(options.requests) for seed in range(options.seeds)
            ]
            found[name][f"{lead:g}"] = {
                key: round(mean(run[key] for run in runs), 3) for key in runs[0]
            }
    report |= {"loads": {name: vars(load) for name, load in LOADS.items()}, "by_lead": found}
    save(options.out, report)
    print(json.dumps(report["by_lead"], indent=1))


if __name__ == "__main__":
    main()
