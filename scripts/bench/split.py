"""Simulates a mixed load on 4 GPUs: all in one group, or two prefill and two decode ranks of one pool.

Chats decode all the time, and long prompts arrive at random. In one group a step with a long prompt delays the tokens
of every stream, because the ranks step together. In a pool the prefill ranks and the decode ranks step apart, and the
KV of a prompt is copied between them. The time of a step is

    step_ms + tokens / tokens_per_ms + context / context_per_ms

of the slowest rank of a group, fitted to the three measured steps of docs/results/gpu-timeline.json; context is the
tokens that its decodes attend to. The router is that of the server.

`python -m scripts.bench.split` writes the gaps between tokens, the time to the first token of the long prompts, and
the output tokens per second of both forms, each the mean over seeds.
"""

import argparse
import heapq
import json
import random
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import Any

import numpy as np

from cluster.client.router import Pick, Router
from scripts.bench import ROOT
from scripts.bench.results import add_options, load, origin, save
from scripts.bench.sticky import WARM_SHARE

TIMELINE = ROOT / "docs" / "results" / "gpu-timeline"
KV_BYTES_PER_TOKEN = (
    2 * 4 * 128 * 2 * 48
)  # K and V of 4 heads of 128 values in bf16, 48 layers: Qwen3-30B-A3B


@dataclass(frozen=True)
class StepLaw:
    """The time of a step of one rank."""

    step_ms: float
    tokens_per_ms: float
    context_per_ms: float

    @classmethod
    def measured(cls) -> "StepLaw":
        """The law through the three steps of the timeline: two of decodes, one of prompts."""
        rows, times = [], []
        for state in load(TIMELINE)["states"]:
            shape = state["shape"]
            rows.append((1.0, shape["tokens"], shape["kv_reads"]))
            times.append(max(rank["step_ms"] for rank in state["ranks"]))
        one, per_token, per_context = np.linalg.solve(np.array(rows), np.array(times))
        return cls(float(one), float(1 / per_token), float(1 / per_context))

    def ms(self, tokens: int, context: int) -> float:
        """The milliseconds of a step."""
        return self.step_ms + tokens / self.tokens_per_ms + context / self.context_per_ms


@dataclass(frozen=True)
class Traffic:
    """Chats in a closed loop, and long prompts that arrive at random; lengths vary by half."""

    chats: int = 128
    chat_prompt: int = 200
    chat_output: int = 300
    long_per_s: float = 4.0
    long_prompt: int = 12_000
    long_output: int = 100
    seconds: float = 60.0


@dataclass(eq=False)
class _Request:
    arrived: float
    prompt: int
    output: int
    is_chat: bool
    left: int = 0
    done: int = 0
    last: float = 0.0
    pick: Pick | None = None


@dataclass(eq=False)
class _Group:
    """Ranks in lockstep, with the time at which their next step can begin."""

    ranks: int
    clock: float = 0.0
    coming: list[tuple[float, int, _Request]] = field(default_factory=list)
    prompts: list[list[_Request]] = field(default_factory=list)
    decodes: list[list[_Request]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompts = [[] for _ in range(self.ranks)]
        self.decodes = [[] for _ in range(self.ranks)]

    @property
    def next_ms(self) -> float:
        """When the next step begins; infinite without work."""
        if any(self.prompts) or any(self.decodes):
            return self.clock
        return max(self.clock, self.coming[0][0]) if self.coming else float("inf")


class Simulation:
    """One form under one load. `split`: a prefill and a decode group of half the ranks each."""

    def __init__(
        self,
        law: StepLaw,
        traffic: Traffic,
        *,
        split: bool,
        seed: int,
        ranks: int,
        budget: int,
        link: float,
    ):
        self._law, self._traffic, self._split = law, traffic, split
        self._budget, self._link = budget, link
        self._random = random.Random(seed)
        self._warm = 1e3 * WARM_SHARE * traffic.seconds
        sizes = [ranks // 2, ranks // 2] if split else [ranks]
        self._groups = [_Group(size) for size in sizes]
        self._router = Router(sizes)
        self._numbers = iter(range(1 << 60))
        self.gaps: list[float] = []
        self.first: list[float] = []
        self.outputs = 0
        for _ in range(traffic.chats):
            self._arrive(self._chat(self._random.uniform(0, 2000)))
        at = 0.0
        while at < 1e3 * traffic.seconds:
            at += self._random.expovariate(traffic.long_per_s) * 1e3
            self._arrive(self._made(at, traffic.long_prompt, traffic.long_output, is_chat=False))

    def run(self) -> dict[str, float]:
        """Run to the end of the load; return the figures."""
        end = 1e3 * self._traffic.seconds
        while (group := min(self._groups, key=lambda it: it.next_ms)).next_ms < end:
            self._step(group)
        return {
            "gap_p50_ms": round(float(np.percentile(self.gaps, 50)), 2),
            "gap_p99_ms": round(float(np.percentile(self.gaps, 99)), 2),
            "gap_max_ms": round(max(self.gaps), 2),
            "long_first_token_p50_ms": round(float(np.percentile(self.first, 50)), 1),
            "long_first_token_p99_ms": round(float(np.percentile(self.first, 99)), 1),
            "output_tokens_per_s": round(1e3 * self.outputs / (end - self._warm), 1),
        }

    def _chat(self, at: float) -> _Request:
        return self._made(at, self._traffic.chat_prompt, self._traffic.chat_output, is_chat=True)

    def _made(self, at: float, prompt: int, output: int, *, is_chat: bool) -> _Request:
        lengths = [self._random.randint(mean // 2, mean + mean // 2) for mean in (prompt, output)]
        return _Request(at, *lengths, is_chat)

    def _arrive(self, request: _Request) -> None:
        """Let a request come to the group that begins it: short prompts stay with their answers."""
        group = 1 if self._split and request.is_chat else 0
        request.left = request.prompt
        heapq.heappush(self._groups[group].coming, (request.arrived, next(self._numbers), request))

    def _step(self, group: _Group) -> None:
        begins = group.next_ms
        number = self._groups.index(group)
        while group.coming and group.coming[0][0] <= begins:
            _, _, request = heapq.heappop(group.coming)
            length, output = request.prompt, request.output if number or not self._split else 1
            pick = self._router.pick([0] * length, output, groups=[number])
            pick.load.begin_prefill(length)
            request.pick = pick
            group.prompts[pick.load.place[1]].append(request)
        group.clock = begins + max(self._of_rank(group, rank) for rank in range(group.ranks))
        for rank in range(group.ranks):
            self._commit(group, rank)

    def _of_rank(self, group: _Group, rank: int) -> float:
        used = len(group.decodes[rank])
        context = sum(it.prompt + it.done for it in group.decodes[rank])
        for request in group.prompts[rank]:
            chunk = min(request.left, self._budget - used)
            request.left -= chunk
            used += chunk
        return self._law.ms(used, context)

    def _commit(self, group: _Group, rank: int) -> None:
        ready = [request for request in group.prompts[rank] if not request.left]
        group.prompts[rank] = [request for request in group.prompts[rank] if request.left]
        for request in ready:
            assert request.pick is not None
            request.pick.load.end_prefill(request.prompt)
        running = [*group.decodes[rank], *ready]
        group.decodes[rank] = []
        for request in running:
            self._token(request, group.clock)
            if request.done >= request.output:
                self._end(request, group.clock)
            elif self._split and group is self._groups[0]:
                self._hand_over(request, group.clock)
            else:
                group.decodes[rank].append(request)

    def _token(self, request: _Request, at: float) -> None:
        if at >= self._warm:
            self.outputs += 1
            if request.done:
                self.gaps.append(at - request.last)
            elif not request.is_chat:
                self.first.append(at - request.arrived)
        request.done += 1
        request.last = at

    def _hand_over(self, request: _Request, at: float) -> None:
        """Copy the KV of a prompt; the decode group computes the last token of it again, in a step of its decodes."""
        self._release(request, 1)
        request.left = 1
        ready = at + 1e3 * request.prompt * KV_BYTES_PER_TOKEN / self._link
        heapq.heappush(self._groups[1].coming, (ready, next(self._numbers), request))

    def _end(self, request: _Request, at: float) -> None:
        first_side = self._split and request.pick is not None and request.pick.load.place[0] == 0
        self._release(request, 1 if first_side else request.output)
        if request.is_chat:
            self._arrive(self._chat(at))

    def _release(self, request: _Request, output: int) -> None:
        assert request.pick is not None
        request.pick.load.release(request.prompt + output)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, help="of all groups together")
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a step on a rank")
    parser.add_argument(
        "--capped",
        type=int,
        default=512,
        help="tokens of a step on a rank in the form `one group, small steps`",
    )
    parser.add_argument("--link", type=float, default=20e9, help="bytes/s of a copy of KV")
    parser.add_argument("--seeds", type=int, default=3)
    add_options(parser, "split-simulation", drawn=False)
    options = parser.parse_args()
    report = origin(0, options.commit)
    law, traffic = StepLaw.measured(), Traffic()
    forms = {
        "one group": (False, options.budget),
        "one group, small steps": (False, options.capped),
        "two prefill, two decode": (True, options.budget),
    }
    found: dict[str, Any] = {}
    for name, (split, budget) in forms.items():
        place = {"ranks": options.ranks, "budget": budget, "link": options.link}
        runs = [
            Simulation(law, traffic, split=split, seed=seed, **place).run()
            for seed in range(options.seeds)
        ]
        found[name] = {key: round(mean(run[key] for run in runs), 2) for key in runs[0]}
    report |= {
        "law": asdict(law),
        "traffic": asdict(traffic),
        "settings": {
            name: getattr(options, name) for name in ("ranks", "budget", "capped", "link", "seeds")
        },
        "forms": found,
        "gap_p99_of_one_group": round(
            found["two prefill, two decode"]["gap_p99_ms"] / found["one group"]["gap_p99_ms"], 3
        ),
    }
    save(options.out, report)
    print(
        json.dumps(
            {"law": report["law"], "forms": found, "ratio": report["gap_p99_of_one_group"]},
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
