"""Completes the JSON of arguments that a limit of tokens cut off. Knows nothing of messages."""

import json
from typing import Any

_CLOSERS = {"{": "}", "[": "]"}


def completed(text: str) -> dict[str, Any] | None:
    """Return the object that `text` begins, with what is whole of its last value; None if it begins none."""
    closers: list[str] = []
    in_string = escaped = False
    last_cut, cut_closers = 0, ""  # where the last value that is not whole can be left out
    for position, char in enumerate(text):
        if in_string:
            in_string = escaped or char != '"'
            escaped = char == "\\" and not escaped
        elif char == '"':
            in_string = True
        elif char in _CLOSERS:
            closers.append(_CLOSERS[char])
            last_cut, cut_closers = position + 1, "".join(reversed(closers))
        elif char in ("}", "]"):
            if not closers or closers.pop() != char:
                return None
        elif char == ",":
            last_cut, cut_closers = position, "".join(reversed(closers))
    if not closers:
        return None
    whole = (text[:-1] if escaped else text) + ('"' if in_string else "")
    for candidate in (whole + "".join(reversed(closers)), text[:last_cut] + cut_closers):
        try:
            value = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        return value if isinstance(value, dict) else None
    return None
