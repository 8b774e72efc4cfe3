"""A small OpenAI server for the bench's tests: it can frame oddly, refuse, break off and fail."""

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

STEP_S = 0.01


def chat_chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}


def text_chunk(text: str, finish: str | None = None) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": None}


@dataclass
class FakeServer:
    """Answers `max_tokens` tokens, two a chunk, a chunk each STEP_S. The options make it odd."""

    takes_ids: bool = True
    takes_ignore_eos: bool = True
    sends_usage: bool = True
    crlf: bool = False
    one_byte_writes: bool = False
    length_framing: bool = False
    status: Callable[[int], int] = lambda index: 200
    break_off: bool = False
    error_event: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    connections: int = 0
    open_now: int = 0
    most_open: int = 0
    headers: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError):
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
            await self._plain(writer, 200, {"data": [{"id": "fake"}]})
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
        await self._stream(body, writer)
        self.open_now -= 1

    async def _plain(self, writer: asyncio.StreamWriter, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data))
        await writer.drain()

    async def _stream(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        framing = b"" if self.length_framing else b"Transfer-Encoding: chunked\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\n" + framing + b"\r\n")
        chat = "messages" in body
        if chat:
            await self._event(writer, chat_chunk({"role": "assistant", "content": ""}))
        for start in range(0, body["max_tokens"], 2):
            await asyncio.sleep(STEP_S)
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
            usage = {"prompt_tokens": num_prompt, "completion_tokens": body["max_tokens"]}
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
