"""Checks the body of a request for vectors or scores and makes its prompts. May run in another process.

Knows nothing of HTTP responses or engines.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.api.pooling.answer import AnswerShape, Classes, Embeddings, Pooled, Reranked, Scores
from cluster.api.pooling.fields import (
    ClassifyRequest,
    EmbeddingRequest,
    InputFields,
    PairFields,
    PoolingFields,
    PoolingRequest,
    RerankRequest,
    ScoreRequest,
    parse_fields,
)
from cluster.api.request.draft import Drafter, EngineFacts, check_model
from cluster.api.request.pooling_prompts import PoolingPrompts, opening
from cluster.api.request.protocol import check_text, parse_chat, parse_prompts
from cluster.errors import BadRequestError, ContextLengthError
from workers.specs.pooling import PoolingSpec
from workers.wire.request import PoolingParams

Pair = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class PoolingDraft:
    """A checked request.

    prompts   token ids, int32, because an array travels between processes as its bytes
    shape     makes the answer of the vectors
    """

    prompts: "list[array[int]]"
    params: PoolingParams
    shape: AnswerShape
    model: str | None
    priority: int | None
    cache_salt: str | None
    request_id: str | None

    @property
    def num_choices(self) -> int:
        """The number of sequences."""
        return len(self.prompts)

    @property
    def num_image_bytes(self) -> int:
        """See DraftedRequest."""
        return 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(map(len, self.prompts))


class PoolingDrafter:
    """Makes drafts for the model of one ingress."""

    def __init__(self, drafter: Drafter, engine: EngineFacts) -> None:
        self._drafter, self._engine = drafter, engine
        self._tokenizer, self._settings = drafter.tokenizer, drafter.settings
        spec = self._settings.pooling
        assert spec is not None, "the model generates"
        self._spec = spec

    def embedding(self, body: dict[str, Any]) -> PoolingDraft:
        """Return the draft of a body of /v1/embeddings. Raises BadRequestError."""
        request = parse_fields(EmbeddingRequest, body)
        return self._of_inputs(request, body, Embeddings(request.encoding_format == "base64"))

    def pooling(self, body: dict[str, Any]) -> PoolingDraft:
        """Return the draft of a body of /pooling. Raises BadRequestError."""
        request = parse_fields(PoolingRequest, body)
        if request.task not in (None, self._spec.task):
            raise BadRequestError(
                f"task is {request.task!r}; this model is served for {self._spec.task!r}",
                param="task",
            )
        activation = "none" if request.activates is False else self._spec.activation
        shape = Pooled(activation, request.encoding_format == "base64")
        return self._of_inputs(request, body, shape)

    def classes(self, body: dict[str, Any]) -> PoolingDraft:
        """Return the draft of a body of /classify. Raises BadRequestError."""
        request = parse_fields(ClassifyRequest, body)
        activation = "none" if request.activates is False else self._spec.activation
        return self._of_inputs(request, body, Classes(activation, self._spec.labels))

    def scores(self, body: dict[str, Any]) -> PoolingDraft:
        """Return the draft of a body of /score. Raises BadRequestError."""
        request = parse_fields(ScoreRequest, body)
        name_1, value_1 = _one_of(body, "text_1", "queries", "data_1")
        name_2, value_2 = _one_of(body, "text_2", "documents", "data_2")
        firsts, seconds = _texts(value_1, name_1), _texts(value_2, name_2)
        if len(firsts) not in (1, len(seconds)):
            raise BadRequestError(
                f"{name_1} has {len(firsts)} texts and {name_2} has {len(seconds)}; expected one, or equal numbers",
                param=name_1,
            )
        return self._of_pairs(request, firsts, seconds, (name_1, name_2), Scores)

    def reranking(self, body: dict[str, Any]) -> PoolingDraft:
        """Return the draft of a body of /rerank. Raises BadRequestError."""
        request = parse_fields(RerankRequest, body)
        if request.query is None:
            raise _missing("query")
        documents = request.documents
        if isinstance(documents, list):
            documents = [it.get("text") if isinstance(it, dict) else it for it in documents]
        texts = _texts(documents, "documents")
        shown = None if request.return_documents is False else texts

        def shape(**options: Any) -> AnswerShape:
            return Reranked(**options, documents=shown, top_n=request.top_n or len(texts))

        return self._of_pairs(request, [request.query], texts, ("query", "documents"), shape)

    @property
    def _prompts(self) -> PoolingPrompts:
        return self._drafter.pooling_prompts

    def _of_inputs(
        self, request: InputFields, body: dict[str, Any], shape: AnswerShape
    ) -> PoolingDraft:
        check_model(request.model, self._engine)
        dimensions = getattr(request, "dimensions", None)
        if dimensions is not None:
            self._check_dimensions(dimensions)
        param = "input" if request.messages is None else "messages"
        prompts = self._inputs(request, body)
        self._check(prompts, param)
        return self._draft(request, prompts, shape, dimensions)

    def _inputs(self, request: InputFields, body: dict[str, Any]) -> "list[array[int]]":
        keep = self._num_kept(request)
        if request.messages is not None:
            if request.input is not None:
                raise BadRequestError("input and messages exclude each other", param="input")
            fields = self._chat_fields(body)
            token_ids = self._drafter.prompts.chat(parse_chat(fields), None).token_ids
            return [token_ids[:keep]]
        inputs = parse_prompts(request.input, "input")
        self._check_count(len(inputs), "input")
        special = request.add_special_tokens is not False
        return [array("i", self._encode(text, special, keep)) for text in inputs]

    def _chat_fields(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the fields of a chat; those of the body stand before the checkpoint's keywords of its template."""
        opens, options = opening(self._spec.chat_options or {})
        fields = {
            "add_generation_prompt": opens and not body.get("continue_final_message"),
            "chat_template_kwargs": options,
        }
        given = ("messages", "continue_final_message", "add_generation_prompt")
        fields |= {name: body[name] for name in given if body.get(name) is not None}
        own = body.get("chat_template_kwargs")
        if own is not None:  # parse_chat refuses other types
            fields["chat_template_kwargs"] = {**options, **own} if isinstance(own, dict) else own
        return fields

    def _encode(self, text: str | list[int], special: bool, keep: int | None) -> list[int]:
        if isinstance(text, list):
            self._tokenizer.check_token_ids(text, "input")
            return text[:keep]
        check_text(text, "input")
        return self._prompts.encode(text, special=special, keep=keep)

    def _of_pairs(
        self,
        request: PairFields,
        firsts: list[str],
        seconds: list[str],
        params: tuple[str, str],
        shape: Any,
    ) -> PoolingDraft:
        """Return the draft of the scores of `seconds` by the first text, or by one of `firsts` each."""
        check_model(request.model, self._engine)
        for texts, param in zip((firsts, seconds), params, strict=True):
            for text in texts:
                check_text(text, param)
        keep, most = self._num_kept(request), request.max_tokens_per_doc
        if most is not None:
            seconds = [self._prompts.cut(text, most) for text in seconds]
        raw = request.activates is False
        if self._spec.task == "embed":
            if request.instruction is not None:
                raise BadRequestError(
                    "instruction: write it into the texts that this model embeds",
                    param="instruction",
                )
            self._check_count(len(firsts) + len(seconds), params[1])
            prompts = []
            for texts, param in zip((firsts, seconds), params, strict=True):
                of_param = [array("i", self._encode(text, True, keep)) for text in texts]
                self._check(of_param, param)
                prompts += of_param
            built = shape(activation="none", num_queries=len(firsts))
        else:
            self._check_count(len(seconds), params[1])
            prompts = [
                array(
                    "i",
                    self._prompts.encode_pair(*pair, instruction=request.instruction, keep=keep),
                )
                for pair in _paired(firsts, seconds)
            ]
            self._check(prompts, params[1])
            built = shape(activation="none" if raw else self._spec.activation, num_queries=0)
        return self._draft(request, prompts, built, None)

    def _draft(
        self,
        request: PoolingFields,
        prompts: "list[array[int]]",
        shape: AnswerShape,
        dimensions: int | None,
    ) -> PoolingDraft:
        token_ids = self._prompts.score_token_ids if self._spec.score_tokens else ()
        normalize = request.activates if self._spec.task == "embed" else None
        return PoolingDraft(
            prompts=prompts,
            params=self._spec.params(
                token_ids=token_ids, dimensions=dimensions, normalize=normalize
            ),
            shape=shape,
            model=request.model,
            priority=request.priority,
            cache_salt=request.cache_salt,
            request_id=request.request_id,
        )

    def _check_dimensions(self, dimensions: int) -> None:
        spec = self._spec
        if spec.task != "embed":
            raise BadRequestError("dimensions: this model makes no embeddings", param="dimensions")
        if dimensions == spec.size or (spec.dimensions is None and dimensions < spec.size):
            return
        if dimensions in (spec.dimensions or ()):
            return
        known = ", ".join(map(str, sorted({*(spec.dimensions or ()), spec.size})))
        found = f"1 to {spec.size}" if spec.dimensions is None else known
        raise BadRequestError(
            f"dimensions is {dimensions}; this model has {found} (model.pooling.dimensions)",
            param="dimensions",
        )

    def _check_count(self, count: int, param: str) -> None:
        limit = self._settings.max_choices
        if count > limit:
            raise BadRequestError(f"{param}: {count} texts are more than {limit}", param=param)

    @property
    def _longest(self) -> int:
        limit = self._engine.context_length
        return min(limit, self._settings.max_prompt_tokens or limit)

    def _num_kept(self, request: PoolingFields) -> int | None:
        keep = request.truncate_prompt_tokens
        return self._longest if keep == -1 else keep

    def _check(self, prompts: "list[array[int]]", param: str) -> None:
        """Raise for the first prompt that is empty or too long."""
        limit = self._longest
        for index, prompt in enumerate(prompts):
            which = f"{param}[{index}]" if len(prompts) > 1 else param
            if not prompt:
                raise BadRequestError(f"{which} is empty: it has no tokens", param=param)
            if len(prompt) > limit:
                error = ContextLengthError(
                    f"{which} has {len(prompt)} tokens, this server takes at most {limit}; shorten it, or set "
                    "truncate_prompt_tokens",
                    param=param,
                )
                error.num_tokens, error.limit = len(prompt), limit
                raise error


def _one_of(body: dict[str, Any], *names: str) -> tuple[str, Any]:
    """Return the field of these names that is set; the first name if none is."""
    found = [(name, body[name]) for name in names if body.get(name) is not None]
    if len(found) > 1:
        raise BadRequestError(
            f"{found[0][0]} and {found[1][0]} exclude each other", param=found[1][0]
        )
    return found[0] if found else (names[0], None)


def _texts(value: Any, param: str) -> list[str]:
    if value is None:
        raise _missing(param)
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(isinstance(it, str) for it in value):
        return value
    raise BadRequestError(
        f"{param} must be a text or a list of texts, and not an empty list", param=param
    )


def _missing(param: str) -> BadRequestError:
    return BadRequestError(f"{param} is missing", param=param, code="missing_required_parameter")


def _paired(firsts: Sequence[str], seconds: Sequence[str]) -> Iterator[Pair]:
    if len(firsts) == 1:
        firsts = [firsts[0]] * len(seconds)
    return zip(firsts, seconds, strict=True)


def check_pooling(drafter: Drafter) -> None:
    """Raise ValueError if the tokenizer does not fit the scores of the model, or the prompts of its texts."""
    spec: PoolingSpec | None = drafter.settings.pooling
    if spec is None:
        return
    prompts = drafter.pooling_prompts
    if spec.task == "embed" and spec.chat_options is not None:
        prompts.encode("a text", special=True, keep=None)


def draft_embedding(drafter: Drafter, body: dict[str, Any], engine: EngineFacts) -> PoolingDraft:
    """Return the draft of a body of /v1/embeddings."""
    return PoolingDrafter(drafter, engine).embedding(body)


def draft_pooling(drafter: Drafter, body: dict[str, Any], engine: EngineFacts) -> PoolingDraft:
    """Return the draft of a body of /pooling."""
    return PoolingDrafter(drafter, engine).pooling(body)


def draft_classes(drafter: Drafter, body: dict[str, Any], engine: EngineFacts) -> PoolingDraft:
    """Return the draft of a body of /classify."""
    return PoolingDrafter(drafter, engine).classes(body)


def draft_scores(drafter: Drafter, body: dict[str, Any], engine: EngineFacts) -> PoolingDraft:
    """Return the draft of a body of /score."""
    return PoolingDrafter(drafter, engine).scores(body)


def draft_reranking(drafter: Drafter, body: dict[str, Any], engine: EngineFacts) -> PoolingDraft:
    """Return the draft of a body of /rerank."""
    return PoolingDrafter(drafter, engine).reranking(body)
