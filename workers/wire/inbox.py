"""Messages to a rank while it serves: submit or abort a request, wake up for a vote.

Sent over ZeroMQ like the tokens: a request reaches the engine 0.3 ms after it was sent; a call of the Ray actor took
2 ms. The pixels of a request's images follow it as frames of the same message. Messages of one sender arrive in order,
so an abort never overtakes its request. After a message that is missing or cannot be read, an inbox takes no more of
that stream, until the ingress has opened another one. Every message carries its epoch, and an inbox drops messages of
other epochs. Knows nothing of Ray.
"""

import json
import logging
import threading
from array import array
from collections.abc import Callable
from typing import Any, Protocol

import zmq

from kernels.host.owned import start_thread
from workers.wire.numbering import UNCHECKED, ReceivedStream, split
from workers.wire.request import EngineRequest, ImageInput, PoolingParams, SamplingParams
from workers.wire.secure_socket import Sender, StreamAddress, listen, new_context

logger = logging.getLogger(__name__)


class Receiver(Protocol):
    """Target of an inbox's messages: workers.engine.engine.Engine."""

    def submit(self, request: EngineRequest) -> None:
        """Run a request."""

    def refuse(self, request_id: str, ingress_id: str, error: str) -> None:
        """Answer a request that cannot be read with an error."""

    def abort(self, request_id: str) -> None:
        """End a request without an answer."""

    def wake(self, step: int) -> None:
        """Take part in vote number `step`."""

    def fail(self, error: BaseException) -> None:
        """The inbox receives nothing more, because of `error`."""


class InboxSender:
    """Sending end. `close` may be called from any thread.

    stream   that the rank has opened; UNCHECKED for wakes alone
    """

    def __init__(self, address: StreamAddress, epoch: int, stream: bytes = UNCHECKED):
        self._sender = Sender(address, stream)
        self._epoch = epoch

    @property
    def num_sent(self) -> int:
        """The number of messages since the stream was opened."""
        return self._sender.num_sent

    def submit(self, request: EngineRequest) -> None:
        """Run a request; its tokens are sent to its ingress."""
        self._send("submit", _fields(request), *(image.pixels for image in request.images))

    def abort(self, request_id: str) -> None:
        """End a request; a rank ignores ids of requests that have ended."""
        self._send("abort", request_id)

    def wake(self, step: int) -> None:
        """Wake the rank for vote number `step`."""
        self._send("wake", step)

    def close(self) -> None:
        """Drop queued messages and disconnect."""
        self._sender.close()

    def _send(self, kind: str, value: Any, *frames: bytes) -> None:
        message = json.dumps((self._epoch, kind, value), default=list)  # sets become lists
        self._sender.send(message.encode(), *frames)


class Inbox:
    """Receiving end of a rank, read by a thread of its own. It outlives the epochs of the rank.

    num_stale   messages dropped because they carry another epoch, or belong to no open stream
    """

    def __init__(self, host: str):
        self.num_stale = 0
        self._lock = threading.Lock()  # a closed stream delivers nothing more
        self._streams: dict[bytes, ReceivedStream] = {}
        self._context = new_context()
        self._socket, self.address = listen(self._context, host)
        self._thread: threading.Thread | None = None
        self._target: tuple[Receiver, int] | None = None
        self._logged_epoch: int | None = None
        self._error: BaseException | None = None

    def deliver_to(self, receiver: Receiver, epoch: int) -> None:
        """Deliver messages of `epoch` to `receiver`, in place of the receiver before.

        The first receiver also gets earlier messages of its epoch.
        """
        self._target = receiver, epoch
        if self._thread is None:
            self._thread = start_thread(self._run, self._fail, "inbox")
        if self._error is not None:
            receiver.fail(self._error)

    def open_stream(self, stream: bytes) -> None:
        """Take messages of a stream from now on."""
        with self._lock:
            self._streams[stream] = ReceivedStream()

    def close_stream(self, stream: bytes) -> None:
        """Take no more messages of a stream."""
        with self._lock:
            del self._streams[stream]

    def num_taken(self, stream: bytes) -> int | None:
        """Return how many messages of an open stream have arrived; None after one is missing or cannot be read."""
        found = self._streams[stream]
        return None if found.broken else found.num_taken

    def release(self) -> None:
        """Drop the receiver with all memory that it holds. Messages are stale until the next `deliver_to`."""
        self._target = None

    def close(self) -> None:
        """Stop listening."""
        if self._thread is None:
            self._socket.close()
        self._context.term()  # ends the thread's recv; the thread closes its socket, and term returns after that

    def _run(self) -> None:
        try:
            while True:
                self._receive(*self._socket.recv_multipart())
        except zmq.ContextTerminated:
            pass
        finally:
            self._socket.close()

    def _fail(self, error: BaseException) -> None:
        logger.error("the inbox failed: this rank receives no more messages", exc_info=error)
        self._error = error
        target = self._target  # which `release` may take away at any time
        if target is not None:
            target[0].fail(error)

    def _receive(self, data: bytes, *frames: bytes) -> None:
        stream, number, message = split(data)
        with self._lock:
            if stream == UNCHECKED:
                self._deliver(message, frames)
            elif self._continues(stream, number) and not self._deliver(message, frames):
                self._streams[stream].broken = True

    def _continues(self, stream: bytes, number: int) -> bool:
        """Return whether a message is the next one of an open stream."""
        found = self._streams.get(stream)
        if found is None:
            self.num_stale += 1
            return False
        if not found.broken and not found.take(number):
            logger.warning(
                "a message of an ingress is missing: number %d came after %d",
                number,
                found.num_taken,
            )
        return not found.broken

    def _deliver(self, data: bytes, frames: tuple[bytes, ...]) -> bool:
        """Deliver one message. A message that cannot be read is logged, and refused if it names its request.

        Returns False if it could be neither delivered nor refused: its request would wait for ever.
        """
        target = self._target  # which `release` may take away at any time
        if target is None:
            self.num_stale += 1
            return True
        receiver, epoch = target
        message: Any = None
        try:
            message = json.loads(data)
            sent_in, kind, value = message
            if sent_in != epoch:
                self._count_stale(sent_in, epoch)
                return True
            value = _READERS[kind](value, *frames)
        except Exception as error:
            logger.warning("dropped a message that cannot be read: %r in %.200r", error, data)
            return _refuse(message, receiver, repr(error))
        getattr(receiver, kind)(value)
        return True

    def _count_stale(self, sent_in: int, epoch: int) -> None:
        self.num_stale += 1
        if self._logged_epoch != epoch:
            self._logged_epoch = epoch
            logger.info("dropping messages of epoch %s; this is epoch %d", sent_in, epoch)


def _refuse(message: Any, receiver: Receiver, error: str) -> bool:
    """Answer the request of a message, if the message names it; return whether it does."""
    match message:
        case [_, "submit", {"request_id": str(request_id), "ingress_id": str(ingress_id)}]:
            receiver.refuse(request_id, ingress_id, f"the request cannot be read: {error}")
            return True
    return False


def _fields(request: EngineRequest) -> dict[str, Any]:
    pooling = request.pooling
    images = [
        {**vars(image), "digest": image.digest.hex(), "pixels": None} for image in request.images
    ]
    found = {**vars(request), "params": vars(request.params), "images": images}
    return found if pooling is None else found | {"pooling": vars(pooling)}


def _image(fields: dict[str, Any], pixels: bytes) -> ImageInput:
    grid, digest = tuple(map(_integer, fields["grid_thw"])), bytes.fromhex(fields["digest"])
    _integer(fields["offset"]), _integer(fields["num_tokens"])
    return ImageInput(**fields | {"grid_thw": grid, "digest": digest, "pixels": pixels})


def _request(fields: dict[str, Any], *pixels: bytes) -> EngineRequest:
    images = zip(fields["images"], pixels, strict=True)
    fields["images"] = tuple(_image(*image) for image in images)
    params = fields["params"]
    params["stop_token_ids"] = frozenset(params["stop_token_ids"])
    params["logit_bias"] = tuple((token, bias) for token, bias in params["logit_bias"])
    allowed, words = params["allowed_token_ids"], params["bad_words_ids"]
    params["allowed_token_ids"] = None if allowed is None else tuple(array("i", allowed))
    params["bad_words_ids"] = tuple(tuple(array("i", word)) for word in words)
    params["prediction_token_ids"] = tuple(array("i", params["prediction_token_ids"]))
    fields["params"] = SamplingParams(**params)
    if fields["pooling"] is not None:
        pooled = tuple(array("i", fields["pooling"]["token_ids"]))
        fields["pooling"] = PoolingParams(**fields["pooling"] | {"token_ids": pooled})
    request = EngineRequest(**fields)
    for token_ids in (request.prompt_token_ids, request.emitted_token_ids):
        array("i", token_ids)  # raises if one is no integer
    for text in (request.request_id, request.ingress_id, request.kv_source):
        _string(text)
    _integer(request.priority)
    return request


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no string")
    return value


def _integer(value: Any) -> int:
    if not isinstance(value, int):
        raise TypeError(f"{value!r} is no integer")
    return value


# Reader of a message's value by kind; kinds are methods of Receiver.
_READERS: dict[str, Callable[..., Any]] = {"submit": _request, "abort": _string, "wake": _integer}
