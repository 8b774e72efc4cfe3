"""Admission control: bounds the choices that run or wait in this ingress, and refuses more than the limit.

Also ends requests at their time limit, and when the server stops. Knows nothing of the work of a request.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.api.answer.writer import AnswerWriter
from cluster.api.settings import ApiSettings
from cluster.errors import (
    BadRequestError,
    EngineDeadError,
    OverloadedError,
    RequestTimeoutError,
    ServingError,
)

STARTED = "phalanx.started"
"""Key of the scope of a request, set by the middleware once the headers of the answer have left."""
BODY_SEND = "phalanx.body_send"
"""Key of the scope: `send` without the wrappers that only look at headers, for parts of the body; set with STARTED."""
_MAX_RETRY_AFTER_S = 30


@dataclass(frozen=True)
class KeyLimits:
    """The most requests of one key that are open in an ingress, and the most tokens of them; None = no limit."""

    max_requests: int | None = None
    max_tokens: int | None = None


class Ticket:
    """An admitted request. `release` it when it has ended, also after an error."""

    def __init__(self, gate: "AdmissionGate", num_choices: int, key: str) -> None:
        self._gate = gate
        self.num_choices = num_choices
        self.num_tokens = 0
        self.num_image_bytes = 0
        self.key = key
        self.arrived = time.monotonic()
        self.timeout: asyncio.Timeout | None = None

    def release(self) -> None:
        """Give the places of the request back."""
        self._gate._release(self)


class TimeLimitError(Exception):
    """The time of a request is over; `reason` is the error for its client."""

    def __init__(self, reason: ServingError) -> None:
        super().__init__(reason.message)
        self.reason = reason


class AdmissionGate:
    """Admission of one ingress; used in the event loop only."""

    def __init__(
        self,
        max_open_choices: int | None = None,
        limits: KeyLimits | None = None,
        *,
        max_image_bytes: int = 0,
    ) -> None:
        self._limit = max_open_choices
        self._max_image_bytes = max_image_bytes
        self._limits = limits or KeyLimits()
        self._tickets: set[Ticket] = set()
        self._closed = ""
        self.ended = False
        self._empty = asyncio.Event()
        self._empty.set()
        # Times at which the last choices ended, for the rate of free places.
        self._ends: deque[float] = deque(maxlen=64)
        self.num_choices = 0

    @property
    def num_requests(self) -> int:
        """Number of requests that run or wait."""
        return len(self._tickets)

    @property
    def closed(self) -> str:
        """The reason for which no request is admitted; empty while the gate is open."""
        return self._closed

    def check(self, num_choices: int = 1) -> None:
        """Raise if there is no place for `num_choices`. Also called before a request is read, to save that work."""
        if self._closed:
            raise EngineDeadError(self._closed)
        if self._limit is None or self.num_choices + num_choices <= self._limit:
            return
        if num_choices > self._limit:
            raise BadRequestError(
                f"{num_choices} choices are more than the {self._limit} this server can queue",
                param="n",
            )
        error = OverloadedError(
            f"{self.num_choices} choices run or wait, the limit is {self._limit}; try again later"
        )
        error.retry_after_s = self._wait_for(self.num_choices + num_choices - self._limit)
        raise error

    def admit(self, num_choices: int, key: str = "") -> Ticket:
        """Admit a request of `num_choices`, or raise. key: of a client with limits of its own; "" = none."""
        self.check(num_choices)
        most = self._limits.max_requests
        if key and most is not None and len(self._of_key(key)) >= most:
            raise OverloadedError(f"this key has {most} open requests, its limit; try again later")
        ticket = Ticket(self, num_choices, key)
        self._tickets.add(ticket)
        self.num_choices += num_choices
        self._empty.clear()
        return ticket

    def resize(
        self, ticket: Ticket, num_choices: int, num_tokens: int, num_image_bytes: int = 0
    ) -> None:
        """Set the choices, the tokens and the bytes of images of an admitted request, or raise.

        The images are kept until the request ends, because another rank may have to take it over.
        """
        self._check_images(num_image_bytes)
        self._check_tokens(ticket.key, num_tokens)
        ticket.num_image_bytes = num_image_bytes
        ticket.num_tokens = num_tokens
        if num_choices == ticket.num_choices:
            return
        self.num_choices -= ticket.num_choices
        try:
            self.check(num_choices)
            ticket.num_choices = num_choices
        finally:
            self.num_choices += ticket.num_choices

    def _check_images(self, num_bytes: int) -> None:
        taken = sum(ticket.num_image_bytes for ticket in self._tickets) if num_bytes else 0
        if num_bytes and taken + num_bytes > self._max_image_bytes:
            raise OverloadedError(
                f"the images of open requests have {taken} of {self._max_image_bytes} bytes "
                f"(serve.images.max_open_bytes), and this one needs {num_bytes}; try again later"
            )

    def _check_tokens(self, key: str, num_tokens: int) -> None:
        most = self._limits.max_tokens
        if not key or most is None:
            return
        if num_tokens > most:
            raise BadRequestError(
                f"prompt and max_tokens are {num_tokens} tokens; a key has {most} for its open requests",
                param="max_tokens",
            )
        taken = sum(ticket.num_tokens for ticket in self._of_key(key))
        if taken + num_tokens > most:
            raise OverloadedError(
                f"the open requests of this key have {taken} of {most} tokens, and this one needs {num_tokens}; "
                "try again later"
            )

    def _of_key(self, key: str) -> list[Ticket]:
        return [ticket for ticket in self._tickets if ticket.key == key]

    def close(self, reason: str) -> None:
        """Refuse all further requests with `reason`."""
        self._closed = reason

    @asynccontextmanager
    async def time_limit(self, ticket: Ticket, timeout_s: float | None) -> AsyncIterator[None]:
        """Run the work of a request until its time limit or `end_all`; then raise TimeLimitError.

        timeout_s counts from the arrival of the request; None = as long as it takes.
        """
        left = 0.0 if self.ended else None
        if left is None and timeout_s is not None:
            left = timeout_s - (time.monotonic() - ticket.arrived)
        try:
            async with asyncio.timeout(left) as timeout:
                ticket.timeout = timeout
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise TimeLimitError(self._reason(timeout_s)) from None

    def _reason(self, timeout_s: float | None) -> ServingError:
        if self._closed:
            return EngineDeadError(self._closed)
        return RequestTimeoutError(f"the answer took longer than {timeout_s:g} s, the limit")

    async def wait_empty(self) -> None:
        """Return when all admitted requests have ended."""
        await self._empty.wait()

    def end_all(self) -> None:
        """End the running requests with the reason of `close`, which must come before."""
        assert self._closed, "close the gate first"
        self.ended = True
        now = asyncio.get_running_loop().time()
        for ticket in self._tickets:
            if ticket.timeout is not None and not ticket.timeout.expired():
                ticket.timeout.reschedule(now)

    def _release(self, ticket: Ticket) -> None:
        if ticket not in self._tickets:
            return
        self._tickets.remove(ticket)
        self.num_choices -= ticket.num_choices
        self._ends.extend([time.monotonic()] * min(ticket.num_choices, 64))
        if not self._tickets:
            self._empty.set()

    def _wait_for(self, num_choices: int) -> int:
        """Return the seconds until `num_choices` places are free, at the rate of the last ended choices."""
        if len(self._ends) < 2:
            return 1
        seconds = max(time.monotonic() - self._ends[0], 0.001)
        return min(max(math.ceil(num_choices * seconds / len(self._ends)), 1), _MAX_RETRY_AFTER_S)


def make_gate(settings: ApiSettings, limits: KeyLimits | None = None) -> AdmissionGate:
    """Return the gate of an ingress."""
    max_image_bytes = 0 if settings.images is None else settings.images.max_open_bytes
    return AdmissionGate(settings.max_open_choices, limits, max_image_bytes=max_image_bytes)


class AdmittedResponse(Response):
    """Serves an answer within its time limit, and releases its ticket."""

    def __init__(
        self,
        answer: Response,
        writer: AnswerWriter,
        gate: AdmissionGate,
        ticket: Ticket,
        timeout_s: float | None,
    ) -> None:
        super().__init__()
        self._answer = answer
        self._writer = writer
        self._gate = gate
        self._ticket = ticket
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve the answer. A timeout before its first byte raises; a later one is the last item of the stream."""
        try:
            async with self._gate.time_limit(self._ticket, self._timeout_s):
                await self._answer(scope, receive, send)
        except TimeLimitError as error:
            if STARTED not in scope:
                raise error.reason from None
            last = self._writer.error(error.reason)
            with suppress(RuntimeError):  # it was complete: the server takes no more of it
                await send({"type": "http.response.body", "body": last})
        finally:
            self._ticket.release()
