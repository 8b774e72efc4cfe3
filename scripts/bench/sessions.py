"""Sessions in turns on a server of two CPU ranks: cached tokens and the first token, with and without sticky routing.

Two servers run the demo model, one with `serve.prefix_lead` of the configuration and one with 0, where load alone
chooses the rank of each turn. Each session sends a prompt, reads the answer, pauses, and sends prompt, answer and new
tokens as its next prompt. The servers take turns of a round, so that a slow spell of the machine meets both; every
round has new sessions. The first turn of a session finds nothing in a cache and does not count.
"""

import argparse
import asyncio
import json
import random
import time
from statistics import median

import httpx

from scripts.bench.results import add_options, origin, save
from scripts.bench.server_turns import in_turns

MODES = {"sticky": [], "load alone": ["serve.prefix_lead=0"]}
NUM_IDS = 4000  # of the demo's vocabulary, without its special tokens


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=9, help="at once")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--first", type=int, default=800, help="tokens of a session's first prompt")
    parser.add_argument("--new", type=int, default=64, help="new tokens of each further prompt")
    parser.add_argument("--output", type=int, default=24, help="tokens of an answer")
    parser.add_argument("--pause-s", type=float, default=0.5, help="mean pause before a turn")
    parser.add_argument("--set", action="append", default=[], help="setting for both servers")
    add_options(parser, "cpu-sessions", drawn=False)
    options = parser.parse_args()
    report = origin(0, options.commit, served=True)
    names = ("sessions", "turns", "rounds", "first", "new", "output", "pause_s")
    report["load"] = {name: getattr(options, name) for name in names}
    rounds = range(options.rounds)
    report["modes"] = in_turns(
        MODES,
        options.set,
        lambda url, number: asyncio.run(_Round(options, url, number).run()),
        rounds,
        digits=3,
    )
    save(options.out, report)
    print(json.dumps(report["modes"], indent=1))


class _Round:
    """New sessions on one server, all at once."""

    def __init__(self, options: argparse.Namespace, url: str, number: int):
        self._options, self._url, self._number = options, url, number
        self._first_ms: list[float] = []
        self._cached: list[tuple[int, int]] = []  # found, of a prompt

    async def run(self) -> dict[str, float]:
        """Run all turns of all sessions; return the figures."""
        started = time.perf_counter()
        limits = httpx.Limits(max_connections=self._options.sessions)
        async with httpx.AsyncClient(base_url=self._url, timeout=300, limits=limits) as client:
            await asyncio.gather(*(self._session(client, n) for n in range(self._options.sessions)))
        seconds = time.perf_counter() - started
        first = sorted(self._first_ms)
        return {
            "cached_share": round(
                sum(found for found, _ in self._cached) / sum(of for _, of in self._cached), 3
            ),
            "first_token_p50_ms": round(median(first), 1),
            "first_token_p90_ms": round(first[int(0.9 * len(first))], 1),
            "seconds": round(seconds, 2),
        }

    async def _session(self, client: httpx.AsyncClient, number: int) -> None:
        options, source = self._options, random.Random(f"{self._number} {number}")
        prompt = [source.randrange(NUM_IDS) for _ in range(options.first)]
        for turn in range(options.turns):
            await asyncio.sleep(source.uniform(0.5, 1.5) * options.pause_s)
            answer, first_ms, cached = await self._ask(client, prompt)
            if turn:
                self._first_ms.append(first_ms)
                self._cached.append((cached, len(prompt)))
            prompt = [*prompt, *answer, *(source.randrange(NUM_IDS) for _ in range(options.new))]

    async def _ask(
        self, client: httpx.AsyncClient, prompt: list[int]
    ) -> tuple[list[int], float, int]:
        """Return the tokens of the answer, the time to the first one, and the cached tokens of the prompt."""
        body = {
            "prompt": prompt,
            "max_tokens": self._options.output,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        tokens: list[int] = []
        first_ms, cached, sent = 0.0, 0, time.perf_counter()
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                item = json.loads(line.removeprefix("data: "))
                if item.get("usage"):
                    cached = item["usage"]["prompt_tokens_details"]["cached_tokens"]
                for choice in item["choices"]:
                    first_ms = first_ms or 1e3 * (time.perf_counter() - sent)
                    tokens += choice.get("token_ids") or []
        assert len(tokens) == self._options.output, tokens
        return tokens, first_ms, cached


if __name__ == "__main__":
    main()
