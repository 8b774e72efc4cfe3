"""What travels between an ingress and a rank: plain, picklable, small."""

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to pick tokens. Validated at the ingress; the rank trusts it.

    temperature 0 is greedy. top_k 0 and top_p 1 and min_p 0 switch that filter off. The random number of a
    token depends on (seed, its position in the sequence) alone.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """One sequence to continue. `ingress_id` names the stream that its tokens leave by."""

    request_id: str
    ingress_id: str
    prompt_token_ids: list[int]
    params: SamplingParams = field(repr=False)


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step gave one request. The last one of a request has a finish_reason.

    A token of `stop_token_ids` ends the request and is the last of `token_ids`; `error` explains finish_reason "error".
    """

    request_id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    error: str | None = None
