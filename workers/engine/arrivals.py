"""From the inbox of an engine to its scheduler: accepts requests, compiles grammars, runs requests on trial alone.

A request is fresh until its first token in this epoch. The ingress gets an output without tokens when the rank begins a
fresh request: a failure of the rank may be due to requests that were begun. A request on trial is accepted when no
other request is fresh, and no other request is accepted while it is fresh: a failure in this time is due to the
request on trial, or to no request. Requests keep their order. Knows nothing of steps.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future

from workers.engine.messages import (
    Abort,
    AbortIngress,
    CompiledRequest,
    ImagesReady,
    Message,
    Refusal,
)
from workers.engine.open_requests import OpenRequests
from workers.sampling.grammar_compiler import Compiled, GrammarCompiler
from workers.scheduler.scheduler import Scheduler
from workers.stats.request_times import RequestTimer
from workers.step.sequence import Sequence
from workers.wire.request import EngineRequest, RequestOutput

BEGIN_S = 0.02
"""Time for the notice of a request on trial to leave a process that the request may end at once."""


class Arrivals:
    """All methods belong to the thread of the step loop.

    publish(ingress_id, outputs)   sends outputs now
    answer(ingress_id, output)     sends an output with those of the step
    enqueue(message)               puts a message into the inbox, from any thread
    fresh                          ids of the accepted requests without a token
    """

    def __init__(
        self,
        scheduler: Scheduler,
        timer: RequestTimer,
        grammars: GrammarCompiler | None,
        *,
        publish: Callable[[str, list[RequestOutput]], None],
        answer: Callable[[str, RequestOutput], None],
        enqueue: Callable[[Message], None],
    ):
        self.open_requests = OpenRequests()
        self.fresh: set[str] = set()
        self._scheduler = scheduler
        self._timer = timer
        self._grammars = grammars
        self._publish, self._answer, self._enqueue = publish, answer, enqueue
        if scheduler.images is not None:
            scheduler.images.notify = lambda request_id: enqueue(ImagesReady(request_id))
        self._held: deque[EngineRequest] = deque()
        self._compiling: dict[str, Future[None]] = {}  # by the id of the request
        self._on_trial = ""  # the last request on trial; its trial lasts while it is fresh

    def take(self, inbox: deque[Message]) -> None:
        """Handle all messages of `inbox`, and accept requests."""
        while inbox:
            message = inbox.popleft()
            if isinstance(message, EngineRequest):
                self._held.append(message)
            elif isinstance(message, CompiledRequest):
                self._add(message.request, message.grammar)
            elif isinstance(message, ImagesReady):
                self._queue(message.request_id)
            elif isinstance(message, Refusal):
                self._refuse(message.request_id, message.ingress_id, message.error)
            elif isinstance(message, Abort):
                self._abort(message.request_id)
            else:
                self._abort_ingress(message)
        while self.may_accept:
            self._accept(self._held.popleft())

    @property
    def may_accept(self) -> bool:
        """Whether the next request need not wait for others any more."""
        if not self._held or self._on_trial in self.fresh:
            return False
        return not (self._held[0].on_trial and self.fresh)

    def begin(self, admitted: Iterable[Sequence]) -> None:
        """Send the ingresses notices of the fresh requests that the next step begins."""
        begun: defaultdict[str, list[RequestOutput]] = defaultdict(list)
        for seq in admitted:
            name = seq.request.request_id
            if name in self.fresh and name != self._on_trial:
                begun[seq.request.ingress_id].append(RequestOutput(name, []))
        for ingress_id, outputs in begun.items():
            self._publish(ingress_id, outputs)

    def served(self, seqs: Iterable[Sequence]) -> None:
        """Note that these sequences have outputs."""
        self.fresh.difference_update(seq.request.request_id for seq in seqs)

    def _accept(self, request: EngineRequest) -> None:
        """Accept a request. Its grammar, unless compiled before, is compiled meanwhile."""
        if request.request_id in self.open_requests:
            error = f"request id {request.request_id} is in use on this rank"
            self._refuse(request.request_id, request.ingress_id, error)
            return
        self.open_requests.add(request)
        self.fresh.add(request.request_id)
        if request.on_trial:
            self._on_trial = request.request_id
            self._publish(request.ingress_id, [RequestOutput(request.request_id, [])])
            time.sleep(BEGIN_S)
        text = request.params.grammar
        if text is None:
            self._add(request, None)
        elif self._grammars is None:
            self._add(request, "this rank has no grammar compiler")
        elif (grammar := self._grammars.ready(text)) is not None:
            self._add(request, grammar)
        else:
            if not request.on_trial:
                self._publish(request.ingress_id, [RequestOutput(request.request_id, [])])
            self._compiling[request.request_id] = self._grammars.compile(
                text, lambda compiled: self._enqueue(CompiledRequest(request, compiled))
            )

    def _add(self, request: EngineRequest, grammar: Compiled | None) -> None:
        """Schedule an accepted request, unless it was aborted while its grammar was compiled."""
        self._compiling.pop(request.request_id, None)
        if not self.open_requests.is_open(request):
            return
        if request.images and not request.on_trial:  # the vision tower begins before the first step
            self._publish(request.ingress_id, [RequestOutput(request.request_id, [])])
        error = grammar if isinstance(grammar, str) else self._scheduler.add(request, grammar)
        if error is not None:
            self._end(request.request_id, error)

    def _queue(self, request_id: str) -> None:
        """Schedule a request with embeddings that have come, or end it if they never will."""
        error = self._scheduler.images_ready(request_id)
        if error is not None:
            self._end(request_id, error)

    def _end(self, request_id: str, error: str) -> None:
        """Answer an open request that the scheduler does not have with an error."""
        ingress_id = self.open_requests.remove(request_id)
        self.fresh.discard(request_id)
        self._timer.forget(request_id)
        self._refuse(request_id, ingress_id, error)

    def _refuse(self, request_id: str, ingress_id: str, error: str) -> None:
        self._answer(ingress_id, RequestOutput(request_id, [], "error", error))

    def _abort(self, request_id: str) -> None:
        self._scheduler.abort(request_id)
        if (compiling := self._compiling.pop(request_id, None)) is not None:
            compiling.cancel()  # unless it has begun
        self._timer.forget(request_id)
        self.fresh.discard(request_id)
        if request_id in self.open_requests:
            self.open_requests.remove(request_id)
        elif self._held:
            self._held = deque(it for it in self._held if it.request_id != request_id)

    def _abort_ingress(self, message: AbortIngress) -> None:
        held = [it.request_id for it in self._held if it.ingress_id == message.ingress_id]
        for request_id in (*held, *self.open_requests.ids_of_ingress(message.ingress_id)):
            self._abort(request_id)
        self.open_requests.remove_ingress(message.ingress_id)
