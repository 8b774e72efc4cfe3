"""What only shows while an answer is under way: first bytes, disconnects, clean-up, cost."""

import asyncio
import json
from typing import Any

import pytest

from cluster.api.answer.message_parser import MessageParser
from cluster.api.request.generation_factory import GenerationFactory
from cluster.api.tools.base import CallDelta, Piece
from tests.unit.api_fakes import IM_END, Api, FakeBackend, events, says

WAIT_S = 60.0  # for events that are expected to come, also in a process that is stopped for seconds


class Connection:
    """One raw ASGI request whose client can look at each message and can go away."""

    def __init__(self, api: Api, path: str, body: dict[str, Any]) -> None:
        self.sent: list[dict[str, Any]] = []
        self.changed = asyncio.Event()
        self._gone = asyncio.Event()
        self._body: bytes | None = json.dumps(body).encode()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
            "scheme": "http",
            "root_path": "",
        }
        self.task = asyncio.create_task(api.app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        self.changed.set()

    async def until_sent(self, count: int) -> None:
        while len(self.sent) < count:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), WAIT_S)

    async def leave(self) -> None:
        self._gone.set()
        await asyncio.wait_for(self.task, WAIT_S)


async def until(condition) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)


def run(test) -> None:
    async def main() -> None:
        async with asyncio.timeout(2 * WAIT_S):
            await test()

    asyncio.run(main())


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_disconnect_aborts_a_stream(n, path):
    async def test():
        api = Api(FakeBackend())
        api.backend.hang_after = 2
        body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "stream": True}
        connection = Connection(api, path, body | {"n": n})
        await connection.until_sent(1 + 2 * n)
        assert len(api.backend.open) == n
        await connection.leave()
        assert not api.backend.open
        assert sorted(api.backend.aborted) == sorted(api.backend.requests)
        assert len(asyncio.all_tasks()) == 1  # this test: nothing is left running

    run(test)


@pytest.mark.parametrize("n", [1, 3])
def test_disconnect_aborts_a_request_that_does_not_stream(n):
    async def test():
        api = Api(FakeBackend())
        api.backend.hang_after = 2
        connection = Connection(api, "/v1/completions", {"prompt": "a", "n": n})
        await until(lambda: len(api.backend.open) == n)
        assert connection.sent == []
        await connection.leave()
        assert not api.backend.open
        assert len(api.backend.aborted) == n
        assert connection.sent == []
        assert len(asyncio.all_tasks()) == 1

    run(test)


def test_cancelled_by_the_server_aborts_too():
    async def test():
        api = Api(FakeBackend())
        api.backend.hang_after = 2
        connection = Connection(api, "/v1/completions", {"prompt": "a", "stream": True})
        await connection.until_sent(3)
        connection.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connection.task
        assert not api.backend.open
        assert len(asyncio.all_tasks()) == 1

    run(test)


def test_tokens_leave_one_by_one_and_the_first_at_once():
    async def test():
        gate = asyncio.Semaphore(0)

        class Gated(FakeBackend):
            async def generate(self, request_id, prompt_token_ids, params, **options):
                async for output in super().generate(request_id, prompt_token_ids, params):
                    await gate.acquire()
                    yield output

        api = Api(Gated(says("abc")))
        body = {"prompt": "a", "stream": True, "max_tokens": 3}
        connection = Connection(api, "/v1/completions", body)
        await asyncio.sleep(0.01)
        assert connection.sent == []
        for count in (2, 3, 4):
            gate.release()
            await connection.until_sent(count)
            await asyncio.sleep(0.001)
            assert len(connection.sent) == count or count == 4
        await connection.task
        kinds = [message["type"] for message in connection.sent]
        assert kinds == ["http.response.start"] + ["http.response.body"] * 4
        more = [message.get("more_body", False) for message in connection.sent[1:]]
        assert more == [True, True, True, False]
        assert connection.sent[-1]["body"] == b"data: [DONE]\n\n"

    run(test)


def test_stop_string_aborts_before_the_engine_goes_on():
    async def test():
        api = Api(FakeBackend(says("ab")))
        api.backend.hang_after = 2  # the engine would never end by itself
        body = {"prompt": "a", "stop": "b", "stream": True, "max_tokens": 100}
        connection = Connection(api, "/v1/completions", body)
        await asyncio.wait_for(connection.task, WAIT_S)
        assert connection.sent[-1]["body"] == b"data: [DONE]\n\n"
        assert len(api.backend.aborted) == 1

    run(test)


def test_failure_of_one_choice_ends_the_others():
    async def test():
        class OneFails(FakeBackend):
            async def generate(self, request_id, prompt_token_ids, params, **options):
                stream = super().generate(request_id, prompt_token_ids, params)
                async for output in stream:
                    if request_id.endswith("-1"):
                        await stream.aclose()
                        raise KeyError("broken")
                    yield output

        api = Api(OneFails(says("ab")))
        api.backend.hang_after = 1
        body = {"prompt": "a", "n": 3, "stream": True, "max_tokens": 100}
        connection = Connection(api, "/v1/completions", body)
        await asyncio.wait_for(connection.task, WAIT_S)
        assert not api.backend.open
        assert b'"error"' in connection.sent[-1]["body"]
        assert connection.sent[-1]["body"].endswith(b"data: [DONE]\n\n")

    run(test)


def test_slow_client_holds_back_its_own_stream_only():
    async def test():
        class Stuck(Connection):
            async def _send(self, message):
                await super()._send(message)
                await asyncio.Event().wait()

        api = Api(FakeBackend(says("a" * 50)))
        body = {"prompt": "a", "stream": True, "max_tokens": 50}
        stuck, fast = (kind(api, "/v1/completions", body) for kind in (Stuck, Connection))
        await asyncio.wait_for(fast.task, WAIT_S)
        assert len(fast.sent) == 52
        assert len(stuck.sent) == 1 and not stuck.task.done()
        assert len(api.backend.open) == 1
        await stuck.leave()
        assert not api.backend.open

    run(test)


class Bracketed:
    """A call parser that takes "[x]" for a call of x and holds a bracket back until it closes."""

    def __init__(self) -> None:
        self._num_calls, self._held = 0, ""

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        for char in text:
            self._held += char
            if char == "]":
                pieces.append(CallDelta(self._num_calls, self._held.strip("[]")))
                self._num_calls += 1
            elif self._held[0] == "[":
                continue
            else:
                pieces.append(self._held)
            self._held = ""
        return pieces

    def flush(self) -> list[Piece]:
        return [self._held] if self._held else []


def called(delta: dict[str, Any]) -> dict[str, Any]:
    """The delta with the name of its call alone."""
    calls = delta.get("tool_calls")
    return delta if calls is None else {"call": calls[0]["function"]["name"]}


@pytest.fixture
def parsed(monkeypatch):
    """Every chat choice gets a parser."""
    make = GenerationFactory.generation

    async def with_parser(self, draft, backend, sender):
        generation = await make(self, draft, backend, sender)
        for choice in generation.choices:
            choice.parser = MessageParser(calls=Bracketed())
        return generation

    monkeypatch.setattr(GenerationFactory, "generation", with_parser)


@pytest.mark.parametrize("size", [1, 2, 50])
def test_parsed_stream(parsed, size):
    api = Api(FakeBackend(says("ok[foo][b", size=size, end=[IM_END])))
    role, *items = [item["choices"][0] for item in events(api.chat(stream=True))]
    assert role["delta"] == {"role": "assistant", "content": ""}
    deltas = [called(item["delta"]) for item in items]
    assert deltas == [{"content": "o"}, {"content": "k"}, {"call": "foo"}, {"content": "[b"}]
    assert [item["finish_reason"] for item in items] == [None] * 3 + ["tool_calls"]


def test_parsed_stream_tells_of_tokens_whose_text_is_held_back(parsed):
    api = Api(FakeBackend(says("[foo]", end=[IM_END])))
    _, *items = [item["choices"][0] for item in events(api.chat(stream=True, logprobs=True))]
    tokens = [[entry["token"] for entry in item["logprobs"]["content"]] for item in items]
    assert tokens == [["["], ["f"], ["o"], ["o"], ["]"], ["<|im_end|>"]]
    deltas = [called(item["delta"]) for item in items]
    assert deltas == [{}] * 4 + [{"call": "foo"}, {}]


def test_parsed_answer(parsed):
    api = Api(FakeBackend(says("ok[foo]", end=[IM_END])))
    for choice in api.chat(n=2).json()["choices"]:
        message = choice["message"]
        assert message["content"] == "ok"
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["foo"]
        assert choice["finish_reason"] == "tool_calls"
    body = api.chat(max_tokens=7).json()
    assert body["choices"][0]["finish_reason"] == "length"
