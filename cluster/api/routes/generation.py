"""Body, admission, draft, preparation, answer: what all generation routes share. Knows nothing of a body's fields."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Scope

from cluster.api.admission import AdmissionGate, AdmittedResponse, Ticket, TimeLimitError
from cluster.api.answer.detailed_events import make_writer
from cluster.api.answer.generation import Generation
from cluster.api.answer.writer import AnswerWriter
from cluster.api.auth import sender_of
from cluster.api.backend import EngineBackend
from cluster.api.record import Recorder
from cluster.api.request.draft import EngineFacts
from cluster.api.request.sender import Sender
from cluster.api.request.uploads import Uploads
from cluster.api.response import GenerationResponse
from cluster.api.run import Emit, GenerationRun
from cluster.api.settings import ApiSettings

Prepared = tuple[Generation, AnswerWriter]


class DraftedRequest(Protocol):
    """The checked and prepared body of a request."""

    @property
    def num_choices(self) -> int:
        """The number of sequences to generate."""
        ...

    @property
    def num_tokens(self) -> int:
        """The most tokens that all sequences can have, with their prompts."""
        ...

    @property
    def num_image_bytes(self) -> int:
        """Bytes of the pixels of all images."""
        ...


_Draft = TypeVar("_Draft", bound=DraftedRequest)
MakeDraft = Callable[[bytes, EngineFacts, Sender], Awaitable[_Draft]]
Prepare = Callable[[_Draft, EngineBackend, Sender], Awaitable[Prepared]]


class GenerationEndpoint:
    """Answers the generation requests of one ingress."""

    def __init__(
        self,
        backend_provider: Callable[[], EngineBackend],
        settings: ApiSettings,
        recorder: Recorder,
        gate: AdmissionGate,
        uploads: Uploads,
    ) -> None:
        self._backend_provider = backend_provider
        self._settings = settings
        self._uploads = uploads
        self._recorder = recorder
        self._gate = gate

    async def answer(
        self, request: Request, draft: MakeDraft[_Draft], prepare: Prepare[_Draft]
    ) -> Response:
        """Return the answer to a request; `draft` checks its body, `prepare` makes the generation and its writer."""
        return self.respond(await self.admit(request, draft, prepare))

    async def admit(
        self, request: Request, draft: MakeDraft[_Draft], prepare: Prepare[_Draft]
    ) -> "Admitted":
        """Read, admit, draft and prepare a request. The caller must then `respond` or `run`."""
        self._gate.check()  # before all other work, because a refusal must be cheap
        sender = sender_of(request, self._settings)
        async with self._uploads.body(request) as body:
            backend = self._backend_provider()
            self._recorder.metrics.set_model_name(backend.model_name)
            ticket = self._gate.admit(1, sender.key)
            try:
                drafted = await draft(body, EngineFacts.of(backend), sender)
            except BaseException:
                ticket.release()
                raise
        try:
            sizes = drafted.num_choices, drafted.num_tokens, drafted.num_image_bytes
            self._gate.resize(ticket, *sizes)
            generation, writer = await prepare(drafted, backend, sender)
        except BaseException:
            ticket.release()
            raise
        return Admitted(generation, writer, backend, ticket)

    def respond(self, admitted: "Admitted") -> Response:
        """Return the answer to an admitted request."""
        writer, ticket = admitted.writer, admitted.ticket
        response = GenerationResponse(admitted.generation, writer, admitted.backend, self._recorder)
        return AdmittedResponse(
            response, writer, self._gate, ticket, self._settings.request_timeout_s
        )

    async def run(self, admitted: "Admitted", scope: Scope, emit: Emit) -> None:
        """Run an admitted request without its connection, within its time limit. Raises the error that ends it."""
        record = self._recorder.begin(admitted.generation, scope)
        failure: Exception | None = None
        try:
            async with self._gate.time_limit(admitted.ticket, self._settings.request_timeout_s):
                await GenerationRun(admitted.generation, admitted.backend, record).stream(emit)
        except TimeLimitError as error:
            failure = error.reason
            raise error.reason from None
        except Exception as error:
            failure = error
            raise
        finally:
            record.end(failure)
            admitted.ticket.release()


@dataclass(frozen=True)
class Admitted:
    """A request with a place in the gate, ready to run."""

    generation: Generation
    writer: AnswerWriter
    backend: EngineBackend
    ticket: Ticket


def with_writer(generation: Generation) -> Prepared:
    """Return a completion or a chat completion with its writer."""
    return generation, make_writer(generation)
