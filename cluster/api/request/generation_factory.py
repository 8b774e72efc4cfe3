"""Makes a `Generation` of a draft: its grammar compiles, and each choice has its seed, decoder and parser.

Knows nothing of HTTP responses or of how the engine runs the choices.
"""

import asyncio
import random
import uuid
from dataclasses import replace
from typing import Any, Protocol

from cluster.api.answer.detokenizer import NoText, TextStream
from cluster.api.answer.generation import Choice, Generation
from cluster.api.answer.logprobs import Shown, TokenReport
from cluster.api.answer.reasoning import Thinking, ThoughtCounter
from cluster.api.backend import EngineBackend
from cluster.api.request.draft import Draft, Drafter
from cluster.api.request.grammar_check import GrammarChecker
from cluster.api.request.protocol import (
    ChatRequest,
    CompletionRequest,
    check_text,
)
from cluster.api.request.sender import Sender
from cluster.errors import BadRequestError, ForbiddenError

RANK_HEADER = "x-data-parallel-rank"
SESSION_HEADER = "x-session-id"
_SEED_MASK = 2**63 - 1
_CHOICES_AT_ONCE = 64


class GenerationFactory:
    """Makes generations of drafts, in the event loop of one ingress."""

    def __init__(self, drafter: Drafter, checker: GrammarChecker) -> None:
        self._settings = drafter.settings
        self._decoders = drafter.tokenizer.decoders
        self._formats = drafter.formats
        self._checker = checker

    async def generation(
        self,
        draft: Draft,
        backend: EngineBackend,
        sender: Sender,
        *,
        id_prefix: str = "",
    ) -> Generation:
        """Make the generation of a draft; `id_prefix` is the beginning of the answer's id.

        Choices of prompt p are numbered from p * n. Raises BadRequestError for a grammar that does not compile.
        """
        for check in draft.output.checks:
            await self._checker.check(check, sender)
        request = draft.request
        is_chat = isinstance(request, ChatRequest)
        unique = uuid.uuid4().hex
        response_id = (id_prefix or ("chatcmpl-" if is_chat else "cmpl-")) + (
            request.request_id or unique
        )
        # Ranks need a unique id for each request.
        run_id = f"{response_id}-{unique}" if request.request_id else response_id
        return Generation(
            response_id=response_id,
            is_chat=is_chat,
            model=request.model or backend.model_name,
            system_fingerprint=self._settings.system_fingerprint,
            stream=bool(request.stream),
            include_usage=request.include_usage,
            continuous_usage=request.continuous_usage,
            choices=await self._choices(draft, run_id),
            num_choices_per_prompt=request.n or 1,
            num_prompt_tokens=sum(len(prompt.token_ids) for prompt in draft.prompts),
            num_image_tokens=sum(image.num_tokens for image in draft.images)
            - draft.num_video_tokens,
            num_video_tokens=draft.num_video_tokens,
            routing=routing_of(request, backend, sender, request.session) | _images_of(draft),
            grammar_param=draft.output.param,
        )

    async def _choices(self, draft: Draft, run_id: str) -> list[Choice]:
        request, output = draft.request, draft.output
        shown = _shown(request)
        seed = request.seed if request.seed is not None else random.getrandbits(63)
        decoders = self._decoders
        skip = request.skip_special_tokens is not False and not output.keeps_special
        thinks = output.begins is not Thinking.CLOSED
        choices: list[Choice] = []
        for prompt, max_tokens in zip(draft.prompts, draft.max_tokens, strict=True):
            ids = prompt.token_ids.tolist()
            for i in range(request.n or 1):
                index = len(choices)
                if index and (i == 0 or index % _CHOICES_AT_ONCE == 0):
                    await asyncio.sleep(0)  # streams go on meanwhile
                decoder = decoders.new(ids, skip_special_tokens=skip)
                params = replace(draft.params, max_tokens=max_tokens, seed=choice_seed(seed, i))
                choices.append(
                    Choice(
                        index,
                        f"{run_id}-{index}",
                        ids,
                        params,
                        NoText() if request.only_echo else TextStream(decoder, draft.stop),
                        prompt.echo,
                        TokenReport(shown, decoders, ids, prompt.echo) if shown else None,
                        None if output.parsing is None else self._formats.parser(output.parsing),
                        ThoughtCounter(output.begins) if thinks else None,
                    )
                )
        return choices


def _images_of(draft: Draft) -> dict[str, Any]:
    return {"images": draft.images} if draft.images else {}


def _shown(request: CompletionRequest | ChatRequest) -> Shown | None:
    shown = Shown(
        is_chat=isinstance(request, ChatRequest),
        logprobs=request.num_logprobs,
        prompt_logprobs=request.prompt_logprobs,
        token_ids=bool(request.return_token_ids),
        tokens_as_ids=bool(request.return_tokens_as_token_ids),
    )
    return shown if shown.anything else None


class Routed(Protocol):
    """The fields of a request that decide where and how its sequences run."""

    @property
    def model(self) -> str | None: ...
    @property
    def priority(self) -> int | None: ...
    @property
    def cache_salt(self) -> str | None: ...


def routing_of(
    request: Routed, backend: EngineBackend, sender: Sender, session: str = ""
) -> dict[str, Any]:
    """Return the options that a request sets; the backend has the defaults.

    session   its name in the body; that of the header counts first
    """
    routing: dict[str, Any] = {}
    if request.model is not None and request.model != backend.model_name:
        routing["adapter"] = request.model
    if request.priority:
        _check_routes(sender, "priority")
        routing["priority"] = request.priority
    if request.cache_salt:
        check_text(request.cache_salt, "cache_salt")
    if salt := ":".join(filter(None, (sender.salt, request.cache_salt))):
        routing["cache_salt"] = salt
    if session := sender.headers.get(SESSION_HEADER, session):
        routing["session"] = session
    rank = sender.headers.get(RANK_HEADER)
    if rank is not None:
        _check_routes(sender, RANK_HEADER)
        is_number = rank.isascii() and rank.isdecimal() and len(rank) < 10
        if not is_number or int(rank) >= backend.num_ranks:
            raise BadRequestError(
                f"{RANK_HEADER} must be a rank from 0 to {backend.num_ranks - 1}, got {rank[:40]!r}",
                param=RANK_HEADER,
            )
        routing["rank"] = int(rank)
    return routing


def _check_routes(sender: Sender, param: str) -> None:
    if not sender.routes:
        raise ForbiddenError(
            f"{param} is for operators on this server (serve.access.client_routing)", param=param
        )


def choice_seed(seed: int, i: int) -> int:
    """Return the seed of the i-th choice of a prompt, in [0, 2**63). Choice 0 has the seed of the request."""
    seed &= _SEED_MASK
    if i == 0:
        return seed
    mixed = (seed + i * 0x9E3779B97F4A7C15) & (2**64 - 1)  # splitmix64: any two i differ widely
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (mixed ^ (mixed >> 31)) & _SEED_MASK
