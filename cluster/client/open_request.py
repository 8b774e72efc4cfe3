"""A request in flight as its ingress sees it: all that is needed to submit it again, and its outputs.

Knows nothing of Ray, sockets or groups.
"""

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field, replace

from cluster.client.refusals import request_digest
from cluster.client.router import Place, RankLoad, Router, Tail
from workers.wire.request import (
    EngineRequest,
    ImageInput,
    PoolingParams,
    RequestOutput,
    SamplingParams,
    merge,
)


@dataclass(slots=True, eq=False)
class OpenRequest:
    """One request of a client.

    pinned   the rank that the client chose, if it did
    adapter  id of its LoRA adapter; 0 for none
    images   of its prompt, kept for further attempts
    session  name that the requests of one session share; "" without one
    apart    the prompt of a request that another group may go on with; where its group cannot go on at once, the other
             group computes it
    hands_over  its end means that other ranks find its KV, see `EngineRequest`
    kv_source   where its KV was handed over, see `EngineRequest`
    whole    `get` waits for the last output, because a wait for each output takes most of the time of an output
    load     counts the request at the rank that has it
    prefill_tokens  prompt tokens that count there until the first token
    tail     end of the prompt, behind which its rank keeps the answer in its cache
    attempt  how often the request was submitted; a rank must not see one request id twice
    emitted  every token that came, whether the client has it or not

    What `cluster.client.suspects` judges by:

    fresh           no token came in this attempt
    begun           the rank has begun this attempt, and sent no token
    on_trial        the rank runs it alone, see `EngineRequest`
    failures        failures of its rank in a row, without a token in between
    trial_failures  failures, without a token in between, while the request or another one of its digest was begun and
                    on trial
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int
    cache_salt: str
    pinned: Place | None
    num_tokens: int
    whole: bool = False
    apart: bool = False
    hands_over: bool = False
    kv_source: str = ""
    pooling: PoolingParams | None = None
    adapter: int = 0
    images: tuple[ImageInput, ...] = ()
    session: str = ""
    load: RankLoad = field(default_factory=lambda: RankLoad((0, 0)))
    prefill_tokens: int = 0
    tail: Tail = field(default_factory=lambda: Tail(0, []))
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
    def digest(self) -> bytes:
        """The same for all requests that would do the same to a rank."""
        return request_digest(self.prompt_token_ids, self.params, self.adapter, self.images)

    @property
    def place(self) -> Place:
        """The group that has the request, and the rank there."""
        return self.load.place

    @property
    def may_leave(self) -> bool:
        """Whether another group can go on with it when its group fails, see `cluster.client.suspects`."""
        bound = self.apart or self.pinned is not None
        return not (self.finished or bound or self.begun or self.on_trial or self.failures)

    @property
    def wire_id(self) -> str:
        """The id of this attempt in its rank."""
        return f"{self.request_id}~{self.attempt}" if self.attempt > 1 else self.request_id

    @property
    def router_salt(self) -> str:
        """The salt of the prefixes that the router remembers: adapters share none."""
        return f"{self.adapter}:{self.cache_salt}" if self.adapter else self.cache_salt

    @property
    def router_tokens(self) -> list[int]:
        """The prompt as the router compares it: equal images alone have equal first tokens."""
        if not self.images:
            return self.prompt_token_ids
        tokens = self.prompt_token_ids[:]
        for image in self.images:
            tokens[image.offset] = int.from_bytes(image.digest[:8])
        return tokens

    def prompt_part(self, max_model_len: int) -> "OpenRequest":
        """The prompt and its first token as a request of its own, of a request that has had no attempt."""
        num_prompt = len(self.prompt_token_ids)
        return replace(
            self,
            params=replace(self.params, max_tokens=1),
            num_tokens=num_prompt + 1,
            apart=True,
            hands_over=min(self.params.max_tokens, max_model_len - num_prompt) > 1,
            whole=False,
            emitted=[],
            _outputs=[],
        )

    def follow(self, part: "OpenRequest") -> None:
        """Go on behind the outputs of the prompt part, in a group that has not seen this request."""
        self.attempt = part.attempt  # a group that computes both sees two ids
        self.emitted, self.kv_source = part.emitted, part.kv_source

    def begin_attempt(self) -> None:
        """Count an attempt; `load` is that of the attempt before."""
        self.attempt += 1
        self.fresh, self.begun = True, False

    def to_engine(self) -> EngineRequest:
        """The message of this attempt; the stream is named by the sender."""
        return EngineRequest(
            request_id=self.wire_id,
            ingress_id="",
            prompt_token_ids=self.prompt_token_ids,
            params=self.params,
            pooling=self.pooling,
            priority=self.priority,
            cache_salt=self.cache_salt,
            adapter=self.adapter,
            images=self.images,
            emitted_token_ids=self.emitted[:],
            on_trial=self.on_trial,
            hands_over=self.hands_over,
            kv_source=self.kv_source,
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
        self.kv_source = output.kv_source or self.kv_source
        self.finished = output.finish_reason is not None
        self._outputs.append(output)
        if self._waiter is None or self._waiter.done() or (self.whole and not self.finished):
            return
        self._waiter.set_result(None)

    def route(self, router: Router, groups: Collection[int]) -> None:
        """Begin an attempt on a rank of `groups`, and count the prompt there until the attempt's first token."""
        self.begin_attempt()
        pick = router.pick(
            self.router_tokens,
            self.num_tokens - len(self.prompt_token_ids),
            cache_salt=self.router_salt,
            pinned=self.pinned,
            groups=groups,
            session=self.session,
        )
        self.load, self.prefill_tokens, self.tail = pick.load, pick.prefill, pick.tail
        pick.load.begin_prefill(pick.prefill)

    def end_prefill(self) -> None:
        """Count the prompt no longer."""
        if self.prefill_tokens:
            self.load.end_prefill(self.prefill_tokens)
            self.prefill_tokens = 0

    def release(self) -> None:
        """Count the request no longer at its rank."""
        self.load.release(self.num_tokens)
        self.end_prefill()

    async def get(self) -> RequestOutput:
        """All outputs since the last `get`, merged: a slow ingress writes larger pieces, not more pieces."""
        if not self._outputs or (self.whole and not self.finished):
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        outputs, self._outputs = self._outputs, []
        return outputs[0] if len(outputs) == 1 else merge(outputs)
