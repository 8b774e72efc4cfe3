"""The stream of new tokens from a rank to an ingress: one small message a step, sent from the step loop itself.

ZeroMQ over TCP: sending eight outputs costs the step loop 32 us and never blocks. As an item of a Ray generator the
same message took 1.2 ms of a step, since the actor's event loop holds the interpreter lock for it.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import zmq

from workers.wire.request import RequestOutput, RequestTimes, TokenLogprobs
from workers.wire.secure_socket import Sender, StreamAddress, listen

MAX_MESSAGES_AT_ONCE = 64
_NOTHING = (None, None, 0, None)  # what hardly any output has
POLLIN = int(zmq.POLLIN)  # its enum takes 10 us for an `&`


class TokenSender:
    """The rank's end. `send` and `close` may be called from different threads."""

    def __init__(self, address: StreamAddress):
        self._sender = Sender(address)

    def send(self, rank: int, load_of_others: int, outputs: list[RequestOutput]) -> None:
        """Queue one message; after `close` it is dropped, nobody listens any more.

        load_of_others   tokens of other ingresses that this rank has not finished
        """
        fields = [_fields(output) for output in outputs]
        self._sender.send(json.dumps((rank, load_of_others, fields)).encode())

    def close(self) -> None:
        """Drop what is queued and disconnect."""
        self._sender.close()


class TokenReceiver:
    """The ingress's end, for all ranks; its messages are handed over in an asyncio loop."""

    def __init__(self, host: str):
        self._context = zmq.Context()
        self._socket, self.address = listen(self._context, host)
        self._loop: asyncio.AbstractEventLoop | None = None  # until `listen`

    def listen(self, deliver: Callable[[int, int, list[RequestOutput]], None]) -> None:
        """From now on `deliver` gets what each rank sends after each step, in the running loop.

        The socket is read when its descriptor says so: zmq.asyncio took 0.4 ms of the loop's time for a message.
        """
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._loop.add_reader(self._socket.fileno(), self._drain)
        self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        """Hand over what is there. The descriptor tells of changes only, so nothing may be left."""
        for _ in range(MAX_MESSAGES_AT_ONCE):
            if self._socket.closed or not self._socket.get(zmq.EVENTS) & POLLIN:
                return
            rank, load_of_others, outputs = json.loads(self._socket.recv(zmq.NOBLOCK))
            self._deliver(rank, load_of_others, [_output(fields) for fields in outputs])
        self._loop.call_soon(self._drain)  # let the loop's other work have a turn

    def close(self) -> None:
        """Stop listening."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        self._context.term()


def _fields(output: RequestOutput) -> tuple[Any, ...]:
    """The fields in their order; what hardly any output has is left out when it is not there."""
    fields = (output.request_id, output.token_ids, output.finish_reason, output.error)
    rest = (output.logprobs, output.prompt_logprobs, output.num_cached_tokens, output.times)
    return fields if rest == _NOTHING else fields + rest


def _output(fields: list[Any]) -> RequestOutput:
    if len(fields) > 4:
        fields[4:6] = [
            values and [v and TokenLogprobs(*v) for v in values] for values in fields[4:6]
        ]
        fields[7] = fields[7] and RequestTimes(*fields[7])
    return RequestOutput(*fields)
