"""The URL of a running server, as an argument of a command."""

import json
import os
from http import HTTPStatus
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit


class UnreachableError(RuntimeError):
    """There is no server at the URL, or it is no Phalanx server."""


def base_url(url: str) -> str:
    """The URL with http:// as the default scheme, and without a path."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"{url!r} is not a URL such as http://127.0.0.1:8000")
    return f"{parts.scheme}://{parts.netloc}"


def no_answer(url: str, error: Exception) -> UnreachableError:
    """The error of a command that gets no answer from its server."""
    reason = error.reason if isinstance(error, URLError) else error
    return UnreachableError(
        f"no answer from {url}: {reason}; is the server running? Give its URL as the argument"
    )


def refusal(error: HTTPError, api_key_env: str) -> str:
    """The reason of a server that refuses a request, with the variable of the key if the key is the reason."""
    try:
        reason = str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code} from {error.url}; is it a Phalanx server?"
    if error.code != HTTPStatus.UNAUTHORIZED:
        return reason
    found = "has another key" if os.environ.get(api_key_env) else "is not set"
    return f"{reason}; the environment variable {api_key_env} {found} (--api-key-env names another)"
