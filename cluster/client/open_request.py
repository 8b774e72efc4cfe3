"""A request in flight as its ingress sees it: all that is needed to submit it again, and its outputs.

Knows nothing of Ray, sockets or groups.
"""

import asyncio
from dataclasses import dataclass, field, replace

from cluster.client.router import Router
from workers.wire.request import EngineRequest, RequestOutput, SamplingParams, merge


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One request of a client.

    pinned   the rank that the client chose, if it did
    whole    `get` waits for the last output, because a wait for each output takes most of the time of an output
    rank     the rank that has the request, numbered over all groups by `router`
    place    its group, and its number there
    prefill_tokens  prompt tokens that count at the router until the first token
    attempt  how often the request was submitted; a rank must not see one request id twice
    emitted  every token that came, whether the client has it or not

    What `cluster.client.suspects` judges by:

    fresh           no token came in this attempt
    begun           the rank has begun this attempt, and sent no token
    on_trial        the rank runs it alone, see `EngineRequest`
    failures        failures of its rank in a row, without a token in between
    trial_failures  failures of its rank in a row while the request was begun and on trial
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int
    cache_salt: str
    pinned: int | None
    num_tokens: int
    whole: bool = False
    rank: int = 0
    place: tuple[int, int] = (0, 0)
    router: Router = field(init=False)
    prefill_tokens: int = 0
    attempt: int = 0
    emitted: list[int] = field(default_factory=list)
    fresh: bool = True
    begun: bool = False
    on_trial: bool = False
    failures: int = 0
    trial_failures: int = 0
    finished: bool = False
    _outputs: list[RequestOutput] = field(default_factory=list)
    _waiter: asyncio.Future[None] | None = None

    @property
    def wire_id(self) -> str:
        """The id of this attempt in its rank."""
        return f"{self.request_id}~{self.attempt}" if self.attempt > 1 else self.request_id

    def begin_attempt(self) -> None:
        """Count an attempt; `rank` and `place` are those of the attempt before."""
        self.attempt += 1
        self.fresh, self.begun = True, False

    def to_engine(self) -> EngineRequest:
        """The message of this attempt; the stream is named by the sender."""
        return EngineRequest(
            request_id=self.wire_id,
            ingress_id="",
            prompt_token_ids=self.prompt_token_ids,
            params=self.params,
            priority=self.priority,
            cache_salt=self.cache_salt,
            emitted_token_ids=self.emitted[:],
            on_trial=self.on_trial,
        )

    def put(self, output: RequestOutput) -> None:
        """Take the output of a step and wake the waiting `get`."""
        if self.fresh:
            if output.begins:
                self.begun = True
                return
            self.fresh = self.begun = self.on_trial = False
            self.end_prefill()
            self.failures = self.trial_failures = 0
            if self.emitted:
                # The first output of this attempt repeats what came with the first output of the request.
                output = replace(output, prompt_logprobs=None, num_cached_tokens=0)
        self.emitted.extend(output.token_ids)
        self.finished = output.finish_reason is not None
        self._outputs.append(output)
        if self._waiter is None or self._waiter.done() or (self.whole and not self.finished):
            return
        self._waiter.set_result(None)

    def begin_prefill(self, num_tokens: int) -> None:
        """Count tokens of the prompt at the router, until the first token of this attempt."""
        self.prefill_tokens = num_tokens
        self.router.begin_prefill(self.rank, num_tokens)

    def end_prefill(self) -> None:
        """Count the prompt no longer."""
        if self.prefill_tokens:
            self.router.end_prefill(self.rank, self.prefill_tokens)
            self.prefill_tokens = 0

    async def get(self) -> RequestOutput:
        """All outputs since the last `get`, merged: a slow ingress writes larger pieces, not more pieces."""
        if not self._outputs or (self.whole and not self.finished):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        outputs, self._outputs = self._outputs, []
        return outputs[0] if len(outputs) == 1 else merge(outputs)
