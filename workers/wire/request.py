"""Messages between an ingress and a rank: plain, picklable, small."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

MAX_EXPECTED_OUTPUT = 512
"""Bounds the output that a request is expected to have, because most answers end long before a large max_tokens: a chat
without max_tokens may fill the context, and would count as much as a dozen other requests."""

PROBE_PREFIX = "probe-"
"""Of the ids of readiness probes; requests of clients have ids with other prefixes."""

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of a request. The ingress validates them; the rank trusts them.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 switch their filter off. The random number of a token depends
    on its seed and its position in the sequence alone.

    min_tokens          output tokens before which no token of stop_token_ids can be drawn
    presence_penalty, frequency_penalty   subtracted from the logits of output tokens (0 = off)
    repetition_penalty  divides positive logits of prompt and output tokens, multiplies negative ones (1 = off)
    logit_bias          (token id, bias) pairs added to the logits
    allowed_token_ids   the only tokens that can be drawn, in rising order; None = all
    bad_words_ids       token ids of words: the last token cannot be drawn where the output ends with the tokens before
    logprobs            alternatives to report for each output token; 0 = the token alone, None = nothing
    prompt_logprobs     alternatives to report for each prompt token; 0 = the token alone, None = nothing
    grammar             llguidance's JSON grammar that the output matches; None = any output
    prediction_token_ids  text that the output may repeat, for drafts; it changes no token
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str | None = None
    prediction_token_ids: tuple[int, ...] = ()

    @property
    def has_penalties(self) -> bool:
        """Return whether any of the three penalties has an effect."""
        return bool(
            self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        )


PoolingRows = Literal["last", "mean", "cls"]
PoolingOutput = Literal["embedding", "classes", "tokens"]


@dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """The vector that a request ends with, in the place of tokens. The ingress validates; the rank trusts.

    rows         tokens of the prompt with hidden states that count: the last one, the mean of all, the first one
    output       embedding = the pooled state; classes = the logits of the classification head; tokens = the logit of
                 the one token of `token_ids`, or the logit of the second token less that of the first
    dimensions   of an embedding, the first values that are kept; None = all
    normalize    divide an embedding by its length, after the cut
    """

    rows: PoolingRows = "last"
    output: PoolingOutput = "embedding"
    token_ids: tuple[int, ...] = ()
    dimensions: int | None = None
    normalize: bool = False

    def hidden_rows(self, start: int, end: int, *, last: bool) -> range:
        """Return the rows of a step that count, from 0, if the step computes the tokens from `start` to `end`.

        last   it computes the last token of the prompt
        """
        if self.rows == "mean":
            return range(end - start)
        if self.rows == "cls":
            return range(int(start == 0))
        return range(end - start - last, end - start)


NO_OUTPUT = SamplingParams(max_tokens=0)
"""Sampling parameters of a request with PoolingParams, which draws no token."""


@dataclass(frozen=True, kw_only=True)
class ImageInput:
    """An image of a prompt, or the frames of a video, as patches for the vision tower.

    offset      of its first token in the prompt; all its tokens are placeholders of one id
    num_tokens  the rows of the tower's output, a row for each of its tokens
    grid_thw    patches along time, height and width, before the tower merges them
    digest      of the pixels as they were before the cut into patches, and of all settings of the processor
    pixels      uint8 [t * h * w, patch_dim] in the order of the processor, from 0 to 255; the rank rescales them
    """

    offset: int
    num_tokens: int
    grid_thw: tuple[int, int, int]
    digest: bytes
    pixels: bytes = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """One sequence to continue. `ingress_id` names the stream that carries its new tokens.

    pooling            the sequence ends with its prompt and answers with a vector; None: it generates

    priority           smaller values run first; equal values run in order of arrival
    cache_salt         only requests of one salt share cached prefixes
    images             in the order of their offsets; a rank makes their embeddings before it schedules the request
    adapter            id of the LoRA adapter of all its tokens; 0: none. Only requests of one adapter share prefixes
    emitted_token_ids  output tokens that an earlier epoch sent: they count as output everywhere, and only tokens
                       after them are published
    on_trial           the rank runs it alone among requests without a token, until its first token
    hands_over         another rank goes on behind the last token: where KV leaves the device, finish_reason "length"
                       comes in an output of its own, once the KV can be found there
    kv_source          where the rank that handed the request over offers its KV to other nodes; "": nowhere
    """

    request_id: str
    ingress_id: str
    prompt_token_ids: list[int]
    params: SamplingParams = field(repr=False)
    pooling: PoolingParams | None = None
    priority: int = 0
    cache_salt: str = ""
    adapter: int = 0
    images: tuple[ImageInput, ...] = ()
    emitted_token_ids: list[int] = field(default_factory=list)
    on_trial: bool = False
    hands_over: bool = False
    kv_source: str = field(default="", repr=False)

    @property
    def needs_every_row(self) -> bool:
        """Return whether rows count that a hit in the prefix cache leaves out, until the first output was sent."""
        if self.pooling is not None:
            return self.pooling.rows != "last"
        return self.params.prompt_logprobs is not None

    @property
    def is_probe(self) -> bool:
        """Return whether this is a readiness probe, which no metric of requests or tokens counts."""
        return self.request_id.startswith(PROBE_PREFIX)


class TokenLogprobs(NamedTuple):
    """Natural log-probability of a token, before temperature and filters, and the most probable tokens.

    rank is 1 for the most probable token of the vocabulary; top_ids and top_logprobs are in falling order.
    """

    logprob: float
    rank: int
    top_ids: list[int]
    top_logprobs: list[float]


class RequestTimes(NamedTuple):
    """Seconds of one request in its rank: arrival to first step, first step to first token, first token to end."""

    queue: float
    prefill: float
    decode: float


@dataclass(
    slots=True
)  # Not frozen: one is made for each token on either side, and `frozen` takes 0.7 us of 0.9.
class RequestOutput:
    """Output of one step for one request. The last output of a request has a finish_reason.

    A token of `stop_token_ids` ends the request and is the last of `token_ids`; `error` explains finish_reason "error".
    An output with neither tokens nor finish_reason: the rank begins the request.

    logprobs           one entry for each of `token_ids`, if requested
    prompt_logprobs    in the first output, if requested: one entry for each prompt token, None for the first token
    num_cached_tokens  in the first output: prompt tokens found in the prefix cache
    times              in the last output of a request with tokens or a vector
    drafts             drafts of the step that the model confirmed, and that it did not; None: the step had none
    kv_source          in the last output of a request that hands over, see EngineRequest
    vector             float32 [n], in the one output of a request with PoolingParams
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    times: RequestTimes | None = None
    drafts: tuple[int, int] | None = None
    kv_source: str = ""
    vector: np.ndarray | None = field(default=None, compare=False)

    @property
    def begins(self) -> bool:
        """Return whether this is the notice that the rank begins the request."""
        return not self.token_ids and self.finish_reason is None


def merge(outputs: list[RequestOutput]) -> RequestOutput:
    """Return successive outputs of one request as one output."""
    first, last = outputs[0], outputs[-1]
    logprobs = [item for output in outputs for item in output.logprobs or ()]
    drafts = [output.drafts for output in outputs if output.drafts is not None]
    return RequestOutput(
        first.request_id,
        [token for output in outputs for token in output.token_ids],
        last.finish_reason,
        last.error,
        logprobs if first.logprobs is not None else None,
        first.prompt_logprobs,
        first.num_cached_tokens,
        last.times,
        (sum(d[0] for d in drafts), sum(d[1] for d in drafts)) if drafts else None,
        last.kv_source,
        last.vector,
    )


def expected_output(params: SamplingParams) -> int:
    """Return the output tokens with which a request counts in the load of a rank."""
    return min(params.max_tokens, MAX_EXPECTED_OUTPUT)
