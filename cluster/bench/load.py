"""Closed-loop load: so many requests always in flight, each a streamed answer of a fixed length.

Knows OpenAI's request bodies, and finds out what a server takes (token ids, ignore_eos) before it
measures. Knows nothing of tables or files.
"""

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from cluster.bench.http import Connection, Endpoint, HttpError, Response
from cluster.bench.metrics import RoundResult, summarise
from cluster.bench.prompts import Prompt, TextLength, prompt_source, random_ids, random_text
from cluster.bench.stream import Answer, EventReader

PROBE_LETTERS = (60, 240)


class BenchError(ValueError):
    """The load cannot be run as asked; the message says what the server answered."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """What every server gets. Lengths in tokens."""

    endpoint: Literal["chat", "completions"]
    requests: int
    concurrency: int
    input_len: int
    output_len: int
    warmup: int
    rounds: int
    seed: int
    temperature: float
    ignore_eos: bool
    prompts: Literal["auto", "ids", "text"]
    vocab_size: int
    timeout_s: float

    @property
    def path(self) -> str:
        """Of the endpoint."""
        return "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"


@dataclass(frozen=True, kw_only=True)
class Target:
    """One server, and what it takes. `text_length` is None where prompts are token ids."""

    name: str
    url: str
    model: str
    ignore_eos: bool
    text_length: TextLength | None = None


class Driver:
    """Sends one load to any number of servers. `headers` go with every request."""

    def __init__(self, load: Load, headers: dict[str, str]):
        self._load = load
        self._headers = headers

    async def prepare(self, urls: dict[str, str], model: str | None) -> list[Target]:
        """Ask each server (name to URL) for its model and for what it takes.

        All get prompts of the same form: text as soon as one of them refuses token ids.
        """
        text = TextLength(0.0, 1.0)
        forms: dict[str, tuple[TextLength | None, ...]] = {
            "auto": (None, text),
            "ids": (None,),
            "text": (text,),
        }
        wanted = "text" if self._load.endpoint == "chat" else self._load.prompts
        targets = [await self._negotiate(*item, model, forms[wanted]) for item in urls.items()]
        if wanted == "auto" and any(target.text_length for target in targets):
            targets = [await self._negotiate(*item, model, forms["text"]) for item in urls.items()]
        return targets

    async def run_round(self, target: Target, index: int, requests: int) -> RoundResult:
        """One round of `requests` requests; the bodies are made before the clock starts."""
        bodies = [self._body(target, self._prompt(target, index, i)) for i in range(requests)]
        queue = iter(bodies)
        answers: list[Answer] = []
        cpu = time.process_time()
        num_workers = min(self._load.concurrency, requests)
        await asyncio.gather(*(self._work(target, queue, answers) for _ in range(num_workers)))
        return summarise(answers, time.process_time() - cpu)

    async def _work(self, target: Target, bodies: Iterator[bytes], answers: list[Answer]) -> None:
        connection = Connection(Endpoint.parse(target.url), self._headers)
        for body in bodies:
            answer = Answer(time.perf_counter())
            answers.append(answer)
            try:
                response = await self._stream(connection, body, answer)
                if response.status != 200:
                    answer.error = f"HTTP {response.status}"
            except HttpError as error:
                answer.error = str(error)
            except TimeoutError:
                answer.error = "timeout"
            answer.ended = time.perf_counter()
            if answer.error is None and not answer.chunk_times:
                answer.error = "no output"
        connection.close()

    async def _stream(self, connection: Connection, body: bytes, answer: Answer) -> Response:
        sink = EventReader(answer).feed
        return await connection.request(
            "POST", self._load.path, body, timeout_s=self._load.timeout_s, sink=sink
        )

    def _prompt(self, target: Target, round_index: int, index: int) -> Prompt:
        source = prompt_source(self._load.seed, round_index, index)
        if target.text_length is None:
            return random_ids(self._load.input_len, self._load.vocab_size, source)
        return random_text(target.text_length.letters_for(self._load.input_len), source)

    def _body(self, target: Target, prompt: Prompt, max_tokens: int | None = None) -> bytes:
        body: dict[str, Any] = {
            "model": target.model,
            "max_tokens": max_tokens or self._load.output_len,
            "temperature": self._load.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._load.endpoint == "chat":
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if target.ignore_eos:
            body["ignore_eos"] = True
        return json.dumps(body).encode()

    async def _negotiate(
        self, name: str, url: str, model: str | None, forms: tuple[TextLength | None, ...]
    ) -> Target:
        """Find the richest request that the server takes; None among `forms` is token ids."""
        connection = Connection(Endpoint.parse(url), self._headers)
        if model is None:
            model = await self._first_model(connection, name)
        source = prompt_source(self._load.seed, -1, 0)
        refusal = ""
        for text_length in forms:
            for ignore_eos in (True, False) if self._load.ignore_eos else (False,):
                target = Target(
                    name=name, url=url, model=model, ignore_eos=ignore_eos, text_length=text_length
                )
                prompt: Prompt = random_text(PROBE_LETTERS[0], source)
                if text_length is None:
                    prompt = random_ids(8, self._load.vocab_size, source)
                answer, refusal = await self._probe(connection, target, prompt)
                if answer is not None:
                    if text_length is not None:
                        target = await self._fit_text(connection, target)
                    connection.close()
                    return target
        raise BenchError(f"{name} ({url}) refuses {self._load.path}: {refusal}")

    async def _first_model(self, connection: Connection, name: str) -> str:
        response = await self._ask(connection, name, "GET", "/v1/models", b"")
        try:
            return json.loads(response.body)["data"][0]["id"]
        except (ValueError, LookupError, TypeError):
            raise BenchError(
                f"{name}: /v1/models answered HTTP {response.status} without a model; give --model"
            ) from None

    async def _ask(
        self, connection: Connection, name: str, method: str, path: str, body: bytes
    ) -> Response:
        try:
            return await connection.request(method, path, body, timeout_s=self._load.timeout_s)
        except TimeoutError:
            raise BenchError(f"{name}: no answer within {self._load.timeout_s:g} s") from None
        except HttpError as error:
            raise BenchError(f"{name}: {error}") from error

    async def _probe(
        self, connection: Connection, target: Target, prompt: Prompt
    ) -> tuple[Answer | None, str]:
        """Two tokens of an answer, or why the server refuses this form of request."""
        body = self._body(target, prompt, max_tokens=2)
        response = await self._ask(connection, target.name, "POST", self._load.path, body)
        answer = Answer(0.0)
        EventReader(answer).feed(response.body, 0.0)
        if response.status == 200 and answer.error is None:
            return answer, ""
        reason = answer.error or response.body.decode(errors="replace").strip()[:300]
        if response.status not in (200, 400, 422):
            raise BenchError(f"{target.name}: HTTP {response.status}: {reason}")
        return None, f"HTTP {response.status}: {reason}"

    async def _fit_text(self, connection: Connection, target: Target) -> Target:
        """Measure how many tokens the server makes of a text, by its usage."""
        samples = []
        for letters in PROBE_LETTERS:
            prompt = random_text(letters, prompt_source(self._load.seed, -2, letters))
            answer, refusal = await self._probe(connection, target, prompt)
            if answer is None:
                raise BenchError(f"{target.name}: {refusal}")
            if answer.prompt_tokens is None:
                return replace(target, text_length=TextLength(0.0, 0.25))
            samples.append((letters, answer.prompt_tokens))
        return replace(target, text_length=TextLength.fit(samples))
