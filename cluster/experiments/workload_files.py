"""Reads the files of a workload: JSONL of prompts, and traces with times; errors name the line.

Knows nothing of engines and configurations.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from cluster.bench.prompts_file import Record, read_prompts
from cluster.bench.settings import BenchError


@dataclass(frozen=True)
class TraceRow:
    """One line of a trace: seconds, and a prompt or lengths."""

    at: float
    record: Record | None
    input_len: int | None
    output_len: int | None

    @property
    def max_tokens(self) -> int | None:
        """Output tokens that the line sets."""
        given = self.record.max_tokens if self.record else None
        return given or self.output_len


def prompts_of(path: str) -> Sequence[Record]:
    """Return the lines of a JSONL file of prompts; a file is read again only after a change. Raises BenchError."""
    return _prompts(path, _version(path))


def trace_of(path: str) -> Sequence[TraceRow]:
    """Return the lines of a trace, in the order of their times. Raises BenchError with the line."""
    return _trace(path, _version(path))


def content_hash(path: Path) -> str:
    """Return the hash of a file's bytes. Raises BenchError."""
    return _hash(str(path), _version(str(path)))


def _version(path: str) -> tuple[int, int]:
    try:
        found = Path(path).stat()
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror or error}") from None
    return found.st_mtime_ns, found.st_size


@lru_cache(maxsize=64)
def _prompts(path: str, _version: tuple[int, int]) -> tuple[Record, ...]:
    return tuple(read_prompts(path))


@lru_cache(maxsize=64)
def _hash(path: str, _version: tuple[int, int]) -> str:
    try:
        return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]
    except OSError as error:
        raise BenchError(f"{path}: {error.strerror or error}") from None


@lru_cache(maxsize=64)
def _trace(path: str, _version: tuple[int, int]) -> tuple[TraceRow, ...]:
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    rows: list[TraceRow] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(_trace_row(number, json.loads(line)))
        except ValueError as error:  # of JSON too
            raise BenchError(f"{path}, line {number}: {error}") from None
        if len(rows) > 1 and rows[-1].at < rows[-2].at:
            raise BenchError(f"{path}, line {number}: `at` is before that of the line above")
    if not rows:
        raise BenchError(f'{path} has no requests; a line is {{"at": seconds, "input_len": 100}}')
    return tuple(rows)


def _trace_row(number: int, item: Any) -> TraceRow:
    if not isinstance(item, dict):
        raise ValueError("an object is expected")
    at = item.get("at")
    if isinstance(at, bool) or not isinstance(at, int | float) or not math.isfinite(at):
        raise ValueError('"at" must be a number of seconds')
    for name in ("input_len", "output_len"):
        value = item.get(name)
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f'"{name}" must be a whole number above 0')
    record = None
    if "prompt" in item or "messages" in item:
        record = Record.of(number, item)
    return TraceRow(float(at), record, item.get("input_len"), item.get("output_len"))
