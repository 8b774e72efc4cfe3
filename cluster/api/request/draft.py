"""Checks the body of a request and prepares all that needs its text: token ids, sampling parameters, output format.

The work takes up to seconds for the largest bodies and holds the interpreter lock, so it may run in another process: no
function here waits or uses an engine, and a `Draft` travels by pickle. Knows nothing of HTTP responses or engines.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from cluster.api.answer.detokenizer import StopRules
from cluster.api.backend import EngineBackend
from cluster.api.images.opened import prepare
from cluster.api.images.reader import ImageReader
from cluster.api.request.output_format import OutputFormat, OutputFormats
from cluster.api.request.pooling_prompts import PoolingPrompts
from cluster.api.request.prediction import predicted_text
from cluster.api.request.prompt import Prompt, PromptEncoder
from cluster.api.request.protocol import (
    ChatRequest,
    CompletionRequest,
    parse_chat,
    parse_completion,
)
from cluster.api.request.sampling import SamplingBuilder
from cluster.api.request.tool_options import ToolOptions
from cluster.api.settings import ApiSettings
from cluster.api.tokenizer import ServingTokenizer, TokenizerSource, load_tokenizer
from cluster.api.videos.source import is_installed
from cluster.errors import BadRequestError, ContextLengthError, NotFoundError
from workers.wire.request import ImageInput, SamplingParams

MAX_NAMED = 20  # adapters in an error
DEFAULT_COMPLETION_TOKENS = 16  # the public API's own default
# Fields that a generation reads; the others are in the draft in another form, and may be large.
_SMALL_FIELDS = frozenset(
    (
        *("n", "seed", "stream", "stream_options", "echo", "skip_special_tokens", "request_id"),
        *("max_tokens", "max_completion_tokens", "logprobs", "top_logprobs", "prompt_logprobs"),
        *("return_tokens_as_token_ids", "return_token_ids", "priority", "cache_salt", "model"),
        *("prompt_cache_key", "user"),
    )
)


@dataclass(frozen=True)
class EngineFacts:
    """The model, the names of its adapters and its limits, in tokens, as `EngineBackend` has them."""

    model_name: str
    max_model_len: int
    max_request_tokens: int
    adapters: tuple[str, ...] = ()

    @classmethod
    def of(cls, backend: EngineBackend) -> Self:
        """Return the facts of an engine."""
        limits = backend.max_model_len, backend.max_request_tokens
        return cls(backend.model_name, *limits, tuple(backend.adapters))

    @property
    def context_length(self) -> int:
        """The limit of prompt and output together."""
        return min(self.max_model_len, self.max_request_tokens)


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A checked request: all that a generation is made of.

    max_tokens   of each prompt
    params       of all choices, without max_tokens and the seed
    images       and parts of videos, of the one prompt of a chat
    """

    request: CompletionRequest | ChatRequest
    prompts: list[Prompt]
    max_tokens: list[int]
    output: OutputFormat
    params: SamplingParams
    stop: StopRules
    images: tuple[ImageInput, ...] = ()
    num_video_tokens: int = 0

    @property
    def num_image_bytes(self) -> int:
        """Bytes of the pixels of all images and videos."""
        return sum(len(image.pixels) for image in self.images)

    @property
    def num_choices(self) -> int:
        """The number of sequences to generate."""
        return len(self.prompts) * (self.request.n or 1)

    @property
    def num_tokens(self) -> int:
        """The most tokens that all sequences can have, with their prompts."""
        lengths = sum(len(prompt.token_ids) for prompt in self.prompts) + sum(self.max_tokens)
        return lengths * (self.request.n or 1)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the fields of the request that a generation does not read."""
        kind = type(self.request)
        fields = self.request.model_fields_set & _SMALL_FIELDS
        values = {name: getattr(self.request, name) for name in fields}
        return self.__dict__ | {"request": kind.model_construct(fields, **values)}


class Drafter:
    """Makes drafts with the tokenizer and the settings of one ingress."""

    def __init__(self, tokenizer: ServingTokenizer, settings: ApiSettings) -> None:
        self.tokenizer = tokenizer
        self.settings = settings
        images = None if settings.images is None else ImageReader(settings.images)
        self.prompts = PromptEncoder(tokenizer, images)
        self.formats = OutputFormats(tokenizer, settings)
        self._sampling = SamplingBuilder(tokenizer, settings)

    @cached_property
    def pooling_prompts(self) -> PoolingPrompts:
        """Of a model that makes vectors or scores. Raises ValueError if the tokenizer lacks the tokens of scores."""
        assert self.settings.pooling is not None, "the model generates"
        return PoolingPrompts(self.tokenizer, self.settings.pooling)

    def with_images(self, fetched: Mapping[str, bytes]) -> Self:
        """Return a drafter that reads images, with the files of http(s) URLs; needs a model that takes images."""
        assert self.settings.images is not None, "the model takes text alone"
        found = copy(self)
        found.prompts = PromptEncoder(self.tokenizer, ImageReader(self.settings.images, fetched))
        return found

    def completion(self, body: dict[str, Any], engine: EngineFacts) -> Draft:
        """Return the draft of a body of /v1/completions. Raises BadRequestError."""
        request = parse_completion(body)
        check_model(request.model, engine)
        self._check_choices(len(request.prompts()), request.n or 1)
        prompts = self.prompts.completion(request, self._num_kept(request, engine))
        return self._draft(request, prompts, self.formats.for_completion(request), engine)

    def chat(self, body: dict[str, Any], engine: EngineFacts) -> Draft:
        """Return the draft of a body of /v1/chat/completions. Raises BadRequestError."""
        return self.chat_request(parse_chat(body), engine)

    def chat_request(self, request: ChatRequest, engine: EngineFacts) -> Draft:
        """Return the draft of a chat request. Raises BadRequestError."""
        self._check_choices(1, request.n or 1)
        prompt, options = self._chat_prompt(request, engine)
        output = self.formats.for_chat(request, options, prompt)
        return self._draft(request, [prompt], output, engine)

    def num_chat_tokens(self, request: ChatRequest, engine: EngineFacts) -> int:
        """Return the number of prompt tokens that a generation would have."""
        prompt, _ = self._chat_prompt(request, engine)
        return len(prompt.token_ids)

    def _chat_prompt(
        self, request: ChatRequest, engine: EngineFacts
    ) -> tuple[Prompt, ToolOptions | None]:
        check_model(request.model, engine)
        options = self.formats.tool_options(request)
        tools = None if options is None else options.definitions
        prompt = self.prompts.chat(request, self._num_kept(request, engine), tools)
        self.formats.check_thinking(request, prompt)
        return prompt, options

    def _draft(
        self,
        request: CompletionRequest | ChatRequest,
        prompts: list[Prompt],
        output: OutputFormat,
        engine: EngineFacts,
    ) -> Draft:
        params = self._sampling.params(request, output.grammar)
        if isinstance(request, ChatRequest) and (text := predicted_text(request.prediction)):
            ids = self.tokenizer.encode(text, add_special_tokens=False)
            params = replace(params, prediction_token_ids=tuple(ids[: engine.context_length]))
        stop = self._sampling.stop_rules(request, params)
        limits = [self._max_tokens(request, len(prompt.token_ids), engine) for prompt in prompts]
        # Decoded last, because all other checks take less time.
        placed = [it for prompt in prompts for it in prompt.images]
        images = tuple(it.image.read(it.offset) for it in placed)
        return Draft(
            request=request,
            prompts=[replace(prompt, images=()) for prompt in prompts],
            images=images,
            num_video_tokens=sum(it.image.num_tokens for it in placed if it.image.kind == "video"),
            max_tokens=limits,
            output=output,
            params=params,
            stop=stop,
        )

    def _max_tokens(
        self, request: CompletionRequest | ChatRequest, num_prompt_tokens: int, engine: EngineFacts
    ) -> int:
        limit = self.settings.max_prompt_tokens
        if limit is not None and num_prompt_tokens > limit:
            error = ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens, this server takes at most {limit}",
                param="messages" if isinstance(request, ChatRequest) else "prompt",
            )
            error.num_tokens, error.limit = num_prompt_tokens, limit
            raise error
        if request.only_echo:  # every request generates a token; it is dropped
            return fit_output(num_prompt_tokens, None, 1, engine)
        default = None if isinstance(request, ChatRequest) else DEFAULT_COMPLETION_TOKENS
        max_tokens = fit_output(num_prompt_tokens, request.output_limit, default, engine)
        min_tokens = request.min_tokens or 0
        if min_tokens > max_tokens:
            raise BadRequestError(
                f"min_tokens = {min_tokens} is more than max_tokens = {max_tokens}",
                param="min_tokens",
            )
        return max_tokens

    def _num_kept(
        self, request: CompletionRequest | ChatRequest, engine: EngineFacts
    ) -> int | None:
        """Return the number of prompt tokens to keep; None = all."""
        keep = request.truncate_prompt_tokens
        if keep != -1:
            return keep
        room = engine.context_length - (request.output_limit or 1)
        return max(min(room, self.settings.max_prompt_tokens or room), 1)

    def _check_choices(self, num_prompts: int, n: int) -> None:
        limit = self.settings.max_choices
        if num_prompts * n > limit:
            raise BadRequestError(
                f"{num_prompts} prompts times n = {n} are more than {limit} choices",
                param="n" if n > 1 else "prompt",
            )


def load_drafter(source: TokenizerSource, settings: ApiSettings) -> Drafter:
    """Return the drafter of another process, which may decode images."""
    drafter = Drafter(load_tokenizer(*source), settings)
    if settings.images is None:
        return drafter
    prepare()
    if settings.images.videos is not None:
        is_installed()  # each child would import PyAV again
    return drafter.with_images({})


def fit_output(
    num_prompt_tokens: int, requested: int | None, default: int | None, engine: EngineFacts
) -> int:
    """Return max_tokens of one prompt. Raises ContextLengthError if prompt and output do not fit.

    The max_tokens of a client must fit. A default (None = as long as possible) is cut.
    """
    limit = engine.context_length
    if num_prompt_tokens == 0:
        raise BadRequestError("the prompt is empty: it has no tokens", param="prompt")
    room = limit - num_prompt_tokens
    if room >= max(requested or 1, 1):
        return requested or min(default or room, room)
    what = f"this model's maximum context length is {engine.max_model_len} tokens"
    if limit < engine.max_model_len:
        what += f", of which the KV cache of a rank holds {limit}"
    asked = f"the prompt has {num_prompt_tokens} tokens"
    if requested is not None and room > 0:
        asked += f" and {requested} output tokens are wanted; lower max_tokens"
    else:
        asked += "; shorten it"
    error = ContextLengthError(f"{what}, but {asked}", param="max_tokens" if room > 0 else "prompt")
    error.num_tokens, error.limit = num_prompt_tokens, limit - (requested or 1)
    raise error


def check_model(name: str | None, engine: EngineFacts) -> None:
    """Raise NotFoundError for a name that is neither the served model nor one of its adapters."""
    if name is None or name == engine.model_name or name in engine.adapters:
        return
    names = ", ".join(map(repr, sorted(engine.adapters)[:MAX_NAMED]))
    more = len(engine.adapters) - MAX_NAMED
    adapters = f" and its adapters {names}" if names else ""
    raise NotFoundError(
        f"the model {name[:200]!r} does not exist; this server has {engine.model_name!r}{adapters}"
        f"{f' and {more} more' if more > 0 else ''}",
        param="model",
        code="model_not_found",
    )
