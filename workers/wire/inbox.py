"""What ingresses and other ranks tell a rank while it serves: run this, forget that, come to the next exchange.

ZeroMQ as for the tokens: a request is in the engine 0.3 ms after it was sent, where a call of its Ray actor took 2 ms.
What one sender sends comes in order, so nobody forgets a request that is still on its way. Knows nothing of Ray.
"""

import json
import logging
import threading
from typing import Any, Protocol

import zmq

from workers.wire.request import EngineRequest, SamplingParams
from workers.wire.secure_socket import Sender, StreamAddress, listen

logger = logging.getLogger(__name__)


class Receiver(Protocol):
    """Who an inbox is for: workers.engine.engine.Engine."""

    def submit(self, request: EngineRequest) -> None:
        """Run a request."""

    def abort(self, request_id: str) -> None:
        """Forget one."""

    def wake(self, step: int) -> None:
        """A peer goes to exchange number `step`."""


class InboxSender:
    """One sender's end. `close` may be called from another thread than the others."""

    def __init__(self, address: StreamAddress):
        self._sender = Sender(address)

    def submit(self, request: EngineRequest) -> None:
        """Run this request; its tokens leave by the stream of its ingress."""
        self._send("submit", _fields(request))

    def abort(self, request_id: str) -> None:
        """Forget it; a rank that has finished it does not mind."""
        self._send("abort", request_id)

    def wake(self, step: int) -> None:
        """Come to exchange number `step`."""
        self._send("wake", step)

    def close(self) -> None:
        """Drop what is queued and disconnect."""
        self._sender.close()

    def _send(self, kind: str, value: Any) -> None:
        self._sender.send(json.dumps((kind, value), default=list).encode())  # a set is a list


class Inbox:
    """The rank's end, read by a thread of its own."""

    def __init__(self, host: str):
        self._context = zmq.Context()
        self._socket, self.address = listen(self._context, host)
        self._thread: threading.Thread | None = None

    def deliver_to(self, receiver: Receiver) -> None:
        """From now on `receiver` gets what comes, and what came before."""
        self._thread = threading.Thread(
            target=self._run, args=(receiver,), name="inbox", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        if self._thread is None:
            self._socket.close()
        self._context.term()  # wakes the thread, which closes its socket, and waits for that

    def _run(self, receiver: Receiver) -> None:
        try:
            while True:
                _deliver(json.loads(self._socket.recv()), receiver)
        except zmq.ContextTerminated:
            self._socket.close()
        except BaseException:
            logger.exception("the inbox failed; nothing reaches this rank any more")
            raise


def _deliver(message: list[Any], receiver: Receiver) -> None:
    kind, value = message
    if kind == "submit":
        receiver.submit(_request(value))
    elif kind == "abort":
        receiver.abort(value)
    else:
        assert kind == "wake", kind
        receiver.wake(value)


def _fields(request: EngineRequest) -> dict[str, Any]:
    return {**vars(request), "params": vars(request.params)}


def _request(fields: dict[str, Any]) -> EngineRequest:
    params = fields["params"]
    params["stop_token_ids"] = frozenset(params["stop_token_ids"])
    params["logit_bias"] = tuple((token, bias) for token, bias in params["logit_bias"])
    if params["allowed_token_ids"] is not None:
        params["allowed_token_ids"] = tuple(params["allowed_token_ids"])
    params["bad_words_ids"] = tuple(tuple(word) for word in params["bad_words_ids"])
    fields["params"] = SamplingParams(**params)
    return EngineRequest(**fields)
