"""Judges answers of scripts/chaos that differ from those of the undisturbed run: rounding, or a failure.

A request that goes on in a new epoch has its tokens computed again as a prompt, in another order of additions. Where
two tokens or two experts are almost equally good, the last bits of these sums decide. So each different answer is
searched among answers that the undisturbed server gives to its request from the beginning, while all hidden states of
the ranks carry noise of the size of rounding errors. Such an answer needs no failure. A lost, doubled or wrong token
cannot come about there, because no request is submitted again.
"""

import asyncio
from dataclasses import dataclass

import httpx

from scripts.bench.chaos_streams import Answer, Difference, Found, Request, stream
from scripts.bench.chaos_victim import Victim

TRIES = 1024
AT_ONCE = 16


@dataclass(frozen=True)
class Control:
    """Noise without failures: `others` of `answers` differ from the undisturbed run without noise."""

    answers: int
    others: int


async def judge(
    victim: Victim,
    client: httpx.AsyncClient,
    requests: list[Request],
    found: Found,
) -> list[Difference]:
    """Return the differences that rounding explains; the other ones become failures. The group must serve.

    Equal answers to a request are judged once.
    """
    explained: list[Difference] = []
    wrong: list[Difference] = []
    with victim.present("noise"):
        for difference in found.different:
            request = requests[difference.number]
            if any(known.covers(difference) for known in explained):
                explained.append(difference)
            elif not difference.answer.left and any(known.covers(difference) for known in wrong):
                wrong.append(difference)
            elif await _occurs(client, request, difference.answer):
                explained.append(difference)
            else:
                wrong.append(difference)
    found.failed += map(str, wrong)
    found.different = []
    return explained


async def control(
    victim: Victim, client: httpx.AsyncClient, requests: list[Request], expected: list[Answer]
) -> Control:
    """Answer all requests once with noise."""
    with victim.present("noise"):
        found = await answers(client, requests, "control")
    pairs = zip(found, expected, strict=True)
    return Control(len(found), sum(bool(answer.differs(wanted)) for answer, wanted in pairs))


async def _occurs(client: httpx.AsyncClient, request: Request, wanted: Answer) -> bool:
    """Whether the server gives this answer, in TRIES tries."""
    for first in range(0, TRIES, AT_ONCE):
        found = await answers(client, [request] * AT_ONCE, f"noise {first}")
        if not all(answer.differs(wanted) for answer in found):
            return True
    return False


async def answers(client: httpx.AsyncClient, requests: list[Request], salt: str) -> list[Answer]:
    """Answer requests with their prompts computed anew."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def once(number: int, request: Request) -> Answer:
        _, path, body = request
        async with gate:
            return await stream(client, path, body | {"cache_salt": f"{salt} {number}"})

    return await asyncio.gather(*(once(*pair) for pair in enumerate(requests)))
