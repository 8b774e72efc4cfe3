"""The output of a batch: a JSON object a line, appended when a request has ended, so that a batch can resume.

The id of a result has the number and the digest of its input line. A line without its end, which a crash leaves, is cut
off at the next start, and its request runs again.
"""

import fcntl
import os
import re
from contextlib import suppress
from json.encoder import encode_basestring_ascii as json_string
from pathlib import Path

from cluster.api.answer.events import to_json
from cluster.offline.batch_input import BatchError, Line

_HEAD = b'{"id":"batch_req_'
_RESULT = re.compile(rb'\{"id":"batch_req_(\d+)_([0-9a-f]{16})","custom_id":.*\}')
_RESPONSE = b',"response":'
_ANSWERED = b'{"status_code":200,'


class BatchOutput:
    """An output file that is open for this process alone.

    done        number to digest of each input line that has a result
    num_errors  results that are not the answer to a request
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done: dict[int, str] = {}
        self.num_errors = 0
        self._failure = ""
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise BatchError(f"cannot write {path}: {error.strerror}") from error
        try:
            self._lock()
            self._size = self._read_results()
            os.ftruncate(self._fd, self._size)
        except OSError as error:
            self.close()
            raise BatchError(f"cannot write {path}: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def append(self, line: Line, response: bytes, *, is_error: bool) -> None:
        """Write the result of a line; `response` is the JSON of its fields after custom_id.

        Raises BatchError where the file takes no result, and from then on: no line follows one that may be torn.
        """
        if self._failure:
            raise BatchError(self._failure)
        custom_id = "null" if line.custom_id is None else json_string(line.custom_id)
        head = f'{{"id":"batch_req_{line.number}_{line.digest}","custom_id":{custom_id},'
        data = head.encode("ascii") + response + b"}\n"
        try:
            written = 0
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError as error:
            with suppress(OSError):  # then the next start cuts off the line
                os.ftruncate(self._fd, self._size)
            raise self._fail(error) from error
        self._size += len(data)
        self.done[line.number] = line.digest
        self.num_errors += is_error

    def sync(self) -> None:
        """Return when the disk has all results. Raises BatchError: some file systems report a full disk only here."""
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._fail(error) from error

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # `sync` has reported it
            os.close(self._fd)

    def _fail(self, error: OSError) -> BatchError:
        self._failure = f"cannot write {self.path}: {error.strerror}"
        return BatchError(self._failure)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchError(f"another phalanx batch writes {self.path}") from None

    def _read_results(self) -> int:
        """Note the results. Returns the size of the file without a line that has no end."""
        size = 0
        with open(self._fd, "rb", closefd=False) as file:
            for number, data in enumerate(file, 1):
                found = _RESULT.fullmatch(data.removesuffix(b"\n"))
                if found is None or not data.endswith(b"\n"):
                    if _is_torn(data) and not file.read(1):
                        break
                    raise BatchError(
                        f"line {number} of {self.path} is not a result of phalanx batch; choose another --output"
                    )
                size += len(data)
                self.done[int(found[1])] = found[2].decode("ascii")
                self.num_errors += not _is_answered(data)
        return size


def response_fields(status: int, request_id: str, body: bytes) -> bytes:
    """Return the fields of a result with a response; `body` is JSON."""
    head = f'"response":{{"status_code":{status},"request_id":{json_string(request_id)},"body":'
    return head.encode("ascii") + body + b'},"error":null'


def error_fields(code: str, message: str) -> bytes:
    """Return the fields of a result without a response."""
    return b'"response":null,"error":' + to_json({"code": code, "message": message})


def _is_torn(data: bytes) -> bool:
    """Whether the last line of a file is the beginning of a result, or zeros of a file system that crashed."""
    return data.startswith(_HEAD) or _HEAD.startswith(data.rstrip(b"\n")) or not data.strip(b"\0\n")


def _is_answered(data: bytes) -> bool:
    """Whether the status of a result is 200. The quotes of a custom_id are escaped, so it cannot hold the key."""
    return data.partition(_RESPONSE)[2].startswith(_ANSWERED)
