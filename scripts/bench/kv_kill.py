"""Sessions that go on after SIGKILL of their rank: the pause of each stream, and whether a token differs.

Session n names rank n, modulo the ranks, so that the streams of the rank that is killed are known. Its process ends as
soon as every stream has FIRST_TOKENS tokens; the group replaces it and goes on with all streams. The pause of a stream
is its longest time between two tokens from then on. Its part behind the rebuild has no start of a process, and is the
part that a host tier can change. Without a failure the server then answers the prompts again, and finds nothing of them
in a cache: the tokens that the answers are compared with.
"""

import argparse
import asyncio
import random
import re
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx
import psutil

from scripts.bench.kv_streams import Stream, ask, p99
from scripts.bench.servers import ServerProcess

FIRST_TOKENS = 16
FIRST_S = 900.0
POLL_S = 0.02
VOCABULARY = range(1, 256)


@dataclass
class Kills:
    """The failures of one server, one after another, each with sessions of its own."""

    options: argparse.Namespace
    client: httpx.AsyncClient
    model: str
    server: ServerProcess

    async def run(self) -> dict[str, Any]:
        """Return the pauses of the killed ranks' streams and of the other ones over all failures, and each failure."""
        events = [await self._kill(number) for number in range(self.options.kills)]
        behind = [pause - event["rebuild_s"] for event in events for pause in event["own"]]
        own, others, answers = (
            [item for event in events for item in event.pop(key)]
            for key in ("own", "others", "answers")
        )
        return {
            "killed_rank": summary(own),
            "killed_rank_behind_rebuild": summary(behind),
            "other_ranks": summary(others),
            "events": events,
            "answers": answers,
        }

    async def _kill(self, number: int) -> dict[str, Any]:
        options, chance = self.options, random.Random(f"kill {number}")
        prompts = [
            chance.choices(VOCABULARY, k=options.kill_tokens) for _ in range(options.kill_sessions)
        ]
        streams = [Stream() for _ in prompts]
        asked = asyncio.gather(*map(self._ask, range(len(prompts)), prompts, streams))
        await flowing(streams, asked)
        killed = kill_a_rank(self.server.pid)
        await asked
        rebuild = (await self.client.get("/ready")).json()["groups"][0]["last_rebuild"]
        rank = int(re.match(r"rank (\d+): its process died", rebuild["reason"])[1])  # type: ignore[index]
        again = await asyncio.gather(
            *(self._answer(prompt, f"reference {number}") for prompt in prompts)
        )
        pauses: dict[bool, list[float]] = {True: [], False: []}
        for session, stream in enumerate(streams):
            if stream.times[-1] > killed:
                pauses[session % options.ranks == rank].append(pause(stream, killed))
        equal = sum(one.tokens == two.tokens for one, two in zip(streams, again, strict=True))
        found = {
            "rank": rank,
            "rebuild_s": rebuild["seconds"],
            "stages_s": rebuild["stages"],
            "equal_answers": f"{equal} of {len(streams)}",
        }
        answers = [stream.tokens for stream in streams]
        return {**found, "own": pauses[True], "others": pauses[False], "answers": answers}

    async def _ask(self, session: int, prompt: list[int], found: Stream) -> Stream:
        rank, length = session % self.options.ranks, self.options.kill_output_len
        headers = {"x-data-parallel-rank": str(rank)}
        return await ask(self.client, self.model, prompt, length, found=found, headers=headers)

    async def _answer(self, prompt: list[int], cache_salt: str) -> Stream:
        length = self.options.kill_output_len
        return await ask(self.client, self.model, prompt, length, cache_salt=cache_salt)


async def flowing(streams: Sequence[Stream], asked: "asyncio.Future[list[Stream]]") -> None:
    """Return when every stream has FIRST_TOKENS tokens. Raises the error of a stream, or if one is complete."""
    deadline = time.monotonic() + FIRST_S
    while not all(len(stream.tokens) >= FIRST_TOKENS for stream in streams):
        if asked.done():
            await asked
        begun = sum(bool(stream.tokens) for stream in streams)
        assert time.monotonic() < deadline, f"{begun} of {len(streams)} streams have begun"
        await asyncio.sleep(POLL_S)
    complete = sum(stream.complete for stream in streams)
    assert not complete, (
        f"{complete} answers are complete before the failure: raise --kill-output-len"
    )


def kill_a_rank(server_pid: int) -> float:
    """Kill the oldest process of a rank, which is no standby; return the time."""
    ranks = [
        process
        for process in psutil.Process(server_pid).children(recursive=True)
        if "RankActor" in " ".join(process.cmdline())
    ]
    min(ranks, key=psutil.Process.create_time).send_signal(signal.SIGKILL)
    return time.monotonic()


def pause(stream: Stream, since: float) -> float:
    """Return the longest time between two tokens of a stream after `since`."""
    after = [since, *(moment for moment in stream.times if moment > since)]
    return max(later - earlier for earlier, later in pairwise(after))


def summary(pauses: Sequence[float]) -> dict[str, Any]:
    """Return the figures of pauses in seconds; without pauses their number alone."""
    if not pauses:
        return {"streams": 0}
    return {
        "streams": len(pauses),
        "pause_p50_s": round(statistics.median(pauses), 3),
        "pause_p99_s": round(p99(pauses), 3),
        "pause_max_s": round(max(pauses), 3),
    }
