"""Makes a `Generation` of a checked request: tokenised prompts, sampling parameters, one text for each choice.

Knows nothing of HTTP responses or of how the engine runs the choices.
"""

import random
import uuid
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from cluster.api.answer.detokenizer import NoText, TextStream
from cluster.api.answer.generation import Choice, Generation
from cluster.api.answer.logprobs import Shown, TokenReport
from cluster.api.answer.reasoning import Thinking, ThoughtCounter
from cluster.api.backend import EngineBackend
from cluster.api.request.output_format import OutputFormat, OutputFormats
from cluster.api.request.prompt import Prompt, PromptEncoder
from cluster.api.request.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    check_text,
)
from cluster.api.request.sampling import SamplingBuilder
from cluster.api.request.tool_options import ToolOptions
from cluster.api.settings import ApiSettings
from cluster.api.tokenizer import ServingTokenizer
from cluster.errors import BadRequestError, ContextLengthError, NotFoundError
from workers.wire.request import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16  # the public API's own default
RANK_HEADER = "x-data-parallel-rank"
_SEED_MASK = 2**63 - 1


class GenerationFactory:
    """Makes generations with the tokenizer and the settings of one ingress."""

    def __init__(self, tokenizer: ServingTokenizer, settings: ApiSettings) -> None:
        self._tokenizer = tokenizer
        self._settings = settings
        self._prompts = PromptEncoder(tokenizer, settings)
        self._sampling = SamplingBuilder(tokenizer, settings)
        self._formats = OutputFormats(tokenizer, settings)

    async def completion(
        self,
        request: CompletionRequest,
        backend: EngineBackend,
        headers: Mapping[str, str],
    ) -> Generation:
        """Make the generation of a completion. Choices of prompt p are numbered from p * n."""
        check_model(request.model, backend)
        self._check_choices(len(request.prompts()), request.n or 1)
        keep = self._num_kept(request, backend)
        prompts = await self._prompts.completion(request, keep)
        output = await self._formats.for_completion(request)
        params = await self._sampling.params(request, output.grammar)
        return self._make(request, backend, headers, prompts, output, params, "cmpl-")

    async def chat(
        self,
        request: ChatRequest,
        backend: EngineBackend,
        headers: Mapping[str, str],
        *,
        id_prefix: str = "chatcmpl-",
    ) -> Generation:
        """Make the generation of a chat request; `id_prefix` is the beginning of the answer's id."""
        self._check_choices(1, request.n or 1)
        prompt, options = await self._chat_prompt(request, backend)
        output = await self._formats.for_chat(request, options, prompt)
        params = await self._sampling.params(request, output.grammar)
        return self._make(request, backend, headers, [prompt], output, params, id_prefix)

    async def num_chat_tokens(self, request: ChatRequest, backend: EngineBackend) -> int:
        """Return the number of prompt tokens that a generation would have."""
        prompt, _ = await self._chat_prompt(request, backend)
        return len(prompt.token_ids)

    async def _chat_prompt(
        self, request: ChatRequest, backend: EngineBackend
    ) -> tuple[Prompt, ToolOptions | None]:
        check_model(request.model, backend)
        options = self._formats.tool_options(request)
        self._formats.check_thinking(request)
        tools = None if options is None else options.definitions
        prompt = await self._prompts.chat(request, self._num_kept(request, backend), tools)
        return prompt, options

    def _make(
        self,
        request: CompletionRequest | ChatRequest,
        backend: EngineBackend,
        headers: Mapping[str, str],
        prompts: list[Prompt],
        output: OutputFormat,
        params: SamplingParams,
        id_prefix: str,
    ) -> Generation:
        unique = uuid.uuid4().hex
        response_id = f"{id_prefix}{request.request_id or unique}"
        # Ranks need a unique id for each request.
        run_id = f"{response_id}-{unique}" if request.request_id else response_id
        return Generation(
            response_id=response_id,
            is_chat=isinstance(request, ChatRequest),
            model=backend.model_name,
            system_fingerprint=self._settings.system_fingerprint,
            stream=bool(request.stream),
            include_usage=request.include_usage,
            continuous_usage=request.continuous_usage,
            choices=self._choices(request, backend, prompts, output, params, run_id),
            num_choices_per_prompt=request.n or 1,
            num_prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
            routing=_routing(request, backend, headers),
            grammar_param=output.param,
        )

    def _choices(
        self,
        request: CompletionRequest | ChatRequest,
        backend: EngineBackend,
        prompts: list[Prompt],
        output: OutputFormat,
        params: SamplingParams,
        run_id: str,
    ) -> list[Choice]:
        stop = self._sampling.stop_rules(request, params)
        shown = _shown(request)
        seed = request.seed if request.seed is not None else random.getrandbits(63)
        decoders = self._tokenizer.decoders
        skip = request.skip_special_tokens is not False and not output.keeps_special
        thinks = output.begins is not Thinking.CLOSED
        choices: list[Choice] = []
        for prompt in prompts:
            ids = prompt.token_ids
            max_tokens = self._max_tokens(request, len(ids), backend)
            for i in range(request.n or 1):
                index = len(choices)
                decoder = decoders.new(ids, skip_special_tokens=skip)
                choices.append(
                    Choice(
                        index,
                        f"{run_id}-{index}",
                        ids,
                        replace(params, max_tokens=max_tokens, seed=choice_seed(seed, i)),
                        NoText() if request.only_echo else TextStream(decoder, stop),
                        prompt.echo,
                        TokenReport(shown, decoders, ids, prompt.echo) if shown else None,
                        output.new_parser() if output.new_parser is not None else None,
                        ThoughtCounter(output.begins) if thinks else None,
                    )
                )
        return choices

    def _max_tokens(
        self,
        request: CompletionRequest | ChatRequest,
        num_prompt_tokens: int,
        backend: EngineBackend,
    ) -> int:
        limit = self._settings.max_prompt_tokens
        if limit is not None and num_prompt_tokens > limit:
            error = ContextLengthError(
                f"the prompt has {num_prompt_tokens} tokens, this server takes at most {limit}",
                param="messages" if isinstance(request, ChatRequest) else "prompt",
            )
            error.num_tokens, error.limit = num_prompt_tokens, limit
            raise error
        if request.only_echo:  # every request generates a token; it is dropped
            return fit_output(num_prompt_tokens, None, 1, backend)
        default = None if isinstance(request, ChatRequest) else DEFAULT_COMPLETION_TOKENS
        max_tokens = fit_output(num_prompt_tokens, request.output_limit, default, backend)
        min_tokens = request.min_tokens or 0
        if min_tokens > max_tokens:
            raise BadRequestError(
                f"min_tokens = {min_tokens} is more than max_tokens = {max_tokens}",
                param="min_tokens",
            )
        return max_tokens

    def _num_kept(
        self, request: CompletionRequest | ChatRequest, backend: EngineBackend
    ) -> int | None:
        """Return the number of prompt tokens to keep; None = all."""
        keep = request.truncate_prompt_tokens
        if keep != -1:
            return keep
        room = _context_length(backend) - (request.output_limit or 1)
        return max(min(room, self._settings.max_prompt_tokens or room), 1)

    def _check_choices(self, num_prompts: int, n: int) -> None:
        limit = self._settings.max_choices
        if num_prompts * n > limit:
            raise BadRequestError(
                f"{num_prompts} prompts times n = {n} are more than {limit} choices",
                param="n" if n > 1 else "prompt",
            )


def _shown(request: CompletionRequest | ChatRequest) -> Shown | None:
    shown = Shown(
        is_chat=isinstance(request, ChatRequest),
        logprobs=request.num_logprobs,
        prompt_logprobs=request.prompt_logprobs,
        token_ids=bool(request.return_token_ids),
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
    )
    return shown if shown.anything else None


def _routing(
    request: GenerationRequest, backend: EngineBackend, headers: Mapping[str, str]
) -> dict[str, Any]:
    """Return the options that the request sets; the backend has the defaults."""
    routing: dict[str, Any] = {}
    if request.priority:
        routing["priority"] = request.priority
    if request.cache_salt:
        check_text(request.cache_salt, "cache_salt")
        routing["cache_salt"] = request.cache_salt
    rank = headers.get(RANK_HEADER)
    if rank is not None:
        is_number = rank.isascii() and rank.isdecimal() and len(rank) < 10
        if not is_number or int(rank) >= backend.num_ranks:
            raise BadRequestError(
                f"{RANK_HEADER} must be a rank from 0 to {backend.num_ranks - 1}, got {rank[:40]!r}",
                param=RANK_HEADER,
            )
        routing["rank"] = int(rank)
    return routing


def fit_output(
    num_prompt_tokens: int, requested: int | None, default: int | None, backend: EngineBackend
) -> int:
    """Return max_tokens of one prompt. Raises ContextLengthError if prompt and output do not fit.

    The max_tokens of a client must fit. A default (None = as long as possible) is cut.
    """
    limit = _context_length(backend)
    if num_prompt_tokens == 0:
        raise BadRequestError("the prompt is empty: it has no tokens", param="prompt")
    room = limit - num_prompt_tokens
    if room >= max(requested or 1, 1):
        return requested or min(default or room, room)
    what = f"this model's maximum context length is {backend.max_model_len} tokens"
    if limit < backend.max_model_len:
        what += f", of which the KV cache of a rank holds {limit}"
    asked = f"the prompt has {num_prompt_tokens} tokens"
    if requested is not None and room > 0:
        asked += f" and {requested} output tokens are wanted; lower max_tokens"
    else:
        asked += "; shorten it"
    error = ContextLengthError(f"{what}, but {asked}", param="max_tokens" if room > 0 else "prompt")
    error.num_tokens, error.limit = num_prompt_tokens, limit - (requested or 1)
    raise error


def _context_length(backend: EngineBackend) -> int:
    """Return the limit of prompt and output together."""
    return min(backend.max_model_len, backend.max_request_tokens)


def choice_seed(seed: int, i: int) -> int:
    """Return the seed of the i-th choice of a prompt, in [0, 2**63). Choice 0 has the seed of the request."""
    seed &= _SEED_MASK
    if i == 0:
        return seed
    mixed = (seed + i * 0x9E3779B97F4A7C15) & (2**64 - 1)  # splitmix64: any two i differ widely
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (mixed ^ (mixed >> 31)) & _SEED_MASK


def check_model(name: str | None, backend: EngineBackend) -> None:
    if name is not None and name != backend.model_name:
        raise NotFoundError(
            f"the model {name[:200]!r} does not exist; this server has {backend.model_name!r}",
            param="model",
            code="model_not_found",
        )
