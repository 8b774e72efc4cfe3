"""Streams of new tokens from ranks to an ingress: one small message a step, sent by the step loop itself.

Sent over ZeroMQ: a message of eight outputs costs the step loop 32 us and never blocks. As an item of a Ray generator
the message took 1.2 ms of a step, because the actor's event loop holds the interpreter lock for it. Every message
carries its epoch, and a receiver drops messages of other epochs.
"""

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import zmq

from workers.wire.request import RequestOutput, RequestTimes, TokenLogprobs
from workers.wire.secure_socket import Sender, StreamAddress, listen

logger = logging.getLogger(__name__)

MAX_MESSAGES_AT_ONCE = 64
_DEFAULTS = (None, None, 0, None)  # of the last four fields, which few outputs have
POLLIN = int(zmq.POLLIN)  # `&` with the enum takes 10 us


class TokenSender:
    """The end of a rank. `send` and `close` may be called from different threads."""

    def __init__(self, address: StreamAddress, epoch: int):
        self._sender = Sender(address)
        self._epoch = epoch

    def send(self, rank: int, load_of_others: int, outputs: list[RequestOutput]) -> None:
        """Queue one message; after `close` it is dropped.

        load_of_others   load of other ingresses on this rank, in tokens
        """
        fields = [_fields(output) for output in outputs]
        message = json.dumps((self._epoch, rank, load_of_others, fields))
        self._sender.send(message.encode())

    def close(self) -> None:
        """Drop queued messages and disconnect."""
        self._sender.close()


class TokenReceiver:
    """The end of an ingress, for all ranks. It delivers messages in an asyncio loop.

    epoch       epoch of the messages that are delivered
    num_stale   messages dropped because they carry another epoch
    """

    def __init__(self, host: str, epoch: int):
        self.epoch = epoch
        self.num_stale = 0
        self._context = zmq.Context()
        self._socket, self.address = listen(self._context, host)
        self._loop: asyncio.AbstractEventLoop | None = None  # until `listen`

    def listen(self, deliver: Callable[[int, int, list[RequestOutput]], None]) -> None:
        """Call `deliver(rank, load_of_others, outputs)` for each message, in the running loop.

        The loop watches the socket's descriptor: zmq.asyncio took 0.4 ms of the loop's time for a message.
        """
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._loop.add_reader(self._socket.fileno(), self._drain)
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Deliver all messages that are here, because the descriptor signals changes only."""
        for _ in range(MAX_MESSAGES_AT_ONCE):
            if self._socket.closed or not int(self._socket.get(zmq.EVENTS)) & POLLIN:
                return
            self._take(self._socket.recv(zmq.NOBLOCK))
        assert self._loop is not None
        self._loop.call_soon(self._drain)  # other work of the loop gets a turn first

    def _take(self, message: bytes) -> None:
        """Deliver one message, unless it is of another epoch."""
        try:
            epoch, rank, load_of_others, outputs = json.loads(message)
            if epoch == self.epoch:
                self._deliver(rank, load_of_others, [_output(fields) for fields in outputs])
            else:
                self._count_stale(epoch)
        except Exception:
            logger.exception("a message of a rank was not delivered: %.200r", message)

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
    """Return the fields in order; the last four are left out if they have their defaults."""
    fields = (output.request_id, output.token_ids, output.finish_reason, output.error)
    rest = (output.logprobs, output.prompt_logprobs, output.num_cached_tokens, output.times)
    return fields if rest == _DEFAULTS else fields + rest


def _output(fields: list[Any]) -> RequestOutput:
    if len(fields) > 4:
        fields[4:6] = [
            values and [v and TokenLogprobs(*v) for v in values] for values in fields[4:6]
        ]
        fields[7] = fields[7] and RequestTimes(*fields[7])
    return RequestOutput(*fields)
