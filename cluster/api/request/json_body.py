"""Reads the body of a request, and parses it as one JSON object, within limits. Knows nothing of its fields."""

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import Request

from cluster.api.settings import ApiSettings
from cluster.errors import (
    BadRequestError,
    BodyTooLargeError,
    ClientTimeoutError,
    ContentTypeError,
)


async def read_body(request: Request, settings: ApiSettings) -> bytes:
    """Return the body. Raises a BadRequestError with the matching status.

    The content type must be JSON, because a web page cannot send that type to another origin without CORS. So no page
    in a browser can use a server on loopback.
    """
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        raise ContentTypeError(
            f"the body must be sent as Content-Type: application/json, got {media_type!r}"
        )
    try:
        async with asyncio.timeout(settings.client_timeout_s):
            return await _read_body(request, settings.max_body_bytes)
    except TimeoutError:
        raise ClientTimeoutError(
            f"the body did not arrive within {settings.client_timeout_s:g} s"
        ) from None


async def _read_body(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) < 20 and int(declared) > max_bytes:
        raise BodyTooLargeError(f"the body has {declared} bytes, the limit is {max_bytes}")
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise BodyTooLargeError(f"the body has more than {max_bytes} bytes, the limit")
        parts.append(part)
    return b"".join(parts)


def parse_json_object(body: bytes, max_depth: int) -> dict[str, Any]:
    """Parse strict JSON: UTF-8, no NaN or Infinity, an object, at most `max_depth` levels."""
    too_deep = f"it is nested more than {max_depth} levels deep"
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise _invalid(too_deep) from None
    except UnicodeDecodeError as error:
        raise _invalid(f"it is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise _invalid(f"{error.msg} at line {error.lineno} column {error.colno}") from None
    except ValueError as error:  # an integer of thousands of digits, or _refuse_constant
        raise _invalid(str(error)) from None
    if not isinstance(value, dict):
        raise _invalid(f"it is a JSON {type(value).__name__}, an object is needed")
    # Fewer brackets than levels cannot be too deep, and hardly any body has so many.
    if body.count(b"[") + body.count(b"{") > max_depth and is_deeper(value, max_depth):
        raise _invalid(too_deep)
    return value


def is_deeper(value: Any, max_depth: int) -> bool:
    """Whether JSON objects and lists are nested more than `max_depth` levels deep."""
    level = [value]
    for _ in range(max_depth + 1):
        level = [item for item in level if isinstance(item, dict | list)]
        if not level:
            return False
        level = [
            child for item in level for child in (item.values() if isinstance(item, dict) else item)
        ]
    return True


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _invalid(reason: str) -> BadRequestError:
    return BadRequestError(f"could not read the JSON body: {reason}", code="invalid_json")
