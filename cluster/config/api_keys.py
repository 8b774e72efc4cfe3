"""Keys of clients and operators from the environment and from a file. Knows nothing of HTTP.

Only digests leave this module, and no message contains a key.
"""

import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

VARIABLE = "PHALANX_API_KEY"
OPERATOR_VARIABLE = "PHALANX_OPERATOR_KEY"
_KEY = re.compile(r"[\x21-\x2b\x2d-\x7e]{1,512}")  # allowed in a header; a comma separates keys


class ApiKeyError(ValueError):
    """A key cannot be used; the message has its place and the reason, not the key."""


@dataclass(frozen=True, kw_only=True)
class KeyDigests:
    """SHA-256 digests of the keys that a server accepts.

    clients     for all routes but those of operators; empty = these routes need no key
    operators   for all routes; empty = the routes of operators are off
    """

    clients: tuple[bytes, ...] = field(default=(), repr=False)
    operators: tuple[bytes, ...] = field(default=(), repr=False)


def load_digests(keys_file: str | None) -> KeyDigests:
    """Return the digests of all keys of the environment and of the file. Raises ApiKeyError."""
    keys = read_variable()
    if keys_file is not None:
        keys += read_keys_file(keys_file)
    operators = read_variable(OPERATOR_VARIABLE)
    if shared := set(keys) & set(operators):
        raise ApiKeyError(
            f"{len(shared)} key(s) of {OPERATOR_VARIABLE} are keys of clients too; give operators keys of their own"
        )
    return KeyDigests(clients=_digests(keys), operators=_digests(operators))


def _digests(keys: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(digest(key.encode()) for key in dict.fromkeys(keys))


def digest(key: bytes) -> bytes:
    """The digest that stands for a key."""
    return hashlib.sha256(key).digest()


def read_variable(variable: str = VARIABLE) -> list[str]:
    """Return the keys of an environment variable, separated by commas; an empty variable is like none."""
    value = os.environ.get(variable, "")
    keys = _checked(value.split(","), variable, "key")
    if value and not keys:
        raise ApiKeyError(f"{variable} is set but holds no key; unset it or give it one")
    return keys


def read_keys_file(path: str) -> list[str]:
    """The keys of a file, one a line. A # at the start of a line or after a space begins a comment."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ApiKeyError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ApiKeyError(f"{path} is no text file") from None
    keys = _checked((re.split(r"(?:^|\s)#", line)[0] for line in lines), path, "line")
    if not keys:
        raise ApiKeyError(f"{path} holds no key; write one a line, or leave the setting out")
    return keys


def _checked(texts: Iterable[str], source: str, unit: str) -> list[str]:
    keys = []
    for number, text in enumerate(texts, 1):
        key = text.strip()
        if not key:
            continue
        if not _KEY.fullmatch(key):
            raise ApiKeyError(
                f"{source}, {unit} {number}: a key is 1 to 512 visible ASCII characters without a comma"
            )
        keys.append(key)
    return keys
