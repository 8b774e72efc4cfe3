"""The fields of requests for vectors and scores: types, bounds, defaults, as vLLM, OpenAI, Jina and Cohere spell them.

Unknown fields are ignored, as in other servers; known fields that would change the answer are refused.
"""

from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from cluster.api.request.field_schemas import MESSAGES, PROMPT
from cluster.api.request.protocol import (
    INT32_MAX,
    CacheSalt,
    Priority,
    RequestId,
    User,
    as_bad_request,
    needs,
)
from cluster.api.request.unsupported import refuse_unsupported
from cluster.errors import BadRequestError

_TEXTS: dict[str, JsonValue] = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]
}
_DOCUMENT: dict[str, JsonValue] = {
    "anyOf": [
        {"type": "string"},
        {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}},
    ]
}
# Field -> the values that change nothing. null always does so.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "chat_template": (),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "late_chunking": (False,),
    "prompt_embeds": ([],),
    "rank_fields": ([], ["text"]),
}
_Fields = TypeVar("_Fields", bound="PoolingFields")


class PoolingFields(BaseModel):
    """The fields of all kinds of request. None means the default."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: str | None = Field(None, description="The served model; may be left out.")
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=INT32_MAX,
        description="Most tokens of a prompt; the end is cut. -1 = all that fit.",
    )
    add_special_tokens: bool | None = None
    use_activation: bool | None = Field(
        None, description="false = raw values: embeddings of any length, logits of classes."
    )
    activation: bool | None = Field(None, description="The older name of use_activation.")
    priority: Priority = None
    cache_salt: CacheSalt = None
    request_id: RequestId = None
    user: User = None

    @property
    def activates(self) -> bool | None:
        """Whether values are normalised, or made probabilities; None = as the model has it."""
        return self.activation if self.use_activation is None else self.use_activation


class InputFields(PoolingFields):
    """One vector for each input."""

    input: Any = Field(
        None,
        description="string | [string] | [token id] | [[token id]]",
        json_schema_extra=PROMPT,
    )
    messages: Any = Field(
        None,
        description="[{role, content}], one prompt by the chat template, in the place of input.",
        json_schema_extra=MESSAGES,
    )


class EmbeddingRequest(InputFields):
    """POST /v1/embeddings."""

    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="base64 = the bytes of float32, little end first."
    )
    dimensions: int | None = Field(
        None, ge=1, le=INT32_MAX, description="First values of a Matryoshka embedding."
    )
    normalize: bool | None = Field(None, description="false = embeddings of any length.")

    @property
    def activates(self) -> bool | None:
        """See PoolingFields."""
        return super().activates if self.normalize is None else self.normalize


class PoolingRequest(EmbeddingRequest):
    """POST /pooling."""

    task: str | None = Field(None, description="What the model is served for; nothing else.")


class ClassifyRequest(InputFields):
    """POST /classify."""


class PairFields(PoolingFields):
    """Pairs of texts."""

    instruction: str | None = Field(None, description="For templates that have one.")
    max_tokens_per_doc: int | None = Field(
        None, ge=1, le=INT32_MAX, description="Most tokens of a document; the end is cut."
    )


class ScoreRequest(PairFields):
    """POST /score. One text against one or several, or two lists of equal length."""

    model_config = ConfigDict(
        json_schema_extra={"anyOf": [{"required": ["text_1"]}, {"required": ["queries"]}]}
    )

    text_1: Any = Field(None, description="string | [string]", json_schema_extra=_TEXTS)
    text_2: Any = Field(None, description="string | [string]", json_schema_extra=_TEXTS)
    queries: Any = Field(None, description="Another name of text_1.", json_schema_extra=_TEXTS)
    documents: Any = Field(None, description="Another name of text_2.", json_schema_extra=_TEXTS)
    data_1: Any = Field(None, description="Another name of text_1.", json_schema_extra=_TEXTS)
    data_2: Any = Field(None, description="Another name of text_2.", json_schema_extra=_TEXTS)


class RerankRequest(PairFields):
    """POST /rerank, and Jina's and Cohere's routes."""

    model_config = ConfigDict(json_schema_extra=needs("query"))

    query: str | None = Field(None, description="The text that documents are compared with.")
    documents: Any = Field(
        None,
        description="[string] | [{text}]",
        json_schema_extra={"type": "array", "items": _DOCUMENT, "minItems": 1},
    )
    top_n: int | None = Field(
        None, ge=0, le=INT32_MAX, description="Results, the best first; 0 = all."
    )
    return_documents: bool | None = Field(None, description="false = results without texts.")


def parse_fields(kind: type[_Fields], body: dict[str, Any]) -> _Fields:
    """Check types and bounds of a request. Raises BadRequestError."""
    refuse_unsupported(body, _UNSUPPORTED)
    try:
        request = kind.model_validate(body)
    except ValidationError as error:
        raise as_bad_request(error) from None
    if request.truncate_prompt_tokens == 0:
        raise BadRequestError(
            "truncate_prompt_tokens must be -1 or at least 1", param="truncate_prompt_tokens"
        )
    return request
