"""Completes the JSON of arguments that a limit of tokens cut off. Knows nothing of messages."""

import json
from dataclasses import dataclass, field
from typing import Any

_CLOSERS = {"{": "}", "[": "]"}


@dataclass(slots=True)
class _Open:
    """What is open at the end of a text.

    closers    of the open objects and lists, the outermost first
    last_cut   where the last value, which may not be whole, can be left out
    """

    closers: list[str] = field(default_factory=list)
    in_string: bool = False
    escaped: bool = False
    last_cut: int = 0


def completed(text: str) -> dict[str, Any] | None:
    """Return the object that `text` begins, with what is whole of its last value; None if it begins none."""
    found = _scan(text)
    if found is None or not found.closers:
        return None
    whole = (text[:-1] if found.escaped else text) + ('"' if found.in_string else "")
    before = text[: found.last_cut]
    cut = _scan(before)
    assert cut is not None  # it is the beginning of a text that was scanned
    for begun, closers in ((whole, found.closers), (before, cut.closers)):
        try:
            value = json.loads(begun + "".join(reversed(closers)))
        except (ValueError, RecursionError):
            continue
        return value if isinstance(value, dict) else None
    return None


def _scan(text: str) -> _Open | None:
    """Return what is open at the end of a text; None if something is closed that is not open."""
    found = _Open()
    for position, char in enumerate(text):
        if found.in_string:
            found.in_string = found.escaped or char != '"'
            found.escaped = char == "\\" and not found.escaped
        elif char == '"':
            found.in_string = True
        elif char in _CLOSERS:
            found.closers.append(_CLOSERS[char])
            found.last_cut = position + 1
        elif char in ("}", "]"):
            if not found.closers or found.closers.pop() != char:
                return None
        elif char == ",":
            found.last_cut = position
    return found
