"""Read a request's body as one JSON object, within limits. Knows nothing of its meaning."""

import json
from typing import Any, NoReturn

from starlette.requests import Request

from cluster.errors import BadRequestError, BodyTooLargeError, ContentTypeError


async def read_json_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The body as a dict; a BadRequestError of the right status for anything else.

    The content type must say JSON: a web page cannot send that to another origin unasked, so a
    server on loopback cannot be driven by any page its user visits.
    """
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        raise ContentTypeError(
            f"the body must be sent as Content-Type: application/json, got {media_type!r}"
        )
    return parse_json_object(await _read_body(request, max_bytes))


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


def parse_json_object(body: bytes) -> dict[str, Any]:
    """Strict JSON: UTF-8, no NaN or Infinity, bounded depth, an object outside."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        raise _invalid("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise _invalid(f"it is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise _invalid(f"{error.msg} at line {error.lineno} column {error.colno}") from None
    except ValueError as error:  # an integer of thousands of digits, or _refuse_constant
        raise _invalid(str(error)) from None
    if not isinstance(value, dict):
        raise _invalid(f"it is a JSON {type(value).__name__}, an object is needed")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _invalid(reason: str) -> BadRequestError:
    return BadRequestError(f"could not read the JSON body: {reason}", code="invalid_json")
