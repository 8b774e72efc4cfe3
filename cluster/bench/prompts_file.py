"""Reads real prompts from a JSONL file; errors name the line. Knows nothing of requests."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.bench.settings import BenchError

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Record:
    """One line: a prompt (text or token ids) or the messages of a chat."""

    line: int
    prompt: str | list[int] | None
    messages: Messages | None
    max_tokens: int | None

    @classmethod
    def of(cls, number: int, item: Any) -> "Record":
        """Check one line. Raises BenchError with the reason."""
        if not isinstance(item, dict):
            raise BenchError(f"an object is expected, not {json.dumps(item)[:40]}")
        keys = ("prompt", "messages", "max_tokens")
        prompt, messages, max_tokens = (item.get(key) for key in keys)
        if (prompt is None) == (messages is None):
            raise BenchError('exactly one of "prompt" and "messages" is expected')
        if max_tokens is not None and not (_is_int(max_tokens) and max_tokens > 0):
            raise BenchError(
                f'"max_tokens" is {json.dumps(max_tokens)}, not a whole number above 0'
            )
        if prompt is not None:
            is_ids = isinstance(prompt, list) and all(_is_int(token) for token in prompt)
            if not prompt or not (isinstance(prompt, str) or is_ids):
                raise BenchError('"prompt" must be a text or a list of token ids, and not empty')
        elif not _are_messages(messages):
            raise BenchError('"messages" must be a list of objects with a "role", and not empty')
        return cls(number, prompt, messages, max_tokens)


def read_prompts(path: str) -> list[Record]:
    """Return all records in the order of the file; blank lines and unknown keys are ignored."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BenchError(f"--prompts {path}: {reason}") from error
    records = []
    # Not splitlines: JSON strings may hold U+2028, which it takes for the end of a line.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            records.append(Record.of(number, json.loads(line)))
        except json.JSONDecodeError as error:
            where = f"{path}, line {number}, column {error.colno}"
            raise BenchError(f"{where}: not JSON: {error.msg}") from error
        except BenchError as error:
            raise BenchError(f"{path}, line {number}: {error}") from None
    if not records:
        raise BenchError(f"{path} holds no prompts; one JSON object a line is expected")
    return records


def check_endpoint(path: str, records: list[Record], endpoint: str) -> None:
    """Raise BenchError for a record that the endpoint refuses: only completions take token ids, all others messages."""
    for record in records:
        where = f"{path}, line {record.line}"
        if endpoint == "completions" and record.messages is not None:
            raise BenchError(f"{where}: messages need --endpoint chat")
        if endpoint != "completions" and isinstance(record.prompt, list):
            raise BenchError(f"{where}: a prompt of token ids needs --endpoint completions")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_messages(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(item, dict) and isinstance(item.get("role"), str) for item in value)
