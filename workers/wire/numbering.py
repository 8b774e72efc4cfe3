"""Numbers of the messages of a stream, by which its receiver detects a missing message.

ZeroMQ opens a lost connection again, but messages on their way are lost with the connection, without an error at
either end. Every message carries the id of its stream and its number there. Knows nothing of sockets and contents.
"""

import secrets
import struct
from dataclasses import dataclass

_HEADER = struct.Struct("<16sQ")  # stream, number
_HEADER_BYTES = _HEADER.size

UNCHECKED = bytes(16)
"""Id of streams that may lose messages: wakes, which are repeated."""


def new_stream() -> bytes:
    """Return the id of a new stream."""
    return secrets.token_bytes(16)


def numbered(stream: bytes, number: int, message: bytes) -> bytes:
    """Return a message with its header."""
    return _HEADER.pack(stream, number) + message


def split(data: bytes) -> tuple[bytes, int, bytes]:
    """Return stream, number and message; a message with a cut header belongs to stream b"", which is never open."""
    if len(data) < _HEADER_BYTES:
        return b"", 0, b""
    stream, number = _HEADER.unpack_from(data)
    return stream, number, data[_HEADER_BYTES:]


@dataclass(slots=True)
class ReceivedStream:
    """The receiving end of a stream.

    num_taken   messages that came in order
    broken      a message is missing or cannot be read, so no later one is taken
    """

    num_taken: int = 0
    broken: bool = False

    def take(self, number: int) -> bool:
        """Return whether message `number` continues the stream."""
        if self.broken or number != self.num_taken:
            self.broken = True
            return False
        self.num_taken += 1
        return True
