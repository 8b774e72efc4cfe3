"""API keys from the environment and from a file. Only digests leave this module, and no message contains a key.

Knows nothing of HTTP.
"""

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

VARIABLE = "PHALANX_API_KEY"
_KEY = re.compile(r"[\x21-\x2b\x2d-\x7e]{1,512}")  # allowed in a header; a comma separates keys


class ApiKeyError(ValueError):
    """A key cannot be used; the message has its place and the reason, not the key."""


def load_digests(keys_file: str | None) -> tuple[bytes, ...]:
    """SHA-256 digests of all keys of the environment and of the file. Without any, clients need no key."""
    keys = read_variable()
    if keys_file is not None:
        keys += read_keys_file(keys_file)
    return tuple(digest(key.encode()) for key in dict.fromkeys(keys))


def digest(key: bytes) -> bytes:
    """The digest that stands for a key."""
    return hashlib.sha256(key).digest()


def read_variable() -> list[str]:
    """The keys of PHALANX_API_KEY, separated by commas; an empty variable is like none."""
    value = os.environ.get(VARIABLE, "")
    keys = _checked(value.split(","), VARIABLE, "key")
    if value and not keys:
        raise ApiKeyError(f"{VARIABLE} is set but holds no key; unset it or give it one")
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
