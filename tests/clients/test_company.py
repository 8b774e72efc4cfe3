"""64 clients of all kinds at once: each gets exactly what it gets alone, and every block comes back.

All are greedy or seeded. Each kind runs alone first, then all of them together, some leaving half way.
"""

import asyncio
import random

import aiohttp
import pytest

from tests.clients.answers import Answer, Asked, ask
from tests.clients.conftest import HELLO, chat_body, completion_body
from tests.clients.test_openai_structured import CITY
from tests.clients.test_openai_tools import TOOLS

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"
NUM_CLIENTS = 64
TOPICS = ["dict.get", "os.path.join", "textwrap.dedent", "list.sort"]


def about(topic: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What does {topic} do?"}]


def kinds() -> list[Asked]:
    """One client of each kind."""
    hot = {"temperature": 1.3, "top_p": 0.95}
    tight = {"structured_outputs": {"json": CITY, "disable_any_whitespace": True}}
    asked = [Asked(CHAT, chat_body(about(topic), max_tokens=24)) for topic in TOPICS]
    asked += [
        Asked(COMPLETION, completion_body("In Python, a generator", max_tokens=20, **fields))
        for fields in (
            {},
            {"stream": True},
            {"n": 3, "seed": 3, **hot},
            {"logprobs": 3, "echo": True},
            {"logprobs": 2, "stream": True, "seed": 1, **hot},
            {"echo": True, "stream": True, "n": 2},
            {"stop": ["the"], "stream": True},
            {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
            {"logit_bias": {"300": 6, "400": 6}, "seed": 9, **hot},
            {"min_tokens": 12, "priority": -5, "stop": ["e"]},
            {"top_k": 5, "min_p": 0.05, "seed": 4, "temperature": 2, "priority": 7},
            {"guided_regex": "[0-9]{3}(-[a-z]{4}){2}", "stream": True},
            {"guided_choice": ["one", "two", "three"], "n": 4, "seed": 5, **hot},
            {"prompt_logprobs": 1, "ignore_eos": True},
        )
    ]
    asked.append(
        Asked(COMPLETION, completion_body(["a b c", "x y z", "1 2 3"], n=2, seed=1, **hot))
    )
    asked.append(Asked(COMPLETION, completion_body("Long words " * 80, max_tokens=6)))
    asked += [
        Asked(CHAT, chat_body(HELLO, max_tokens=60, **fields))
        for fields in (
            {"stream": True, "stream_options": {"include_usage": True}},
            {"stream": True, "n": 2, "seed": 6, **hot},
            {"logprobs": True, "top_logprobs": 2},
            {"logprobs": True, "stream": True, "seed": 2, **hot},
            tight,
            {**tight, "stream": True, "seed": 7, **hot},
            {"tools": TOOLS, "tool_choice": "required"},
            {"tools": TOOLS, "tool_choice": "required", "stream": True, "n": 2, "seed": 8, **hot},
            {"tools": TOOLS, "tool_choice": TOOLS[0] | {"function": {"name": "look_up"}}},
            {"tools": TOOLS, "stream": True, "logprobs": True},
            {"stop": ["demo", "!"], "include_stop_str_in_output": True, "stream": True},
        )
    ]
    asked.append(Asked(CHAT, chat_body(HELLO, max_tokens=20), {"x-data-parallel-rank": "1"}))
    return asked


def leaving() -> list[Asked]:
    """Clients that go away: at once, after a token or some, from a whole answer."""
    endless = {"max_tokens": 1500, "ignore_eos": True}
    return [
        Asked(COMPLETION, completion_body("x", stream=True, **endless), leaves_after=1),
        Asked(COMPLETION, completion_body("x", stream=True, n=3, **endless), leaves_after=9),
        Asked(CHAT, chat_body(HELLO, stream=True, **endless), leaves_after=20),
        Asked(CHAT, chat_body(HELLO, **endless), leaves_after=0),
        Asked(
            CHAT, chat_body(HELLO, tools=TOOLS, tool_choice="required", **endless), leaves_after=0
        ),
    ]


async def visit(client: aiohttp.ClientSession, asked: Asked) -> list[Answer]:
    """`ask`, or be gone before the answer comes."""
    if asked.leaves_after != 0:
        return await ask(client, asked)
    task = asyncio.create_task(ask(client, asked))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    return []


def test_each_gets_what_it_would_get_alone(server):
    everybody = kinds()
    some_leave = leaving()

    async def main() -> tuple[list[list[Answer]], list[Asked], list[list[Answer]]]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(server.url, connector=connector) as client:
            alone = [await ask(client, asked) for asked in everybody]
            crowd = [*some_leave, *everybody]
            crowd += (everybody + some_leave)[: NUM_CLIENTS - len(crowd)]
            random.Random(0).shuffle(crowd)
            return alone, crowd, await asyncio.gather(*(visit(client, asked) for asked in crowd))

    alone, crowd, together = asyncio.run(main())
    assert len(crowd) == NUM_CLIENTS
    for asked, answers in zip(crowd, together, strict=True):
        if asked.leaves_after is not None:
            assert not answers
            continue
        expected = alone[everybody.index(asked)]
        assert len(answers) == len(expected) > 0
        for answer, one in zip(answers, expected, strict=True):
            answer.same_as(one)
    server.wait_free()
