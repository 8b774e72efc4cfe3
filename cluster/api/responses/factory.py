"""Makes the generation and the writer of a checked request. Knows nothing of HTTP responses."""

from collections.abc import Callable, Mapping
from typing import Any

from cluster.api.answer.generation import Generation
from cluster.api.backend import EngineBackend
from cluster.api.request.generation_factory import GenerationFactory
from cluster.api.responses.chat_request import chat_request, field_name, own_field_names
from cluster.api.responses.items import Item, parse_input, with_ids
from cluster.api.responses.protocol import ResponsesRequest
from cluster.api.responses.response_object import repeated_fields
from cluster.api.responses.store import ResponseStore
from cluster.api.responses.writer import ResponseWriter
from cluster.errors import BadRequestError

_NO_STORE = "it belongs to a batch or to an offline run"


class ResponseFactory:
    """Makes responses with the chat generations of `chat`, and keeps them in `store`; without one, none is kept."""

    def __init__(self, chat: GenerationFactory, store: ResponseStore | None = None) -> None:
        self._chat = chat
        self._store = store or ResponseStore(0, 0, _NO_STORE)

    async def prepare(
        self, request: ResponsesRequest, backend: EngineBackend, headers: Mapping[str, str]
    ) -> tuple[Generation, ResponseWriter]:
        """Make the generation of a response, and its writer."""
        items = parse_input(request.input, self._store.find_item)
        if request.background:
            self._store.check_on("background")
            if not request.keeps:
                raise BadRequestError(
                    "background needs a response that is kept; leave store out", param="background"
                )
        if request.previous_response_id is not None:
            previous = self._store.find_previous(request.previous_response_id)
            items = previous.conversation + items
        with own_field_names():
            chat = chat_request(request, items)
            generation = await self._chat.chat(chat, backend, headers, id_prefix="resp_")
        if generation.grammar_param is not None:
            generation.grammar_param = field_name(generation.grammar_param)
        fields = repeated_fields(request, generation)
        return generation, ResponseWriter(generation, fields, self._keeper(request, items))

    def _keeper(
        self, request: ResponsesRequest, items: list[Item]
    ) -> Callable[[dict[str, Any]], None] | None:
        """Return the function that keeps the states of a response; None if it is not kept."""
        if self._store.off or not request.keeps:
            return None
        kept: list[Item] = []

        def keep(response: dict[str, Any]) -> None:
            if not kept:  # not before the first token, because ids take time
                kept.extend(with_ids(items))
            self._store.keep(response, kept)

        return keep
