"""Makes the draft of a body of /v1/responses, perhaps in another process. Knows nothing of the store.

A conversation is kept as the JSON of its items, because a large one in objects would stall the process that holds it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.api.answer.events import to_json
from cluster.api.request.draft import Draft, Drafter, EngineFacts
from cluster.api.responses.chat_request import chat_request, own_field_names
from cluster.api.responses.input_items import input_page
from cluster.api.responses.items import Item, parse_input, with_ids
from cluster.api.responses.protocol import ResponsesRequest, parse_responses
from cluster.errors import BadRequestError

_MAX_REFERENCES = 256
_MAX_REPEATED_BYTES = 64 * 1024
# Fields that the chat's draft has in another form, and that may be large.
_BULK = (
    *("input", "stop", "stop_token_ids", "allowed_token_ids", "bad_words", "logit_bias", "include"),
    *("structured_outputs", "chat_template_kwargs"),
)


@dataclass(frozen=True)
class References:
    """What a request names of kept responses: the one before, and (id, field) of items."""

    previous: str | None
    items: list[tuple[str, str]]


@dataclass(frozen=True)
class Referred:
    """The output of the response before, and the items by their ids."""

    output: list[Item] = field(default_factory=list)
    items: Mapping[str, Item] = field(default_factory=dict)


@dataclass(frozen=True)
class ResponseDraft:
    """The draft of a response. items: the conversation to keep, as JSON."""

    request: ResponsesRequest
    chat: Draft
    items: bytes

    @property
    def num_choices(self) -> int:
        """See DraftedRequest."""
        return 1

    @property
    def num_image_bytes(self) -> int:
        """See DraftedRequest."""
        return self.chat.num_image_bytes

    @property
    def num_tokens(self) -> int:
        """See DraftedRequest."""
        return self.chat.num_tokens

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the large fields of the request."""
        return self.__dict__ | {"request": self.request.model_copy(update=dict.fromkeys(_BULK))}


def draft_response(
    drafter: Drafter,
    body: dict[str, Any],
    facts: EngineFacts,
    before: bytes = b"[]",
    referred: Referred | None = None,
) -> ResponseDraft | References:
    """Return the draft, or what it refers to, to be passed in a second call. Raises BadRequestError.

    before: the items before those of the body, as JSON
    """
    request = parse_responses(body)
    missing: list[tuple[str, str]] = []

    def find(item_id: str, param: str) -> Item:
        if referred is not None:
            return referred.items[item_id]
        missing.append((item_id, param))
        return {}

    items = parse_input(request.input, find)
    if len(missing) > _MAX_REFERENCES:
        raise BadRequestError(
            f"input has {len(missing)} item references, at most {_MAX_REFERENCES} are allowed",
            param="input",
        )
    if referred is None and (missing or request.previous_response_id is not None):
        return References(request.previous_response_id, missing)
    if referred is not None:
        items = [*json.loads(before), *referred.output, *items]
    _check_repeated(request, drafter.settings.max_schema_bytes)
    with own_field_names():
        chat = drafter.chat_request(chat_request(request, items), facts)
    return ResponseDraft(request, chat, to_json(with_ids(items)) if request.keeps else b"")


def _check_repeated(request: ResponsesRequest, max_schema_bytes: int) -> None:
    """Bound the objects that the response repeats, because the event loop writes them."""
    form = request.text.format if request.text is not None else None
    repeated = (("tool_choice", request.tool_choice, 0), ("text.format", form, max_schema_bytes))
    for param, value, schema_bytes in repeated:
        limit = _MAX_REPEATED_BYTES + schema_bytes
        if len(to_json(value)) > limit:
            raise BadRequestError(f"{param} has more than {limit} bytes", param=param)


def page_of_items(_drafter: Drafter, items: bytes, query: Mapping[str, str]) -> bytes:
    """Return the JSON of a page of a kept conversation. Raises BadRequestError."""
    return to_json(input_page(json.loads(items), query))
