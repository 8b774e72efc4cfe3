"""Values on their way between processes: a pickle, and beside it the large bytes of the value, which are not copied.

A message is the number of frames, the length of each, then the frames; the last one is the pickle. A pickle
of all would copy them, while the event loop stops. Knows nothing of sockets.
"""

import io
import pickle
from collections.abc import Sequence
from typing import Any

NUMBER_BYTES = 8
_MIN_BYTES = 64 * 1024  # of bytes with a frame of their own


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.frames: list[bytes] = []

    def persistent_id(self, value: Any) -> int | None:
        if type(value) is not bytes or len(value) < _MIN_BYTES:
            return None
        self.frames.append(value)
        return len(self.frames) - 1


class _Unpickler(pickle.Unpickler):
    def __init__(self, frames: Sequence[bytes]) -> None:
        super().__init__(io.BytesIO(frames[-1]))
        self._frames = frames

    def persistent_load(self, number: int) -> bytes:
        return self._frames[number]


def to_frames(value: object) -> list[bytes]:
    """Return the parts of a message, to be sent one after another: the lengths, then the frames."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    frames = [*pickler.frames, file.getvalue()]
    numbers = (len(frames), *map(len, frames))
    return [b"".join(number.to_bytes(NUMBER_BYTES) for number in numbers), *frames]


def from_frames(frames: Sequence[bytes]) -> Any:
    """Return the value of the frames of a message."""
    return _Unpickler(frames).load()
