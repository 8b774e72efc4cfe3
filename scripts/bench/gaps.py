"""Gaps between the tokens of chats beside long prompts: 4 CPU ranks in one group, or 2 that prefill and 2 that decode.

Two servers run the demo model. Chats stream answers to short prompts one after another, while long prompts arrive at a
fixed pace. The servers take turns of a round, so that a slow spell of the machine meets both; the server that waits
sleeps. A gap is the time between two items of a chat's stream, as the client reads them.
"""

import argparse
import asyncio
import json
import random
import time
from itertools import pairwise
from statistics import median

import httpx
import numpy as np

from scripts.bench.results import add_options, origin, save
from scripts.bench.server_turns import in_turns
from scripts.bench.sessions import NUM_IDS

SHARED = ["cluster.ranks=4", "cache.host_memory_gib=0.5"]
MODES = {
    "one group": SHARED,
    "two prefill, two decode": [
        *SHARED,
        "pool=[{role: prefill, ranks: 2}, {role: decode, ranks: 2}]",
    ],
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chats", type=int, default=4, help="at once")
    parser.add_argument("--seconds", type=float, default=20.0, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every-s", type=float, default=2.0, help="between two long prompts")
    parser.add_argument("--long", type=int, default=1600, help="tokens of a long prompt")
    parser.add_argument("--output", type=int, default=100, help="tokens of a chat's answer")
    parser.add_argument("--set", action="append", default=[], help="setting for both servers")
    add_options(parser, "cpu-gaps", drawn=False)
    options = parser.parse_args()
    report = origin(0, options.commit, served=True)
    names = ("chats", "seconds", "rounds", "every_s", "long", "output")
    report["load"] = {name: getattr(options, name) for name in names}
    rounds = range(-1, options.rounds)  # the first round warms up
    report["modes"] = in_turns(
        MODES,
        options.set,
        lambda url, number: asyncio.run(_Round(options, url, number).run()),
        rounds,
        digits=2,
    )
    one, split = (report["modes"][mode]["gap_p99_ms"] for mode in MODES)
    report["gap_p99_of_one_group"] = round(split / one, 3)
    save(options.out, report)
    print(json.dumps({name: report[name] for name in ("modes", "gap_p99_of_one_group")}, indent=1))


class _Round:
    """Chats and long prompts on one server."""

    def __init__(self, options: argparse.Namespace, url: str, number: int):
        self._options, self._url = options, url
        self._random = random.Random(f"round {number}")
        self._gaps: list[float] = []
        self._long: list[float] = []
        self._tokens = 0

    async def run(self) -> dict[str, float]:
        """Load the server for the seconds of a round; return the figures."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, timeout=300, limits=limits) as client:
            self._end = time.perf_counter() + self._options.seconds
            chats = [self._chat(client) for _ in range(self._options.chats)]
            await asyncio.gather(*chats, self._long_prompts(client))
        return {
            "gap_p50_ms": round(float(np.percentile(self._gaps, 50)), 2),
            "gap_p99_ms": round(float(np.percentile(self._gaps, 99)), 2),
            "gap_max_ms": round(max(self._gaps), 2),
            "long_first_token_p50_ms": round(median(self._long), 1),
            "chat_tokens_per_s": round(self._tokens / self._options.seconds, 1),
        }

    async def _chat(self, client: httpx.AsyncClient) -> None:
        while time.perf_counter() < self._end:
            times = await self._ask(client, 64, self._options.output)
            self._gaps += (1e3 * (b - a) for a, b in pairwise(times))
            self._tokens += self._options.output

    async def _long_prompts(self, client: httpx.AsyncClient) -> None:
        asked = []
        while time.perf_counter() < self._end:
            asked.append(asyncio.create_task(self._long_prompt(client)))
            await asyncio.sleep(self._options.every_s)
        await asyncio.gather(*asked)

    async def _long_prompt(self, client: httpx.AsyncClient) -> None:
        sent = time.perf_counter()
        times = await self._ask(client, self._options.long, 8)
        self._long.append(1e3 * (times[0] - sent))

    async def _ask(
        self, client: httpx.AsyncClient, num_prompt: int, num_output: int
    ) -> list[float]:
        """Return the moments of the items of an answer."""
        body = {
            "prompt": [self._random.randrange(NUM_IDS) for _ in range(num_prompt)],
            "max_tokens": num_output,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        times = []
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"][0].get(
                    "token_ids"
                ):
                    times.append(time.perf_counter())
        return times


if __name__ == "__main__":
    main()
