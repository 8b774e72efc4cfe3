"""Answers request bodies without HTTP: the same checks, prompts, generations and bytes as those of the routes."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from cluster.api.answer.events import error_body, to_json
from cluster.api.backend import EngineBackend
from cluster.api.messages.envelope import error_object
from cluster.api.messages.routes import MessageRequest, parse_message, prepare_message
from cluster.api.record import Recorder
from cluster.api.request.generation_factory import GenerationFactory
from cluster.api.request.protocol import (
    ChatRequest,
    CompletionRequest,
    parse_chat,
    parse_completion,
)
from cluster.api.responses.factory import ResponseFactory
from cluster.api.responses.protocol import ResponsesRequest, parse_responses
from cluster.api.routes.generation import Prepared, with_writer
from cluster.api.run import GenerationRun
from cluster.api.settings import ApiSettings
from cluster.api.tokenizer import ServingTokenizer
from cluster.errors import BadRequestError, NotFoundError, ServingError
from cluster.metrics.metrics import IngressMetrics

logger = logging.getLogger(__name__)

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


class Answered(NamedTuple):
    """The body of an answer, as JSON, and its output tokens."""

    body: bytes
    output_tokens: int


class Route(NamedTuple):
    """How a body is checked, how its generation and the writer of its answer are made, and the bytes of an error."""

    parse: Callable[[dict[str, Any]], Any]
    prepare: Callable[[Any, EngineBackend], Awaitable[Prepared]]
    error: Callable[[ServingError], bytes] = error_body


class Dispatcher:
    """Answers bodies by the URL of their route."""

    def __init__(
        self, backend: EngineBackend, tokenizer: ServingTokenizer, settings: ApiSettings
    ) -> None:
        self._backend = backend
        self._recorder = Recorder(IngressMetrics())
        self._routes = _routes(GenerationFactory(tokenizer, settings))

    def error_body(self, url: str, error: ServingError) -> bytes:
        """Return the error in the envelope of its route."""
        route = self._routes.get(url)
        return error_body(error) if route is None else route.error(error)

    async def answer(self, url: str, body: dict[str, Any]) -> Answered:
        """Return the answer that HTTP would have. Raises ServingError."""
        route = self._routes.get(url)
        if route is None:
            known = ", ".join(self._routes)
            raise NotFoundError(
                f"no such route: {url[:200]!r}; expected one of {known}", param="url"
            )
        if body.get("stream"):
            raise BadRequestError("stream is not available offline", param="stream")
        try:
            parsed = route.parse(body)
            generation, writer = await route.prepare(parsed, self._backend)
            if not any(choice.text.may_end_early for choice in generation.choices):
                generation.routing["whole"] = True
            record = self._recorder.begin(generation, {})
            answer = await GenerationRun(generation, self._backend, record).body(writer)
            return Answered(answer, generation.num_completion_tokens)
        except ServingError:
            raise
        except Exception as error:
            logger.exception("a request broke")
            raise ServingError(f"internal error: {type(error).__name__}: {error}") from error


def _routes(factory: GenerationFactory) -> dict[str, Route]:
    async def completion(parsed: CompletionRequest, backend: EngineBackend) -> Prepared:
        return with_writer(await factory.completion(parsed, backend, {}))

    async def chat(parsed: ChatRequest, backend: EngineBackend) -> Prepared:
        return with_writer(await factory.chat(parsed, backend, {}))

    async def message(parsed: MessageRequest, backend: EngineBackend) -> Prepared:
        return await prepare_message(factory, parsed, backend, {}, "")

    responses = ResponseFactory(factory)

    async def response(parsed: ResponsesRequest, backend: EngineBackend) -> Prepared:
        return await responses.prepare(parsed, backend, {})

    return {
        COMPLETIONS: Route(parse_completion, completion),
        CHAT: Route(parse_chat, chat),
        "/v1/responses": Route(parse_responses, response),
        "/v1/messages": Route(
            parse_message, message, lambda error: to_json(error_object(error, ""))
        ),
    }
