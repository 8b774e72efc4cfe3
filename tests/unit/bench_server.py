"""A small OpenAI server for the bench's tests: it can frame oddly, refuse, break off and fail."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

STEP_S = 0.01

Event = dict[str, Any]
Drafts = tuple[int, int] | None  # accepted and rejected


@dataclass(frozen=True)
class Form:
    """The events of one endpoint: begin(prompt tokens), text(text), end(prompt, output, cached tokens, drafts)."""

    begin: Callable[[int], list[Event]]
    text: Callable[[str], Event]
    end: Callable[[int, int, int | None, Drafts], list[Event]]


def chat_chunk(delta: dict[str, Any], finish: str | None = None) -> Event:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def text_chunk(text: str, finish: str | None = None) -> Event:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": None}


def usage_chunk(num_prompt: int, num_output: int, cached: int | None, drafts: Drafts) -> Event:
    usage: dict[str, Any] = {"prompt_tokens": num_prompt, "completion_tokens": num_output}
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    if drafts is not None:
        names = "accepted_prediction_tokens", "rejected_prediction_tokens"
        usage["completion_tokens_details"] = dict(zip(names, drafts, strict=True))
    return {"choices": [], "usage": usage}


def completed(num_prompt: int, num_output: int, cached: int | None, _drafts: Drafts) -> Event:
    details = {"cached_tokens": cached or 0}
    usage = {"input_tokens": num_prompt, "output_tokens": num_output}
    response = {"usage": usage | {"input_tokens_details": details}}
    return {"type": "response.completed", "response": response}


def message_delta(num_prompt: int, num_output: int, cached: int | None, _drafts: Drafts) -> Event:
    usage = {"input_tokens": num_prompt - (cached or 0), "output_tokens": num_output}
    return {"type": "message_delta", "usage": usage | {"cache_read_input_tokens": cached or 0}}


_FORMS = {
    "/v1/completions": Form(
        lambda _: [], text_chunk, lambda *counts: [text_chunk("", "length"), usage_chunk(*counts)]
    ),
    "/v1/chat/completions": Form(
        lambda _: [chat_chunk({"role": "assistant", "content": ""})],
        lambda text: chat_chunk({"content": text}),
        lambda *counts: [chat_chunk({}, "length"), usage_chunk(*counts)],
    ),
    "/v1/responses": Form(
        lambda _: [{"type": "response.created", "response": {"usage": None}}],
        lambda text: {"type": "response.output_text.delta", "delta": text},
        lambda *counts: [{"type": "response.output_text.done"}, completed(*counts)],
    ),
    "/v1/messages": Form(
        lambda number: [
            {"type": "message_start", "message": {"usage": {"input_tokens": number}}},
            {"type": "content_block_start", "index": 0},
        ],
        lambda text: {"type": "content_block_delta", "delta": {"type": "text_delta", "text": text}},
        lambda *counts: [{"type": "content_block_stop"}, message_delta(*counts)],
    ),
}


@dataclass
class Stamps:
    """When one request came and its chunks with output were written."""

    received: float
    writes: list[float] = field(default_factory=list)
    done: float = 0.0


@dataclass
class FakeServer:
    """Answers `max_tokens` tokens, two a chunk, a chunk each STEP_S. The options make it odd.

    `serial`: one request at a time, the others wait.
    """

    first_s: float = STEP_S
    step_s: float = STEP_S
    tokens_per_chunk: int = 2
    serial: bool = False
    cached_tokens: int | None = None
    drafts: Drafts = None
    clock: Callable[[], float] = time.perf_counter
    stamps: list[Stamps] = field(default_factory=list)
    takes_ids: bool = True
    takes_ignore_eos: bool = True
    sends_usage: bool = True
    crlf: bool = False
    one_byte_writes: bool = False
    length_framing: bool = False
    status: Callable[[int], int] = lambda index: 200
    models_status: int = 200
    break_off: bool = False
    error_event: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    connections: int = 0
    open_now: int = 0
    most_open: int = 0
    headers: str = ""

    def __post_init__(self) -> None:
        self._turn = asyncio.Lock()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                self.headers = head.lower()
                length = int(self.headers.partition("content-length:")[2].split("\r\n")[0])
                body = json.loads(await reader.readexactly(length) or b"{}")
                await self._answer(head.split(" ", 2)[1], body, writer)
                if self.length_framing:
                    break
        writer.close()

    async def _answer(self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            await self._plain(writer, self.models_status, {"data": [{"id": "fake"}]})
            return
        index = len(self.bodies)
        self.bodies.append(body)
        prompt = body.get("prompt", "")
        refused = (not self.takes_ids and isinstance(prompt, list)) or (
            not self.takes_ignore_eos and "ignore_eos" in body
        )
        status = 422 if refused else self.status(index)
        if status != 200:
            await self._plain(writer, status, {"detail": "this server says no"})
            return
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        stamps = Stamps(self.clock())
        self.stamps.append(stamps)
        async with self._turn if self.serial else nullcontext():
            await self._stream(path, body, writer, stamps)
        stamps.done = self.clock()
        self.open_now -= 1

    async def _plain(self, writer: asyncio.StreamWriter, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data))
        await writer.drain()

    async def _stream(
        self, path: str, body: dict[str, Any], writer: asyncio.StreamWriter, stamps: Stamps
    ) -> None:
        framing = b"" if self.length_framing else b"Transfer-Encoding: chunked\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n")
        form = _FORMS[path]
        prompt = body.get("prompt", body.get("input"))
        prompt = body["messages"][0]["content"] if prompt is None else prompt
        num_tokens = body.get("max_tokens", body.get("max_output_tokens"))
        await self._events(writer, form.begin(len(prompt) + 10))
        for start in range(0, num_tokens, self.tokens_per_chunk):
            await asyncio.sleep(self.step_s if start else self.first_s)
            stamps.writes.append(self.clock())
            await self._events(writer, [form.text('a "completion_tokens": \n\ndata: {')])
            if start == 2 and self.error_event:
                await self._events(writer, [{"error": {"type": "server_error", "message": "no"}}])
            if start == 2 and self.break_off:
                writer.transport.abort()
                return
        num_prompt = len(prompt) + 10 if path != "/v1/completions" else len(prompt)
        last = form.end(num_prompt, num_tokens, self.cached_tokens, self.drafts)
        await self._events(writer, last if self.sends_usage else last[:1])
        await self._write(writer, self._framed(b"data: [DONE]\n\n"))
        if not self.length_framing:
            await self._write(writer, b"0\r\n\r\n")

    async def _events(
        self, writer: asyncio.StreamWriter, contents: Iterable[dict[str, Any]]
    ) -> None:
        for content in contents:
            name = f"event: {content['type']}\n" if "type" in content else ""
            data = f"{name}data: {json.dumps(content)}\n\n".encode()
            await self._write(writer, self._framed(data))

    def _framed(self, data: bytes) -> bytes:
        if self.crlf:
            data = data.replace(b"\n", b"\r\n")
        return data if self.length_framing else b"%x\r\n%s\r\n" % (len(data), data)

    async def _write(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        size = 1 if self.one_byte_writes else len(data)
        for start in range(0, len(data), size):
            writer.write(data[start : start + size])
            await writer.drain()
            if self.one_byte_writes and start % 8 == 0:
                await asyncio.sleep(0)


@contextmanager
def serving(*fakes: FakeServer) -> Iterator[list[str]]:
    """Their URLs, while they serve in a thread of their own."""
    loop = asyncio.new_event_loop()

    async def start(fake: FakeServer) -> str:
        server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield [asyncio.run_coroutine_threadsafe(start(fake), loop).result(10) for fake in fakes]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
