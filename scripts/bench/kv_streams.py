"""Streamed greedy answers to prompts of token ids: when their tokens came, and the figures of many."""

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Stream:
    """One streamed answer: when it was sent, when each chunk came, its tokens, and how many of its prompt were cached.

    complete   all tokens have come
    """

    sent: float = field(default_factory=time.monotonic)
    times: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    cached: int = 0
    complete: bool = False


async def ask(
    client: httpx.AsyncClient,
    model: str,
    prompt: list[int],
    length: int,
    *,
    found: Stream | None = None,
    cache_salt: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Stream:
    """Stream one greedy answer of exactly `length` tokens, into `found` if it is given."""
    found = found or Stream()
    body = {"model": model, "prompt": prompt, "max_tokens": length, "temperature": 0}
    body |= {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    body |= {"return_token_ids": True, "cache_salt": cache_salt}
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            item = json.loads(line.removeprefix("data: "))
            if item["choices"]:
                found.times.append(time.monotonic())
                found.tokens += item["choices"][0]["token_ids"]
            if item.get("usage"):
                found.cached = (item["usage"].get("prompt_tokens_details") or {})["cached_tokens"]
    assert len(found.tokens) == length, f"{len(found.tokens)} tokens in place of {length}"
    found.complete = True
    return found


async def at_once(limit: int, calls: Iterable[Callable[[], Awaitable[Stream]]]) -> list[Stream]:
    """Return the results of `calls`, of which `limit` run at once, in their order."""
    places = asyncio.Semaphore(limit)

    async def one(call: Callable[[], Awaitable[Stream]]) -> Stream:
        async with places:
            return await call()

    return await asyncio.gather(*map(one, calls))


def p99(seconds: Sequence[float]) -> float:
    """Return the value that 99 % of `seconds` do not exceed."""
    ordered = sorted(seconds)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


def figures(streams: list[Stream], num_prompt_tokens: int) -> dict[str, Any]:
    """Return rates and first tokens of streams that ran together, and what they answered."""
    seconds = max(it.times[-1] for it in streams) - min(it.sent for it in streams)
    first = [it.times[0] - it.sent for it in streams]
    num_tokens = sum(len(it.tokens) for it in streams)
    return {
        "requests": len(streams),
        "seconds": round(seconds, 3),
        "output_tok_s": round(num_tokens / seconds, 2),
        "total_tok_s": round((num_prompt_tokens + num_tokens) / seconds, 1),
        "first_token_p50_s": round(statistics.median(first), 4),
        "first_token_p99_s": round(p99(first), 4),
        "cached_share": round(sum(it.cached for it in streams) / max(1, num_prompt_tokens), 4),
        "answers": [it.tokens for it in streams],
    }
