"""The input of a batch, in OpenAI's format: a JSON object a line with custom_id, method, url and body."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cluster.api.request.json_body import parse_json_object
from cluster.config.errors import show
from cluster.errors import BadRequestError

MAX_JSON_DEPTH = 512


class BatchError(Exception):
    """A batch cannot start or go on; the message is the reason. What was written stays, and the batch can resume."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the input.

    number  of the line in the file, from 1
    digest  of its bytes: with the number it identifies the line in the output
    error   (code, message) if the line is no request
    """

    number: int
    digest: str
    custom_id: str | None = None
    url: str = ""
    body: dict[str, Any] = field(default_factory=dict)
    error: tuple[str, str] | None = None


class BatchInput:
    """A file of requests. Empty lines are skipped. Raises BatchError if the file cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.is_file():
            reason = "it is not a file" if path.exists() else "no such file"
            raise BatchError(f"cannot read {path}: {reason}")

    def count(self, done: dict[int, str]) -> int:
        """Return the number of requests. Raises BatchError if a line of `done`, number to digest, has other bytes."""
        count = 0
        missing = dict(done)
        for number, data in self._read():
            count += 1
            known = missing.pop(number, None)
            if known is not None and known != _digest(data):
                raise BatchError(
                    f"line {number} of {self.path} is not the line that the output has a result for; the output "
                    "belongs to another input: choose another --output"
                )
        if missing:
            raise BatchError(
                f"the output has a result for line {min(missing)}, which {self.path} does not have; the output "
                "belongs to another input: choose another --output"
            )
        return count

    def lines(self) -> Iterator[Line]:
        """Yield each line, parsed. Of lines with one custom_id the first is valid."""
        seen: dict[str, int] = {}
        for number, data in self._read():
            line = _parse(number, data)
            if line.custom_id is not None and line.error is None:
                first = seen.setdefault(line.custom_id, number)
                if first != number:
                    message = f"line {number}: custom_id {line.custom_id!r} is that of line {first}"
                    error = ("duplicate_custom_id", message)
                    line = Line(number, line.digest, line.custom_id, error=error)
            yield line

    def _read(self) -> Iterator[tuple[int, bytes]]:
        try:
            with self.path.open("rb") as file:
                for number, data in enumerate(file, 1):
                    if data := data.strip():
                        yield number, data
        except OSError as error:
            raise BatchError(f"cannot read {self.path}: {error.strerror}") from error


def _parse(number: int, data: bytes) -> Line:
    digest = _digest(data)
    custom_id: str | None = None

    def refused(code: str, message: str) -> Line:
        return Line(number, digest, custom_id, error=(code, f"line {number}: {message}"))

    try:
        found = parse_json_object(data, MAX_JSON_DEPTH)
    except BadRequestError as error:
        return refused("invalid_json_line", error.message)
    given = found.get("custom_id")
    if not isinstance(given, str) or not given:
        return refused("invalid_custom_id", _unlike("custom_id", given, "a text"))
    custom_id = given
    if found.get("method", "POST") != "POST":
        return refused("invalid_method", "method must be POST")
    url, body = found.get("url"), found.get("body")
    if not isinstance(url, str) or not url.startswith("/"):
        return refused("invalid_url", "url must be a route such as /v1/completions")
    if not isinstance(body, dict):
        return refused("invalid_body", _unlike("body", body, "an object"))
    return Line(number, digest, custom_id, url, body)


def _unlike(field: str, value: Any, expected: str) -> str:
    given = "is missing" if value is None else f"is {show(value)}"
    return f"{field} {given}; expected {expected}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
