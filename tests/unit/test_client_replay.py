"""Answers of the API while ranks die: text, calls, thoughts, log-probabilities and usage as if nothing had happened.

The API runs over an engine client with scripted ranks. A rank sends a few tokens of each of its requests, then its
process dies; so goes each epoch, until all requests have ended.
"""

import asyncio
import json
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import pytest

from cluster.api.app import create_app
from cluster.api.settings import ApiSettings
from cluster.client.open_request import OpenRequest
from tests.unit import ray_fakes
from tests.unit.api_fakes import IM_END, prompt_logprobs, tiny_tokenizer, token_logprobs
from tests.unit.client_scene import OfFakes, Scene, run, scene, use_fakes
from tests.unit.ray_fakes import FakeRank, until
from tests.unit.test_tool_parsers import CALL, OTHER, TOOLS, tag
from workers.rank.rank_info import RankInfo
from workers.wire.request import EngineRequest, RequestOutput, SamplingParams

TEXTS = ("Grüße, 東京! One, two, three.", "Another ünswer END of it.", "Third: 🚢🚢 sails.")
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
JSON_FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
CHAT, COMPLETIONS, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/messages"

CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "text": (COMPLETIONS, {"max_tokens": 40}, TEXTS),
    "length": (COMPLETIONS, {"max_tokens": 7}, TEXTS),
    "stop": (COMPLETIONS, {"stop": ["END", "two"], "max_tokens": 40}, TEXTS),
    "n": (COMPLETIONS, {"n": 3, "max_tokens": 40}, TEXTS),
    "prompts": (COMPLETIONS, {"prompt": ["hi", "you"], "n": 2, "max_tokens": 40}, TEXTS),
    "logprobs": (COMPLETIONS, {"logprobs": 2, "max_tokens": 20, "echo": True}, TEXTS),
    "prompt logprobs": (COMPLETIONS, {"prompt_logprobs": 1, "max_tokens": 20}, TEXTS),
    "chat logprobs": (CHAT, {"logprobs": True, "top_logprobs": 2, "n": 2}, TEXTS),
    "structured": (CHAT, {"response_format": JSON_FORMAT}, ('{"n": 12345}',)),
    "tools": (CHAT, {"tools": TOOLS}, (f"Sure.\n{tag(CALL)}\n{tag(OTHER)}",)),
    "required tools": (CHAT, {"tools": TOOLS, "tool_choice": "required"}, (tag(CALL),)),
    "reasoning": (CHAT, {}, ("<think>\nHm, 東.\n\nSo.\n</think>\n\nYes.\n",)),
    "reasoning and tools": (CHAT, {"tools": TOOLS}, (f"<think>Hm.</think>{tag(CALL)}",)),
    "messages": (MESSAGES, {"max_tokens": 60}, ("<think>Hm.</think>Yes, 東京.",)),
}


class ScriptedRank(FakeRank):
    """Sends the text of a request token by token, as `play` lets it; a choice's text follows from its number."""

    texts: tuple[str, ...] = ()

    async def start(self, epoch: int, peers: Any) -> RankInfo:
        await super().start(epoch, peers)
        return RankInfo(self.rank, {}, num_blocks=200, block_size=16, max_model_len=2000)

    def send(self, request: EngineRequest, count: int) -> int:
        """Send up to `count` further tokens, each in a message of its own, as a rank does; return their number."""
        tokens = [*self.texts[choice_of(request) % len(self.texts)].encode(), IM_END]
        params, sent = request.params, len(request.emitted_token_ids)
        for index in range(sent, min(sent + count, len(tokens))):
            token, is_first = tokens[index], index == sent
            stops = token in params.stop_token_ids
            ends = "stop" if stops else "length" if index + 1 == params.max_tokens else None
            output = RequestOutput(
                request.request_id,
                [token],
                ends,
                logprobs=None
                if params.logprobs is None
                else [token_logprobs(token, params.logprobs)],
                prompt_logprobs=prompt_logprobs(request.prompt_token_ids, params.prompt_logprobs)
                if is_first and not sent
                else None,
                num_cached_tokens=3 if is_first and not sent else 0,
            )
            self.send_now(request.ingress_id, [output])
            if ends is not None:
                del self.requests[request.request_id]
                return index + 1 - sent
        return min(sent + count, len(tokens)) - sent


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)
    monkeypatch.setattr(ray_fakes, "FakeRank", ScriptedRank)
    monkeypatch.setattr(OfFakes, "group_options", {"rebuild_attempts": 1000, "hang_timeout_s": 5})


async def play(now: Scene, answer: "asyncio.Task[Any]", size: int) -> list[EngineRequest]:
    """Let the ranks send `size` tokens of each request, then kill one; over and over until the answer is there.

    size   0 = all tokens, and no death
    Returns the requests as the ranks got them.
    """
    seen: list[EngineRequest] = []
    epoch = 0

    def next_turn() -> bool:
        """Whether each open request is in its rank, in the present epoch."""
        here = {name for rank in now.ranks for name in rank.requests.copy()}
        in_epoch = now.group.epoch == epoch and now.group.reachable
        return answer.done() or (in_epoch and bool(here) and set(now.group.open) <= here)

    while True:
        await until(next_turn)
        if answer.done():
            return seen
        turn = [(rank, request) for rank in now.ranks for request in list(rank.requests.values())]
        expected = {}
        for rank, request in turn:
            seen.append(request)
            count = rank.send(request, size or 1000)
            expected[request.request_id] = len(request.emitted_token_ids) + count
        await until(partial(arrived, now, expected))
        if size:
            epoch += 1
            await now.kill(epoch % 2)


def arrived(now: Scene, expected: dict[str, int]) -> bool:
    """Whether the client has so many tokens of each request, or needs no more."""
    requests = now.group.open
    return all(n not in requests or len(requests[n].emitted) == k for n, k in expected.items())


async def ask(path: str, body: dict[str, Any], size: int) -> tuple[Any, list[EngineRequest]]:
    """Return the answer, and the requests as ranks got them."""
    async with scene() as now:
        app = create_app(lambda: now.client, tiny_tokenizer(), ApiSettings())
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer = asyncio.create_task(client.post(path, json=body))
            seen = await play(now, answer, size)
            response = await answer
        assert response.status_code == 200, response.text
        assert now.outstanding == (0, 0) and not now.group.open
    if body.get("stream"):
        return joined(response.text), seen
    return without_ids(response.json()), seen


def without_ids(value: Any) -> Any:
    """JSON without ids and times."""
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "created")}
    return [without_ids(item) for item in value] if isinstance(value, list) else value


def joined(text: str) -> dict[str, Any]:
    """The items of a stream, their texts and lists joined by their place in the items."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith("data: {"):
            item = json.loads(line.removeprefix("data: "))
            for choice in item.pop("choices", ()):
                add(found, f"choice {choice.pop('index')}", choice)
            add(found, "", item)
    return found


def add(found: dict[str, Any], place: str, value: Any) -> None:
    if isinstance(value, dict):
        for name, inner in value.items():
            if name not in ("id", "created", "index"):
                add(found, f"{place}.{name}", inner)
    elif (
        isinstance(value, list) and value and isinstance(value[0], dict) and "function" in value[0]
    ):
        for inner in value:
            add(found, f"{place}[{inner['index']}]", inner)
    elif value is not None:
        is_joined = isinstance(value, str | list) and place.split(".")[-1] not in CONSTANTS
        found[place] = found[place] + value if is_joined and place in found else value


CONSTANTS = {"object", "model", "system_fingerprint", "type", "role"}


@pytest.mark.parametrize(
    ("name", "stream"),
    # Log-probabilities of the prompt are for whole answers.
    [
        (name, stream)
        for name in CASES
        for stream in (False, True)[: 1 if "prompt l" in name else 2]
    ],
)
def test_an_answer_is_that_of_an_undisturbed_run(name, stream, monkeypatch):
    path, fields, texts = CASES[name]
    monkeypatch.setattr(ScriptedRank, "texts", texts)
    body = {"model": "tiny", "max_tokens": 200, "seed": 7, "stream": stream, **fields}
    if path == COMPLETIONS:
        body.setdefault("prompt", "hi")
    else:
        body["messages"] = [{"role": "user", "content": "hi"}]
    if stream and path != MESSAGES:
        body["stream_options"] = {"include_usage": True}
    whole, sent = run(ask(path, body, 0))
    assert len(json.dumps(whole)) > 100
    found, again = run(ask(path, body, 4))
    assert found == whole
    assert len(again) > len(sent)
    # Ranks get the request itself each time: parameters, grammar, prompt.
    first = {choice_of(request): request for request in sent}
    for request in again:
        same = replace(request, emitted_token_ids=[])
        ids = {name: getattr(same, name) for name in ("request_id", "ingress_id")}
        assert same == replace(first[choice_of(request)], **ids)
        text = [*texts[choice_of(request) % len(texts)].encode(), IM_END]
        assert request.emitted_token_ids == text[: len(request.emitted_token_ids)]


def choice_of(request: EngineRequest) -> int:
    return int(request.request_id.split("~")[0].rsplit("-", 1)[1])


def test_what_the_first_output_alone_carries_is_passed_on_once() -> None:
    """An attempt may end before its first output; the output of the next attempt is then the first one."""

    async def scenario() -> list[tuple[bool, int]]:
        params = SamplingParams(max_tokens=4, prompt_logprobs=1)
        request = OpenRequest("a", [1, 2], params, 0, "", None, 1)
        request.begin_attempt()
        found = []
        for token in (5, 6):
            request.begin_attempt()
            entries = prompt_logprobs([1, 2], 1)
            request.put(
                RequestOutput("a", [token], None, prompt_logprobs=entries, num_cached_tokens=3)
            )
            output = await request.get()
            found.append((output.prompt_logprobs == entries, output.num_cached_tokens))
        return found

    assert run(scenario()) == [(True, 3), (False, 0)]
