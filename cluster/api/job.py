"""Turn a checked request into a job: tokenised prompts, sampling parameters, one text per choice.

Knows nothing of HTTP responses or of how the engine runs the choices.
"""

import asyncio
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from cluster.api.backend import EngineBackend
from cluster.api.protocol import ChatRequest, CompletionRequest, GenerationRequest, check_text
from cluster.api.settings import ApiSettings
from cluster.api.tokenizer import ServingTokenizer
from cluster.detokenizer import StopRules, TextStream
from cluster.errors import BadRequestError, ContextLengthError, NotFoundError
from workers.request import SamplingParams

DEFAULT_COMPLETION_TOKENS = 16  # the public API's own default
_SEED_MASK = 2**63 - 1
_GREEDY_BELOW = 1e-5  # dividing float32 logits by less overflows; the limit is greedy anyway
_Result = TypeVar("_Result")


@dataclass(slots=True)
class Choice:
    """One sequence to generate and its text so far."""

    index: int
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    text: TextStream
    echo: str = ""
    """Shown before the first token."""


@dataclass(slots=True, kw_only=True)
class Job:
    """One request of a client, ready to run."""

    response_id: str
    is_chat: bool
    model: str
    system_fingerprint: str
    stream: bool
    include_usage: bool
    choices: list[Choice]
    num_prompt_tokens: int
    created: int = field(default_factory=lambda: int(time.time()))
    started: float = field(default_factory=time.perf_counter)

    @property
    def num_completion_tokens(self) -> int:
        """Of all choices so far."""
        return sum(choice.text.num_tokens for choice in self.choices)


class JobFactory:
    """Makes jobs of one ingress's tokenizer and settings."""

    def __init__(self, tokenizer: ServingTokenizer, settings: ApiSettings) -> None:
        self._tokenizer = tokenizer
        self._settings = settings

    async def completion(self, request: CompletionRequest, backend: EngineBackend) -> Job:
        """A job of /v1/completions. Choices of prompt p are numbered from p * n."""
        _check_model(request.model, backend)
        prompts = request.prompts()
        self._check_choices(len(prompts), request.n or 1)
        token_ids = await self._prompt_token_ids(prompts, request.add_special_tokens is not False)
        echoes = [""] * len(prompts)
        if request.echo:
            echoes = [
                prompt if isinstance(prompt, str) else self._tokenizer.decode(prompt)
                for prompt in prompts
            ]
        requested, default = request.max_tokens, DEFAULT_COMPLETION_TOKENS
        return self._job(request, backend, token_ids, echoes, requested, default, is_chat=False)

    async def chat(self, request: ChatRequest, backend: EngineBackend) -> Job:
        """A job of /v1/chat/completions."""
        _check_model(request.model, backend)
        self._check_choices(1, request.n or 1)
        messages = request.parsed_messages()
        template_kwargs = request.chat_template_kwargs or {}

        def encode() -> list[int]:
            text = self._tokenizer.render_chat(messages, template_kwargs)
            check_text(text, "messages")
            # The template writes the special tokens itself.
            return self._tokenizer.encode(text, add_special_tokens=bool(request.add_special_tokens))

        num_chars = sum(len(message["content"]) for message in messages)
        token_ids = await self._maybe_in_thread(encode, num_chars)
        limit = request.output_limit
        return self._job(request, backend, [token_ids], [""], limit, None, is_chat=True)

    async def _prompt_token_ids(
        self, prompts: list[str | list[int]], add_special_tokens: bool
    ) -> list[list[int]]:
        for prompt in prompts:
            if isinstance(prompt, str):
                check_text(prompt, "prompt")
            else:
                self._check_token_ids(prompt, "prompt")

        def encode() -> list[list[int]]:
            return [
                self._tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
                if isinstance(prompt, str)
                else prompt
                for prompt in prompts
            ]

        num_chars = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        return await self._maybe_in_thread(encode, num_chars)

    async def _maybe_in_thread(self, call: Callable[[], _Result], num_chars: int) -> _Result:
        if num_chars <= self._settings.inline_tokenize_chars:
            return call()  # a thread would cost more than the work
        return await asyncio.to_thread(call)

    def _job(
        self,
        request: GenerationRequest,
        backend: EngineBackend,
        prompts: list[list[int]],
        echoes: list[str],
        requested: int | None,
        default: int | None,
        *,
        is_chat: bool,
    ) -> Job:
        settings = self._settings
        stops = request.stop_strings(settings.max_stop_strings, settings.max_stop_chars)
        response_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}"
        seed = request.seed if request.seed is not None else random.getrandbits(63)
        choices: list[Choice] = []
        for token_ids, echo in zip(prompts, echoes, strict=True):
            max_tokens = fit_output(len(token_ids), requested, default, backend)
            params = self._sampling_params(request, max_tokens)
            for i in range(request.n or 1):
                index = len(choices)
                decoder = self._tokenizer.decoders.new(token_ids)
                choices.append(
                    Choice(
                        index,
                        f"{response_id}-{index}",
                        token_ids,
                        replace(params, seed=choice_seed(seed, i)),
                        TextStream(
                            decoder, StopRules(strings=stops, token_ids=params.stop_token_ids)
                        ),
                        echo,
                    )
                )
        return Job(
            response_id=response_id,
            is_chat=is_chat,
            model=backend.model_name,
            system_fingerprint=settings.system_fingerprint,
            stream=bool(request.stream),
            include_usage=request.include_usage,
            choices=choices,
            num_prompt_tokens=sum(map(len, prompts)),
        )

    def _sampling_params(self, request: GenerationRequest, max_tokens: int) -> SamplingParams:
        stop_ids = frozenset(request.stop_token_ids or ())
        self._check_token_ids(stop_ids, "stop_token_ids")
        if not request.ignore_eos:
            stop_ids |= self._tokenizer.eos_token_ids
        defaults = self._settings.default_sampling

        def value(name: str, neutral: float) -> float:
            given = getattr(request, name)
            return given if given is not None else defaults.get(name, neutral)

        temperature = value("temperature", 1.0)
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0 if temperature < _GREEDY_BELOW else float(temperature),
            top_p=float(value("top_p", 1.0)),
            top_k=max(int(value("top_k", 0)), 0),
            min_p=float(value("min_p", 0.0)),
            stop_token_ids=stop_ids,
        )

    def _check_token_ids(self, token_ids: list[int] | frozenset[int], param: str) -> None:
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= self._tokenizer.vocab_size):
            size = self._tokenizer.vocab_size
            wrong = next(i for i in token_ids if not 0 <= i < size)
            shown = wrong if abs(wrong) < 10**20 else "a huge number"
            raise BadRequestError(
                f"{param}: token id {shown} is not in the vocabulary of {size} ids", param=param
            )

    def _check_choices(self, num_prompts: int, n: int) -> None:
        limit = self._settings.max_choices
        if num_prompts * n > limit:
            raise BadRequestError(
                f"{num_prompts} prompts times n = {n} are more than {limit} choices",
                param="n" if n > 1 else "prompt",
            )


def fit_output(
    num_prompt_tokens: int, requested: int | None, default: int | None, backend: EngineBackend
) -> int:
    """max_tokens of one prompt; a ContextLengthError when it cannot be.

    What the client asks for must fit as it is. A default (None = as long as possible) is cut.
    """
    limit = min(backend.max_model_len, backend.max_request_tokens)
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
        asked += f" and {requested} output tokens are asked for; lower max_tokens"
    else:
        asked += "; shorten it"
    raise ContextLengthError(f"{what}, but {asked}", param="max_tokens" if room > 0 else "prompt")


def choice_seed(seed: int, i: int) -> int:
    """The seed of the i-th choice of a prompt, in [0, 2**63). Choice 0 has the request's own."""
    seed &= _SEED_MASK
    if i == 0:
        return seed
    mixed = (seed + i * 0x9E3779B97F4A7C15) & (2**64 - 1)  # splitmix64: any two i differ widely
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (mixed ^ (mixed >> 31)) & _SEED_MASK


def _check_model(name: str | None, backend: EngineBackend) -> None:
    if name is not None and name != backend.model_name:
        raise NotFoundError(
            f"the model {name[:200]!r} does not exist; this server has {backend.model_name!r}",
            param="model",
            code="model_not_found",
        )
