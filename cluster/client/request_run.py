"""Runs a request on the groups of the pool: whole on one group, or its prompt apart from what follows.

In a pool with the roles prefill and decode, a prefill group computes a prompt and its first token. The request then
goes on in a decode group as it would go on in a new epoch, with the first token as one that was emitted. The decode
group takes the KV of the prompt from the memory that the ranks of a node share, under the keys of the prompt's blocks,
which follow from its tokens. Whatever fails on the prefill side, the decode group computes the prompt itself, so no
answer depends on a prefill group.

When ranks of a group fail, another group goes on with its requests in the same way, rather than after the rebuild. The
ranks of all groups can compute all of a request, so a prefill group goes on where no other group can. Knows nothing of
Ray and sockets.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Literal

from cluster.client.group_client import POISON, GroupClient
from cluster.client.open_request import OpenRequest
from cluster.client.router import Router
from cluster.errors import EngineDeadError, PoisonRequestError
from workers.wire.request import RequestOutput, RequestTimes, merge

logger = logging.getLogger(__name__)

LOCAL_TOKENS = 256
"""Prompt tokens that a decode group computes itself: a step of decodes with so many more takes hardly longer on a GPU,
because it is bound by reading the weights, and a hand-over takes two more messages and a copy."""

PromptPlace = Literal["prefill", "decode", "decode after a failed prefill"]
Outputs = AsyncGenerator[RequestOutput, None]


@dataclass
class RequestRuns:
    """Runs the requests of one ingress.

    groups         of the pool
    available      available(): numbers of the groups that can answer a request, as soon as there is one
    max_model_len  max_model_len(): tokens of the longest sequence
    left           left(group): a request has left this group
    count          count(place): where the prompt of a request was computed, in a pool with the role prefill
    """

    groups: Sequence[GroupClient]
    router: Router
    available: Callable[[], Awaitable[Collection[int]]]
    max_model_len: Callable[[], int]
    left: Callable[[GroupClient], None]
    count: Callable[[PromptPlace], None]

    async def run(self, request: OpenRequest, among: Collection[int]) -> Outputs:
        """The outputs of a request; one of the groups `among` answers it."""
        prompt: RequestOutput | None = None
        if self._prompt_goes_apart(request, among):
            async with aclosing(self._prompt(request)) as outputs:
                async for output in outputs:
                    prompt = output if prompt is None else merge([prompt, output])
                    if output.token_ids and not request.whole:
                        yield output
            if prompt is not None and prompt.finish_reason is not None:
                if request.whole or not prompt.token_ids:
                    yield prompt
                return
            among = await self.available()  # the groups may have changed meanwhile
        async with aclosing(self._on_group(request, among)) as outputs:
            async for output in outputs:
                if prompt is not None:
                    output = replace(output, times=_sum(prompt.times, output.times))
                    if request.whole:
                        output = merge([prompt, output])
                yield output

    def move(self) -> None:
        """Let other groups go on with the requests of groups that have failed, as far as a group can take them now."""
        among = takers(self.groups)
        for group in self.groups:
            if among and group.health.broken:
                for request in group.give_up():
                    request.route(self.router, among)
                    self.groups[request.place[0]].submit(request)

    async def _prompt(self, request: OpenRequest) -> Outputs:
        """The outputs of prompt and first token from a prefill group, behind which the request goes on.

        The last one has a finish_reason if the request ends with it. Without any the answering group computes all.
        """
        part = request.prompt_part(self.max_model_len())
        try:
            async with aclosing(self._on_group(part, self._prefill_groups(request))) as outputs:
                async for output in outputs:
                    if part.hands_over and output.finish_reason == "length":
                        output = replace(output, finish_reason=None)
                    yield output
        except EngineDeadError as error:
            logger.info("request %s: its prompt is computed again: %s", request.request_id, error)
            self.count("decode after a failed prefill")
        else:
            self.count("prefill")
        request.follow(part)

    def _prompt_goes_apart(self, request: OpenRequest, among: Collection[int]) -> bool:
        """Whether a prefill group can take a prompt that is long enough, in a pool that has one."""
        if not self._prefill_groups(request):
            return False
        missing = self.router.missing(
            request.router_tokens, cache_salt=request.router_salt, groups=among
        )
        if missing <= LOCAL_TOKENS:
            self.count("decode")
        return missing > LOCAL_TOKENS

    def _prefill_groups(self, request: OpenRequest) -> list[int]:
        """The prefill groups that can take the prompt of a request now; none for a request that names its rank."""
        if request.pinned is not None or request.pooling is not None:
            return []
        return [
            group.index
            for group in self.groups
            if group.role == "prefill" and group.reachable and group.health.state == "serving"
        ]

    async def _on_group(self, request: OpenRequest, among: Collection[int]) -> Outputs:
        """The outputs of a request on one of the groups `among`, over all epochs and moves."""
        request.route(self.router, among)
        try:
            self.groups[request.place[0]].submit(request)
            finished = False
            while not finished:
                output = await request.get()
                if output.error == POISON:
                    raise PoisonRequestError
                if output.finish_reason == "abort":
                    # They came before the abort, and count as emitted.
                    if output.token_ids:
                        yield replace(output, finish_reason=None, error=None)
                    raise EngineDeadError(output.error or "the request was aborted")
                finished = output.finish_reason is not None
                yield output
        finally:
            group = self.groups[request.place[0]]
            group.leave(request)
            self.left(group)


def takers(groups: Sequence[GroupClient]) -> list[int]:
    """The numbers of the groups that can take a request now; prefill groups where no other group can.

    A group that drains takes one only where all others have ended.
    """
    living = [group for group in groups if not group.over]
    staying = [group for group in living if group.health.state != "draining"] or living
    reachable = [group for group in staying if group.reachable]
    return [it.index for it in reachable if it.role != "prefill"] or [it.index for it in reachable]


def _sum(prefill: RequestTimes | None, rest: RequestTimes | None) -> RequestTimes | None:
    """The times of a request from those of its prompt on one rank and of the rest on another rank."""
    if prefill is None or rest is None:
        return rest
    return RequestTimes(prefill.queue, prefill.prefill, prefill.decode + sum(rest))
