"""Answers request bodies without HTTP: the same checks, prompts, generations and bytes as those of the routes."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NamedTuple

from cluster.api.answer.events import error_body, to_json
from cluster.api.backend import EngineBackend
from cluster.api.images.fetch import Fetcher
from cluster.api.images.medium import UnreadImages
from cluster.api.messages.envelope import error_object
from cluster.api.messages.routes import MessageDraft, draft_message, prepare_message
from cluster.api.pooling.draft import PoolingDraft, check_pooling
from cluster.api.pooling.factory import prepare_pooling
from cluster.api.pooling.routes import routes_of
from cluster.api.record import Recorder
from cluster.api.request.draft import Draft, Drafter, EngineFacts, load_drafter
from cluster.api.request.generation_factory import GenerationFactory
from cluster.api.request.grammar_check import GrammarChecker
from cluster.api.request.sender import Sender
from cluster.api.responses.draft import References, ResponseDraft, draft_response
from cluster.api.responses.factory import ResponseFactory
from cluster.api.routes.generation import Prepared, with_writer
from cluster.api.routes.other_models import OTHER_ROUTES, of_another_kind
from cluster.api.run import GenerationRun
from cluster.api.settings import ApiSettings
from cluster.api.tokenizer import ServingTokenizer
from cluster.api.work.processes import WorkProcesses
from cluster.errors import BadRequestError, NotFoundError, ServingError
from cluster.metrics.metrics import IngressMetrics
from workers.specs.pooling import PoolingTask

logger = logging.getLogger(__name__)

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
EMBEDDINGS, CLASSIFY, SCORE = "/v1/embeddings", "/classify", "/score"


class Answered(NamedTuple):
    """The body of an answer, as JSON, its output tokens, and the tokens of its prompts."""

    body: bytes
    output_tokens: int
    prompt_tokens: int


class Route(NamedTuple):
    """How a body becomes a draft, and a draft a generation with the writer of its answer; and the bytes of an error."""

    draft: Callable[[Drafter, dict[str, Any], EngineFacts], Any]
    prepare: Callable[[Any, EngineBackend], Awaitable[Prepared]]
    error: Callable[[ServingError], bytes] = error_body


class Dispatcher:
    """Answers bodies by the URL of their route."""

    def __init__(
        self, backend: EngineBackend, tokenizer: ServingTokenizer, settings: ApiSettings
    ) -> None:
        self._backend = backend
        self._recorder = Recorder(IngressMetrics())
        self._drafter = Drafter(tokenizer, settings)
        self._fetcher = None if settings.images is None else Fetcher(settings.images)
        processes = WorkProcesses(partial(load_drafter, tokenizer.source, settings))
        checker = GrammarChecker(processes, settings.grammar_timeout_s)
        if settings.pooling is None:
            self._routes = _routes(GenerationFactory(self._drafter, checker))
        else:
            check_pooling(self._drafter)
            self._routes = _pooling_routes(settings, settings.pooling.task)

    def error_body(self, url: str, error: ServingError) -> bytes:
        """Return the error in the envelope of its route."""
        route = self._routes.get(url)
        return error_body(error) if route is None else route.error(error)

    async def answer(self, url: str, body: dict[str, Any]) -> Answered:
        """Return the answer that HTTP would have. Raises ServingError."""
        route = self._routes.get(url)
        if route is None and url in OTHER_ROUTES:
            raise of_another_kind(url, self._drafter.settings.pooling, self._routes)
        if route is None:
            known = ", ".join(self._routes)
            raise NotFoundError(
                f"no such route: {url[:200]!r}; expected one of {known}", param="url"
            )
        if body.get("stream"):
            raise BadRequestError("stream is not available offline", param="stream")
        try:
            facts = EngineFacts.of(self._backend)
            draft = await self._draft(route, body, facts)
            generation, writer = await route.prepare(draft, self._backend)
            if not any(choice.text.may_end_early for choice in generation.choices):
                generation.routing["whole"] = True
            record = self._recorder.begin(generation, {})
            answer = await GenerationRun(generation, self._backend, record).body(writer)
            return Answered(answer, generation.num_completion_tokens, generation.num_prompt_tokens)
        except ServingError:
            raise
        except Exception as error:
            logger.exception("a request broke")
            raise ServingError(f"internal error: {type(error).__name__}: {error}") from error

    async def _draft(self, route: Route, body: dict[str, Any], facts: EngineFacts) -> Any:
        """Return the draft of a body. Images are decoded in a thread, because there are no streams to keep going."""
        try:
            return await asyncio.to_thread(route.draft, self._drafter, body, facts)
        except UnreadImages as images:
            assert self._fetcher is not None, "the model takes text alone"
            async with self._fetcher.fetched(images.remote) as files:
                drafter = self._drafter.with_images(files)
                return await asyncio.to_thread(route.draft, drafter, body, facts)


def _pooling_routes(settings: ApiSettings, task: PoolingTask) -> dict[str, Route]:
    async def prepare(draft: PoolingDraft, backend: EngineBackend) -> Prepared:
        return prepare_pooling(draft, backend, Sender(), settings)

    return {path: Route(route.draft, prepare) for path, route in routes_of(task).items()}


def _routes(factory: GenerationFactory) -> dict[str, Route]:
    offline = Sender()

    async def generation(draft: Draft, backend: EngineBackend) -> Prepared:
        return with_writer(await factory.generation(draft, backend, offline))

    async def message(draft: MessageDraft, backend: EngineBackend) -> Prepared:
        return await prepare_message(factory, draft, backend, offline)

    responses = ResponseFactory(factory)

    def response_draft(drafter: Drafter, body: dict[str, Any], facts: EngineFacts) -> ResponseDraft:
        draft = draft_response(drafter, body, facts)
        if isinstance(draft, References):
            found = draft_response(drafter, body, facts, *responses.find(draft))
            assert isinstance(found, ResponseDraft), "it has what it refers to"
            return found
        return draft

    async def response(draft: ResponseDraft, backend: EngineBackend) -> Prepared:
        return await responses.prepare(draft, backend, offline)

    return {
        COMPLETIONS: Route(Drafter.completion, generation),
        CHAT: Route(Drafter.chat, generation),
        "/v1/responses": Route(response_draft, response),
        "/v1/messages": Route(
            draft_message, message, lambda error: to_json(error_object(error, ""))
        ),
    }
