"""Pages of the input items of a response, as OpenAI lists them. Knows nothing of the store."""

from collections.abc import Mapping
from typing import Any

from cluster.api.responses.items import Item
from cluster.errors import BadRequestError

_MAX_LIMIT, _DEFAULT_LIMIT = 100, 20


def input_page(items: list[Item], query: Mapping[str, str]) -> dict[str, Any]:
    """Return one page; `query` may have limit, order and after, the id of the item before the page."""
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise BadRequestError("order must be asc or desc", param="order")
    limit = query_number(query, "limit", _DEFAULT_LIMIT)
    if not 1 <= limit <= _MAX_LIMIT:
        raise BadRequestError(f"limit must be from 1 to {_MAX_LIMIT}", param="limit")
    ordered = items if order == "asc" else items[::-1]
    after = query.get("after")
    start = 0
    if after is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise BadRequestError(f"after: there is no item {after[:100]!r}", param="after")
        start = ids.index(after) + 1
    page = ordered[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + limit < len(ordered),
    }


def query_number(query: Mapping[str, str], name: str, default: int) -> int:
    """Return a whole number of the query."""
    text = query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdecimal() and len(text) < 16):
        raise BadRequestError(f"{name} must be a whole number", param=name)
    return int(text)


def query_flag(query: Mapping[str, str], name: str) -> bool:
    """Return a truth value of the query."""
    text = query.get(name, "false").lower()
    if text not in ("true", "false"):
        raise BadRequestError(f"{name} must be true or false", param=name)
    return text == "true"
