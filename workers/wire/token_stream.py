"""Streams of new tokens from ranks to an ingress: one small message a step, sent by the step loop itself.

Sent over ZeroMQ: a message of eight outputs costs the step loop 32 us and never blocks. As an item of a Ray generator
the message took 1.2 ms of a step, because the actor's event loop holds the interpreter lock for it. Every message
carries its epoch, and a receiver drops messages of other epochs. Vectors follow the text of a message as bytes, because
a float takes 10 to 20 characters and 1 us on either side as text. A beat, which a rank sends every BEAT_S, reveals that
the last messages before it are missing, in either direction.
"""

import asyncio
import json
import logging
from typing import Any, Protocol

import numpy as np
import zmq

from workers.wire.numbering import ReceivedStream, new_stream, split
from workers.wire.request import RequestOutput, RequestTimes, TokenLogprobs
from workers.wire.secure_socket import Sender, StreamAddress, listen, new_context

logger = logging.getLogger(__name__)

BEAT_S = 1.0
MAX_MESSAGES_AT_ONCE = 64
_DEFAULTS = (None, None, 0, None, None, "")  # of the last six fields, which few outputs have
_NUM_FIELDS = 10  # in front of the length of a vector
_VECTORS = b"\n"  # in front of the vectors; JSON without white space has no line end
_encode = json.JSONEncoder(separators=(",", ":")).encode
POLLIN = int(zmq.POLLIN)  # `&` with the enum takes 10 us


class TokenSender:
    """The end of a rank. `send` and `close` may be called from different threads."""

    def __init__(self, address: StreamAddress, epoch: int, stream: bytes):
        self._sender = Sender(address, stream)
        self._epoch = epoch

    def send(self, rank: int, load_of_others: int, outputs: list[RequestOutput]) -> None:
        """Queue one message; after `close` it is dropped.

        load_of_others   load of other ingresses on this rank, in tokens
        """
        fields = [_fields(output) for output in outputs]
        message = _encode((self._epoch, rank, load_of_others, fields)).encode()
        vectors = [output.vector for output in outputs if output.vector is not None]
        if vectors:
            message += _VECTORS + np.concatenate(vectors, dtype=np.float32).tobytes()
        self._sender.send(message)

    def beat(self, rank: int, num_taken: int | None) -> None:
        """Report how many messages of the ingress have arrived in the rank's inbox; None after one is missing."""
        self._sender.send(_encode((self._epoch, rank, num_taken, None)).encode())

    def close(self) -> None:
        """Drop queued messages and disconnect."""
        self._sender.close()


class TokenListener(Protocol):
    """Target of a receiver's messages."""

    def deliver(self, rank: int, load_of_others: int, outputs: list[RequestOutput]) -> None:
        """Take the outputs of one step of a rank."""

    def beat(self, rank: int, num_taken: int | None) -> None:
        """Take a beat of a rank, see `TokenSender.beat`."""

    def lost(self, rank: int) -> None:
        """A message of a rank is missing or cannot be read; nothing more of its stream is delivered."""


class TokenReceiver:
    """The end of an ingress, for all ranks. It delivers messages in an asyncio loop.

    epoch       epoch of the messages that are delivered
    num_stale   messages dropped because they carry another epoch, or belong to no open stream
    """

    def __init__(self, host: str, epoch: int):
        self.epoch = epoch
        self.num_stale = 0
        self._streams: dict[bytes, tuple[int, ReceivedStream]] = {}  # with their ranks
        self._context = new_context()
        self._socket, self.address = listen(self._context, host)
        self._loop: asyncio.AbstractEventLoop | None = None  # until `listen`

    def open_stream(self, rank: int) -> bytes:
        """Return the id of a new stream of a rank, in place of the one before."""
        others = self._streams.items()
        stream = new_stream()
        self._streams = {key: value for key, value in others if value[0] != rank}
        self._streams[stream] = rank, ReceivedStream()
        return stream

    def listen(self, listener: TokenListener) -> None:
        """Deliver each message to `listener`, in the running loop.

        The loop watches the socket's descriptor: zmq.asyncio took 0.4 ms of the loop's time for a message.
        """
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._loop.add_reader(self._socket.fileno(), self._drain)
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Deliver all messages that are here, because the descriptor signals changes only."""
        for _ in range(MAX_MESSAGES_AT_ONCE):
            if self._socket.closed or not int(self._socket.get(zmq.EVENTS)) & POLLIN:
                return
            self._receive(self._socket.recv(zmq.NOBLOCK))
        assert self._loop is not None
        self._loop.call_soon(self._drain)  # other work of the loop gets a turn first

    def _receive(self, data: bytes) -> None:
        """Deliver one message, unless its stream is closed or lacks a message.

        A message that cannot be read ends the stream too: its tokens would be missing in the texts.
        """
        stream, number, message = split(data)
        found = self._streams.get(stream)
        if found is None:
            self.num_stale += 1
            return
        rank, received = found
        if not received.take(number):
            logger.warning(
                "a message of rank %d is missing: number %d came after %d",
                *(rank, number, received.num_taken),
            )
        elif self._take(rank, message):
            return
        self._streams.pop(stream, None)
        self._listener.lost(rank)

    def _take(self, rank: int, message: bytes) -> bool:
        """Deliver one message of a rank, unless it is of another epoch. Returns False if it cannot be read."""
        try:
            # `json.loads` detects the encoding of bytes, which takes as long as the checks of the stream.
            text, _, vectors = message.partition(_VECTORS)
            epoch, sender, number, outputs = json.loads(text.decode())
            if epoch != self.epoch:
                self._count_stale(epoch)
            elif sender != rank:
                raise ValueError(f"its sender is rank {sender}")
            elif outputs is None:
                self._listener.beat(rank, number)
            else:
                found = [_output(fields) for fields in outputs]
                if vectors or any(len(fields) > _NUM_FIELDS for fields in outputs):
                    _take_vectors(found, outputs, np.frombuffer(vectors, dtype=np.float32))
                self._listener.deliver(rank, number, found)
        except Exception:
            logger.exception("a message of rank %d cannot be read: %.200r", rank, message)
            return False
        return True

    def _count_stale(self, epoch: int) -> None:
        self.num_stale += 1
        if self.num_stale == 1:
            logger.info("dropping messages of epoch %s; this is epoch %d", epoch, self.epoch)

    def close(self) -> None:
        """Stop listening."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._context.term()


def _fields(output: RequestOutput) -> tuple[Any, ...]:
    """Return the fields in order; the last six are left out if they have their defaults. A vector is its length."""
    fields = (output.request_id, output.token_ids, output.finish_reason, output.error)
    rest = (
        output.logprobs,
        output.prompt_logprobs,
        output.num_cached_tokens,
        output.times,
        output.drafts,
        output.kv_source,
    )
    if output.vector is not None:
        return fields + rest + (len(output.vector),)
    return fields if rest == _DEFAULTS else fields + rest


def _output(fields: list[Any]) -> RequestOutput:
    """Return the output without its vector."""
    if len(fields) > 4:
        fields[4:6] = [
            values and [v and TokenLogprobs(*v) for v in values] for values in fields[4:6]
        ]
        fields[7] = fields[7] and RequestTimes(*fields[7])
        fields[8] = fields[8] and (fields[8][0], fields[8][1])
    return RequestOutput(*fields[:_NUM_FIELDS])


def _take_vectors(
    outputs: list[RequestOutput], fields: list[list[Any]], vectors: np.ndarray
) -> None:
    """Give each output with the length of a vector its part of `vectors`."""
    start = 0
    for output, values in zip(outputs, fields, strict=True):
        if len(values) > _NUM_FIELDS:
            end = start + values[_NUM_FIELDS]
            output.vector = vectors[start:end]
            start = end
    assert start == len(vectors), f"{len(vectors)} values for vectors of {start}"
