"""Makes the generation and the writer of a checked request. Knows nothing of HTTP responses."""

from collections.abc import Mapping

from cluster.api.answer.generation import Generation
from cluster.api.backend import EngineBackend
from cluster.api.request.generation_factory import GenerationFactory
from cluster.api.responses.chat_request import chat_request, field_name, own_field_names
from cluster.api.responses.items import parse_input
from cluster.api.responses.protocol import ResponsesRequest
from cluster.api.responses.response_object import repeated_fields
from cluster.api.responses.writer import ResponseWriter


class ResponseFactory:
    """Makes responses with the chat generations of `chat`."""

    def __init__(self, chat: GenerationFactory) -> None:
        self._chat = chat

    async def prepare(
        self, request: ResponsesRequest, backend: EngineBackend, headers: Mapping[str, str]
    ) -> tuple[Generation, ResponseWriter]:
        """Make the generation of a response, and its writer."""
        items = parse_input(request.input)
        with own_field_names():
            chat = chat_request(request, items)
            generation = await self._chat.chat(chat, backend, headers, id_prefix="resp_")
        if generation.grammar_param is not None:
            generation.grammar_param = field_name(generation.grammar_param)
        return generation, ResponseWriter(generation, repeated_fields(request, generation))
