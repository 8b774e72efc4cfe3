"""Records each request: counts for /metrics, a line in the log, and a span if there is a tracer.

The record of a choice is updated for each output; all other work is done once a request. Knows nothing of answers.
"""

import logging
import time
from typing import Protocol

from starlette.types import Scope

from cluster.api.answer.generation import Choice, Generation
from cluster.metrics.metrics import IngressMetrics
from workers.wire.request import RequestOutput, RequestTimes

logger = logging.getLogger(__name__)

REQUEST_ID = "phalanx.request_id"
"""Key of the scope: the x-request-id of a request, or the generated one."""


class Tracer(Protocol):
    """Takes the record of each request at its end."""

    def record(self, record: "RequestRecord") -> None:
        """Make a span of one request."""
        ...


class Recorder:
    """The recorder of one ingress. access_log: log each request at level info, not only failed requests."""

    def __init__(
        self, metrics: IngressMetrics, tracer: Tracer | None = None, *, access_log: bool = False
    ) -> None:
        self.metrics = metrics
        self.tracer = tracer
        self.level = logging.INFO if access_log else logging.DEBUG

    def begin(self, generation: Generation, scope: Scope) -> "RequestRecord":
        """Return the record of a request, before the request runs."""
        return RequestRecord(self, generation, scope)


class RequestRecord:
    """One request of a client, with all its choices."""

    def __init__(self, recorder: Recorder, generation: Generation, scope: Scope) -> None:
        self.generation = generation
        self.scope = scope
        self.choices: list[ChoiceRecord] = []
        self.error: BaseException | None = None
        self._recorder = recorder

    @property
    def request_id(self) -> str:
        """The x-request-id of the answer."""
        return str(self.scope.get(REQUEST_ID, ""))

    def choice(self, choice: Choice) -> "ChoiceRecord":
        """Return the record of a choice, before the choice runs."""
        record = ChoiceRecord(self._recorder.metrics, self.generation.started, choice)
        self.choices.append(record)
        return record

    def end(self, error: BaseException | None) -> None:
        """Record the end: an answer, an error, or a client that left."""
        recorder = self._recorder
        error = error or next((c.error for c in self.choices if c.error is not None), None)
        self.error = error
        reasons = {choice.reason for choice in self.choices} or {"abort"}
        reason = "error" if error else "abort" if "abort" in reasons else ",".join(sorted(reasons))
        level = logging.WARNING if reason == "error" else recorder.level
        if logger.isEnabledFor(level):
            extra = {"request_id": self.request_id}
            logger.log(level, "%s", self._line(reason, error), extra=extra)
        if recorder.tracer is not None:
            recorder.tracer.record(self)

    def _line(self, reason: str, error: BaseException | None) -> str:
        generation = self.generation
        first = min((c.first_token_s for c in self.choices if c.first_token_s), default=0.0)
        line = (
            f"{generation.response_id} {reason}: "
            f"{generation.num_prompt_tokens} + {generation.num_completion_tokens} tokens, "
            f"first after {first:.3f} s, {time.perf_counter() - generation.started:.3f} s"
        )
        return line if error is None else f"{line}: {type(error).__name__}: {error}"


class ChoiceRecord:
    """The record of one choice. times: measured by its rank; None unless the rank finished the request."""

    __slots__ = (
        *("_last", "_metrics", "_started"),
        *("choice", "error", "first_token_s", "reason", "times"),
    )

    def __init__(self, metrics: IngressMetrics, started: float, choice: Choice) -> None:
        self.choice = choice
        self.reason = "abort"  # the client left, unless a finish reason or an error replaces it
        self.error: Exception | None = None
        self.first_token_s = 0.0
        self.times: RequestTimes | None = None
        self._metrics = metrics
        self._started = started
        self._last = 0.0

    def piece(self, output: RequestOutput) -> None:
        """Record an output that was sent."""
        now = time.perf_counter()
        if self._last:
            self._metrics.observe_inter_token(now - self._last)
        else:
            self.first_token_s = now - self._started
            self._metrics.observe_first_token(self.first_token_s)
        self._last = now
        if output.times is not None:
            self.times = output.times

    def failed(self, error: Exception) -> None:
        """Record an error."""
        self.reason = "error"
        self.error = error

    def end(self) -> None:
        """Count the end of the choice under `reason`."""
        self._metrics.observe_end(self.reason)
        if self.reason in ("abort", "error"):
            return
        self._metrics.observe_finished(
            num_prompt_tokens=len(self.choice.prompt_token_ids),
            num_output_tokens=self.choice.text.num_tokens,
            first_token_s=self.first_token_s,
            total_s=time.perf_counter() - self._started,
        )
