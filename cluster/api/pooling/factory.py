"""Makes a `Generation` of a draft for vectors or scores, and the writer of its answer."""

import uuid

from cluster.api.answer.events import to_json
from cluster.api.answer.generation import Choice, Generation
from cluster.api.answer.pooled_vector import PooledVector
from cluster.api.backend import EngineBackend
from cluster.api.pooling.answer import AnswerShape, Head
from cluster.api.pooling.draft import PoolingDraft
from cluster.api.request.generation_factory import routing_of
from cluster.api.request.sender import Sender
from cluster.api.settings import ApiSettings
from cluster.errors import ServingError
from workers.wire.request import NO_OUTPUT


class PoolingWriter:
    """The bytes of an answer, which is never a stream."""

    def __init__(self, generation: Generation, shape: AnswerShape) -> None:
        self._generation, self._shape = generation, shape

    def begin(self, choice: Choice, text: str) -> bytes:
        """See AnswerWriter."""
        raise AssertionError("vectors do not stream")

    def text(self, choice: Choice, text: str) -> bytes:
        """See AnswerWriter."""
        raise AssertionError("vectors do not stream")

    def end(self) -> bytes:
        """See AnswerWriter."""
        raise AssertionError("vectors do not stream")

    def error(self, error: ServingError) -> bytes:
        """See AnswerWriter: an answer that has begun is complete, because it is sent at once."""
        return b""

    def body(self, _texts: list[str]) -> bytes:
        """See AnswerWriter."""
        generation = self._generation
        vectors = []
        for choice in generation.choices:
            assert isinstance(choice.text, PooledVector) and choice.text.vector is not None
            vectors.append(choice.text.vector)
        count = generation.num_prompt_tokens
        usage = {
            "prompt_tokens": count,
            "total_tokens": count,
            "completion_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
        }
        head = Head(generation.response_id, generation.model, generation.created, usage)
        return to_json(self._shape.body(head, vectors))


def prepare_pooling(
    draft: PoolingDraft, backend: EngineBackend, sender: Sender, settings: ApiSettings
) -> tuple[Generation, PoolingWriter]:
    """Return the generation of a draft, with one choice for each prompt, and its writer."""
    unique = uuid.uuid4().hex
    response_id = draft.shape.id_prefix + (draft.request_id or unique)
    run_id = f"{response_id}-{unique}" if draft.request_id else response_id
    generation = Generation(
        response_id=response_id,
        is_chat=False,
        model=draft.model or backend.model_name,
        system_fingerprint=settings.system_fingerprint,
        stream=False,
        include_usage=False,
        continuous_usage=False,
        choices=[
            Choice(
                index,
                f"{run_id}-{index}",
                prompt.tolist(),
                NO_OUTPUT,
                PooledVector(),
                pooling=draft.params,
            )
            for index, prompt in enumerate(draft.prompts)
        ],
        num_choices_per_prompt=1,
        num_prompt_tokens=draft.num_tokens,
        routing=routing_of(draft, backend, sender),
    )
    return generation, PoolingWriter(generation, draft.shape)
