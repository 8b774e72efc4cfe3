"""Parses the body of a request as one JSON object, within limits. Knows nothing of its fields."""

import json
from typing import Any, NoReturn

from cluster.errors import BadRequestError


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
