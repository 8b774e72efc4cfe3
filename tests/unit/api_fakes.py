"""A scripted engine and short ways to call the API in a test, without sockets."""

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from functools import cache
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

from cluster.api.admission import AdmissionGate, KeyLimits
from cluster.api.app import create_app
from cluster.api.settings import ApiSettings
from cluster.api.tokenizer import ServingTokenizer, load_tokenizer
from cluster.config.phalanx_config import Role
from cluster.errors import BadRequestError, NotFoundError
from cluster.metrics.snapshot import Snapshot
from cluster.supervisor.status import GroupStatus
from tests.checkpoints.writer import make_checkpoint
from workers.specs.expert_layout import ExpertLayout
from workers.wire.request import RequestOutput, SamplingParams, TokenLogprobs

MODEL = "tiny/model"
IM_END = 258
Script = Callable[[list[int], SamplingParams], Iterable[list[int]]]


# Kept to the end, because processes of large bodies load the tokenizer from there.
_FOLDER = TemporaryDirectory()


@cache
def tiny_tokenizer() -> ServingTokenizer:
    """Id b < 256 is byte b; 256 to 258 are special; the model has 300 ids."""
    return load_tokenizer(tiny_checkpoint(Path(_FOLDER.name) / "tiny"))


def tiny_checkpoint(folder: Path) -> Path:
    return make_checkpoint(
        folder,
        num_layers=1,
        hidden_size=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=4,
        num_heads=1,
        num_kv_heads=1,
        head_dim=4,
        vocab_size=300,
    )


def repeats(text: str) -> Script:
    """A script that generates these bytes over and over, a token a step."""
    return lambda _prompt, _params: ([byte] for byte in cycle(text.encode()))


def says(text: str | bytes, *, size: int = 1, end: list[int] | None = None) -> Script:
    """A script that generates these bytes, `size` tokens a step, then the `end` tokens."""
    data = text.encode() if isinstance(text, str) else text
    tokens = [*data, *(end or [])]
    return lambda _prompt, _params: [tokens[i : i + size] for i in range(0, len(tokens), size)]


def token_logprobs(token_id: int, number: int) -> TokenLogprobs:
    """Of a model that finds each token second, behind its neighbour and before others, the last impossible."""
    top = [token_id ^ 1, token_id, *range(290, 290 + max(number - 3, 0)), 7][:number]
    logprobs = [-0.5, -1.0, *(-2.0 - i for i in range(number))][:number]
    if number > 2:
        logprobs[-1] = -math.inf
    return TokenLogprobs(-1.0, 2, top, logprobs)


def prompt_logprobs(token_ids: list[int], number: int | None) -> list[TokenLogprobs | None] | None:
    if number is None:
        return None
    return [None, *(token_logprobs(token_id, number) for token_id in token_ids[1:])]


class FakeBackend:
    """Plays a script per request, ending at max_tokens and stop tokens as a rank does."""

    model_name = MODEL

    def __init__(self, script: Script | str = "hello world, how are you", **limits: int) -> None:
        self.script = repeats(script) if isinstance(script, str) else script
        self.max_model_len = limits.get("max_model_len", 1000)
        self.max_request_tokens = limits.get("max_request_tokens", 2000)
        self.num_ranks = limits.get("num_ranks", 1)
        self.num_cached_tokens = limits.get("num_cached_tokens", 0)
        self.requests: dict[str, tuple[list[int], SamplingParams]] = {}
        self.options: dict[str, dict[str, Any]] = {}  # priority, cache_salt, rank
        self.aborted: list[str] = []
        self.open: set[str] = set()
        self.hanging: set[str] = set()  # requests with all tokens that `hang_after` allows
        self.ready = (True, "")
        self.operations: list[tuple[str, Any]] = []
        self.adapters: dict[str, str] = {}
        self.stats: list[dict[str, Any]] = []
        self.layouts: list[ExpertLayout] = []
        self.group_states: list[dict[str, Any]] = [GroupStatus(state="serving").to_json()]
        self.token_times: dict[int, float] = {}
        self.fail_before: Exception | None = None
        self.fail_after: tuple[int, Exception] | None = None
        self.error_output: str | None = None
        self.error_step = 0  # the output that is `error_output`
        self.hang_after: int | None = None

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        **options: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        assert request_id not in self.requests, "request ids must be unique"
        self.requests[request_id] = (prompt_token_ids, params)
        self.options[request_id] = options
        if self.fail_before:
            raise self.fail_before
        self.open.add(request_id)
        finished = False
        try:
            sent = 0
            for step, tokens in enumerate(self.script(prompt_token_ids, params)):
                await asyncio.sleep(0)
                if self.hang_after is not None and step >= self.hang_after:
                    self.hanging.add(request_id)
                    await asyncio.Event().wait()
                if self.fail_after and step >= self.fail_after[0]:
                    raise self.fail_after[1]
                if self.error_output and step == self.error_step:
                    finished = True
                    yield RequestOutput(request_id, [], "error", self.error_output)
                    return
                tokens = tokens[: params.max_tokens - sent]
                stops = [i for i, token in enumerate(tokens) if token in params.stop_token_ids]
                if stops:
                    tokens = tokens[: stops[0] + 1]
                sent += len(tokens)
                reason = "stop" if stops else "length" if sent == params.max_tokens else None
                finished = reason is not None
                yield RequestOutput(
                    request_id,
                    tokens,
                    reason,
                    logprobs=[token_logprobs(i, params.logprobs) for i in tokens]
                    if params.logprobs is not None
                    else None,
                    prompt_logprobs=prompt_logprobs(prompt_token_ids, params.prompt_logprobs)
                    if not step
                    else None,
                    num_cached_tokens=self.num_cached_tokens if not step else 0,
                )
                if finished:
                    return
        finally:
            self.open.discard(request_id)
            self.hanging.discard(request_id)
            if not finished:
                self.aborted.append(request_id)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def health(self) -> tuple[bool, str]:
        return self.ready

    def token_ages(self) -> dict[int, float]:
        now = time.monotonic()
        ranks = range(self.num_ranks)
        return {rank: now - self.token_times.get(rank, -math.inf) for rank in ranks}

    async def groups(self) -> list[dict[str, Any]]:
        return self.group_states

    async def drain(self, timeout_s: float | None, group: str | None = None) -> None:
        self.operations.append(("drain", timeout_s, *filter(None, [group])))

    async def scale(self, num_ranks: int, group: str | None = None) -> None:
        self.operations.append(("scale", num_ranks, *filter(None, [group])))
        if num_ranks > 8:
            raise BadRequestError("no free CPU")

    async def restart(self, settings: list[str], group: str | None = None) -> None:
        self.operations.append(("restart", settings, *filter(None, [group])))

    async def switch_role(self, role: Role, group: str | None = None) -> None:
        self.operations.append(("role", role, *filter(None, [group])))

    async def load_adapter(self, name: str, path: str) -> None:
        if name in self.adapters:
            raise BadRequestError(f"the name {name!r} is in use")
        self.adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        if self.adapters.pop(name, None) is None:
            raise NotFoundError(f"there is no adapter {name!r}")

    async def rank_stats(self) -> list[dict[str, Any]]:
        return self.stats

    async def expert_layouts(self) -> list[ExpertLayout]:
        return self.layouts

    async def ingress_metrics(self, own: Snapshot) -> Snapshot:
        return own


class Api:
    """The application over one fake backend; each call runs its own event loop."""

    def __init__(
        self,
        backend: FakeBackend | None = None,
        tokenizer: ServingTokenizer | None = None,
        limits: KeyLimits | None = None,
        **settings: Any,
    ) -> None:
        self.backend = backend or FakeBackend()
        tokenizer = tokenizer or tiny_tokenizer()
        settings = {"stats_fresh_s": 0.0, **settings}
        gate = None if limits is None else AdmissionGate(limits=limits)
        self.app = create_app(lambda: self.backend, tokenizer, ApiSettings(**settings), gate)

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://test", timeout=20)

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            async with self.client() as client:
                return await client.request(method, path, **kwargs)

        return asyncio.run(call())

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.request("GET", path, **kwargs)

    def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def chat(self, content: Any = "hi", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return self.post("/v1/chat/completions", body)

    def post(self, path: str, body: Any) -> httpx.Response:
        """As JSON; lone surrogates go out as escapes, which httpx cannot do."""
        return self.body(json.dumps(body).encode(), path)

    def body(self, body: bytes, path: str = "/v1/completions") -> httpx.Response:
        return self.request(
            "POST", path, content=body, headers={"content-type": "application/json"}
        )


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The items of a stream; checks the framing and the closing [DONE]."""
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = response.content.split(b"\n\n")
    assert parts[-2:] == [b"data: [DONE]", b""]
    assert all(part.startswith(b"data: ") for part in parts[:-1])
    return [json.loads(part[len(b"data: ") :]) for part in parts[:-2]]


def usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: int = 0, reasoning_tokens: int = 0
) -> dict[str, Any]:
    """The usage object of an answer."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def assert_error(response: httpx.Response, status: int, code: str | None = None) -> dict[str, Any]:
    """The envelope, complete, on /ready beside the states of the groups; returns the inner object."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) - {"status", "groups"} == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    if code is not None:
        assert error["code"] == code, error
    return error


@pytest.fixture(scope="module")
def shared_api() -> Api:
    """One for a module, because its process of large bodies takes a second to start."""
    return Api()
