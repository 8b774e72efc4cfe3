"""The answer to one request of a client while the engine generates it. Knows nothing of engines or HTTP."""

import time
from dataclasses import dataclass, field
from typing import Any

from cluster.api.answer.detokenizer import NoText, TextStream
from cluster.api.answer.logprobs import TokenReport
from cluster.api.answer.message_parser import MessageParser
from cluster.api.answer.pooled_vector import PooledVector
from cluster.api.answer.reasoning import ThoughtCounter
from workers.wire.request import PoolingParams, SamplingParams


@dataclass(slots=True)
class Choice:
    """One sequence of a request, and its text so far.

    echo    shown before the first token
    report  the logprobs and ids shown beside the text; None = none
    parser  makes a chat message of the text; None = the text is the content
    thought counts the tokens of the thought at the beginning; None = the answer has no thought
    num_accepted, num_rejected   drafts that the model confirmed, and that it did not
    pooling makes the vector that is the answer; None = the answer has tokens
    """

    index: int
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    text: TextStream | NoText | PooledVector
    echo: str = ""
    report: TokenReport | None = None
    parser: MessageParser | None = None
    thought: ThoughtCounter | None = None
    pooling: PoolingParams | None = None
    num_cached_tokens: int = 0
    num_accepted: int = 0
    num_rejected: int = 0

    def count_drafts(self, accepted: int, rejected: int) -> None:
        """Count drafts of one step."""
        self.num_accepted += accepted
        self.num_rejected += rejected

    @property
    def drafts(self) -> dict[str, int]:
        """The fields of usage about drafts; none without drafts."""
        return draft_fields(self.num_accepted, self.num_rejected)

    @property
    def num_reasoning_tokens(self) -> int:
        """Output tokens of the thought so far, with its tags."""
        return 0 if self.thought is None else self.thought.num_tokens

    @property
    def finish_reason(self) -> str | None:
        """The finish reason of the answer; None while the engine generates."""
        reason = self.text.finish_reason
        if reason is None or self.parser is None:
            return reason
        return self.parser.finish_reason(reason)


@dataclass(slots=True, kw_only=True)
class Generation:
    """All choices of one request, ready to run.

    continuous_usage  every item of the stream has token counts
    num_image_tokens, num_video_tokens   of the prompt's tokens
    routing           the options of `EngineBackend.generate`
    grammar_param     the field of the request that the grammar comes from, if there is a grammar
    """

    response_id: str
    is_chat: bool
    model: str
    system_fingerprint: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    choices: list[Choice]
    num_choices_per_prompt: int
    num_prompt_tokens: int
    routing: dict[str, Any]
    num_image_tokens: int = 0
    num_video_tokens: int = 0
    grammar_param: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    started: float = field(default_factory=time.perf_counter)

    @property
    def has_details(self) -> bool:
        """Whether the answer carries more than text and finish reason."""
        choice = self.choices[0]
        return (
            self.continuous_usage
            or choice.report is not None
            or choice.parser is not None
            or choice.pooling is not None
        )

    @property
    def num_completion_tokens(self) -> int:
        """Output tokens of all choices so far."""
        return sum(choice.text.num_tokens for choice in self.choices)

    @property
    def num_reasoning_tokens(self) -> int:
        """Output tokens of all thoughts so far."""
        return sum(choice.num_reasoning_tokens for choice in self.choices)

    @property
    def drafts(self) -> dict[str, int]:
        """The fields of usage about drafts of all choices so far; none without drafts."""
        return draft_fields(
            sum(choice.num_accepted for choice in self.choices),
            sum(choice.num_rejected for choice in self.choices),
        )

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were found in the prefix cache; each prompt counts once."""
        firsts = self.choices[:: self.num_choices_per_prompt]
        return sum(choice.num_cached_tokens for choice in firsts)


def draft_fields(accepted: int, rejected: int) -> dict[str, int]:
    """Return OpenAI's fields of usage about drafts; none without drafts."""
    if not accepted + rejected:
        return {}
    return {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected}
