"""Makes the generation and the writer of a drafted response. Knows nothing of HTTP responses."""

from collections.abc import Callable
from typing import Any

from cluster.api.answer.generation import Generation
from cluster.api.backend import EngineBackend
from cluster.api.request.generation_factory import GenerationFactory
from cluster.api.request.sender import Sender
from cluster.api.responses.chat_request import field_name, own_field_names
from cluster.api.responses.draft import References, Referred, ResponseDraft
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

    def find(self, names: References, owner: str = "") -> tuple[bytes, Referred]:
        """Return the conversation before, as JSON, and what a request refers to. Raises BadRequestError."""
        before, output = b"[]", []
        if names.previous is not None:
            previous = self._store.find_previous(names.previous, owner)
            before, output = previous.items, previous.response["output"]
        items = {
            item_id: self._store.find_item(item_id, param, owner) for item_id, param in names.items
        }
        return before, Referred(output, items)

    async def prepare(
        self, draft: ResponseDraft, backend: EngineBackend, sender: Sender
    ) -> tuple[Generation, ResponseWriter]:
        """Make the generation of a response, and its writer."""
        request = draft.request
        if request.background:
            self._store.check_on("background")
            if not request.keeps:
                raise BadRequestError(
                    "background needs a response that is kept; leave store out", param="background"
                )
        with own_field_names():
            generation = await self._chat.generation(draft.chat, backend, sender, id_prefix="resp_")
        if generation.grammar_param is not None:
            generation.grammar_param = field_name(generation.grammar_param)
        fields = repeated_fields(request, generation)
        return generation, ResponseWriter(generation, fields, self._keeper(draft, sender.key))

    def _keeper(self, draft: ResponseDraft, owner: str) -> Callable[[dict[str, Any]], None] | None:
        """Return the function that keeps the states of a response; None if it is not kept."""
        if self._store.off or not draft.request.keeps:
            return None
        return lambda response: self._store.keep(response, draft.items, owner)
