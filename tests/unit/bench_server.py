"""A small OpenAI server for the bench's tests: it can frame oddly, refuse, break off and fail."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

STEP_S = 0.01


def chat_chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def text_chunk(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": None}


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
            await self._stream(body, writer, stamps)
        stamps.done = self.clock()
        self.open_now -= 1

    async def _plain(self, writer: asyncio.StreamWriter, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data))
        await writer.drain()

    async def _stream(
        self, body: dict[str, Any], writer: asyncio.StreamWriter, stamps: Stamps
    ) -> None:
        framing = b"" if self.length_framing else b"Transfer-Encoding: chunked\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n")
        chat = "messages" in body
        if chat:
            await self._event(writer, chat_chunk({"role": "assistant", "content": ""}))
        for start in range(0, body["max_tokens"], self.tokens_per_chunk):
            await asyncio.sleep(self.step_s if start else self.first_s)
            stamps.writes.append(self.clock())
            text = 'a "completion_tokens": \n\ndata: {'
            await self._event(writer, chat_chunk({"content": text}) if chat else text_chunk(text))
            if start == 2 and self.error_event:
                await self._event(writer, {"error": {"type": "server_error", "message": "no"}})
            if start == 2 and self.break_off:
                writer.transport.abort()
                return
        await self._event(writer, chat_chunk({}, "length") if chat else text_chunk("", "length"))
        if self.sends_usage:
            prompt = body["messages"][0]["content"] if chat else body["prompt"]
            num_prompt = len(prompt) + 10 if chat else len(prompt)
            usage: dict[str, Any] = {"prompt_tokens": num_prompt}
            usage["completion_tokens"] = body["max_tokens"]
            if self.cached_tokens is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": self.cached_tokens}
            await self._event(writer, {"choices": [], "usage": usage})
        await self._write(writer, self._framed(b"data: [DONE]\n\n"))
        if not self.length_framing:
            await self._write(writer, b"0\r\n\r\n")

    async def _event(self, writer: asyncio.StreamWriter, content: dict[str, Any]) -> None:
        await self._write(writer, self._framed(b"data: " + json.dumps(content).encode() + b"\n\n"))

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
