"""All ranks as one ingress sees them: one message a request, one long stream from each rank.

Implements `cluster.api.backend.EngineBackend`. Knows nothing of HTTP.
"""

import asyncio
import logging
import random
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.config.phalanx_config import PhalanxConfig
from cluster.errors import EngineDeadError
from cluster.group import supervisor
from cluster.group.router import Router
from cluster.metrics.snapshot import Snapshot
from workers.wire.inbox import InboxSender
from workers.wire.request import (
    EngineRequest,
    RequestOutput,
    SamplingParams,
    expected_output,
    merge,
)
from workers.wire.token_stream import TokenReceiver

logger = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
POLL_S = 0.1


@dataclass(slots=True)
class _Open:
    """A request under way."""

    rank: int
    num_tokens: int
    outputs: list[RequestOutput] = field(default_factory=list)
    waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        """A step's output came; wakes who waits for it."""
        self.outputs.append(output)
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)

    async def get(self) -> RequestOutput:
        """What came since the last time, as one: an ingress that is behind writes larger pieces, not more."""
        if not self.outputs:
            self.waiter = asyncio.get_running_loop().create_future()
            await self.waiter
        outputs, self.outputs = self.outputs, []
        return outputs[0] if len(outputs) == 1 else merge(outputs)


class EngineClient:
    """One per ingress replica; `connect` before anything else."""

    def __init__(self, config: PhalanxConfig):
        self.model_name = config.serve.model_name
        self.num_ranks = config.cluster.ranks
        self.max_model_len = 0
        self.max_request_tokens = 0
        self._config = config
        self._ingress_id = f"ingress-{uuid.uuid4().hex[:12]}"
        self._open: dict[str, _Open] = {}
        self._failure: str | None = "the ranks are starting"
        self._tasks: list[asyncio.Task[None]] = []
        self._ranks: list[ray.actor.ActorHandle] = []
        self._inboxes: list[InboxSender] = []
        self._receiver: TokenReceiver | None = None  # until connected
        self._stopping = False
        self.metrics_source: Callable[[], Snapshot] = dict
        """Gives what this ingress has counted; the owner sets it."""

    async def connect(self) -> None:
        """Wait until the ranks are ready and open a stream to each. Raises EngineDeadError when they fail."""
        self._supervisor = supervisor.get_or_create(self._config)
        await self._supervisor.start.remote(self._config)
        while True:
            state, error = await self._heartbeat()
            if state == "ready":
                break
            if state != "starting":
                raise EngineDeadError(error)
            await asyncio.sleep(POLL_S)
        status = await self._supervisor.status.remote()
        info = status.infos[0]
        self.max_model_len = info.max_model_len
        self.max_request_tokens = info.num_blocks * info.block_size
        self._ranks = await self._supervisor.ranks.remote()
        self._router = Router(
            len(self._ranks),
            num_replicas=self._config.serve.replicas,
            start=random.randrange(len(self._ranks)),
            cache_tokens=self.max_request_tokens if self._config.cache.prefix_caching else 0,
        )
        self._receiver = TokenReceiver(ray.util.get_node_ip_address())
        self._receiver.listen(self._deliver)
        address = self._receiver.address
        opened = (rank.open_stream.remote(self._ingress_id, address) for rank in self._ranks)
        self._inboxes = [InboxSender(inbox) for inbox in await _gather(opened)]
        self._failure = None
        watches = [self._watch(rank) for rank in range(len(self._ranks))]
        self._tasks = [asyncio.create_task(job) for job in (self._beat(), *watches)]

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        rank: int | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The tokens of one request as they come. Closing the generator early aborts it in its rank."""
        self._check_alive()
        num_output = expected_output(params)
        num_tokens = len(prompt_token_ids) + num_output
        rank = self._router.pick(prompt_token_ids, num_output, cache_salt=cache_salt, pinned=rank)
        entry = self._open[request_id] = _Open(rank, num_tokens)
        finished = False
        try:
            self._inboxes[rank].submit(
                EngineRequest(
                    request_id=request_id,
                    ingress_id=self._ingress_id,
                    prompt_token_ids=prompt_token_ids,
                    params=params,
                    priority=priority,
                    cache_salt=cache_salt,
                )
            )
            while not finished:
                output = await entry.get()
                if output.finish_reason == "abort":
                    raise EngineDeadError(output.error or "the request was aborted")
                finished = output.finish_reason is not None
                yield output
        finally:
            if not finished:
                await self.abort(request_id)
            self._forget(request_id)

    async def abort(self, request_id: str) -> None:
        """End a request wherever it is; ids that are not open are ignored."""
        entry = self._open.get(request_id)
        if entry is not None and self._failure is None:
            self._inboxes[entry.rank].abort(request_id)

    def health(self) -> tuple[bool, str]:
        """(ready, why not)."""
        return self._failure is None, self._failure or ""

    async def rank_stats(self) -> list[dict[str, Any]]:
        """Counters and gauges of each rank, in rank order."""
        self._check_alive()
        try:
            return await _gather(rank.stats.remote() for rank in self._ranks)
        except RayError as error:
            raise EngineDeadError(f"a rank does not answer: {error}") from error

    async def ingress_metrics(self, own: Snapshot) -> Snapshot:
        """What all ingresses have counted together; `own` is what this one has."""
        try:
            return await self._supervisor.ingress_metrics.remote(self._ingress_id, own)
        except RayError as error:
            raise EngineDeadError(f"the supervisor does not answer: {error}") from error

    async def drain_asked(self) -> float:
        """Returns when the server is to stop: the seconds that requests get to finish."""
        timeout_s = await self._supervisor.drain_asked.remote()
        self._stopping = True
        return timeout_s

    async def report_drained(self) -> None:
        """Tell that this ingress answers nobody any more."""
        await self._supervisor.drained.remote(self._ingress_id)

    async def close(self) -> None:
        """Stop listening."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for inbox in self._inboxes:
            inbox.close()
        if self._receiver is not None:
            self._receiver.close()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(self._failure)

    def _forget(self, request_id: str) -> None:
        entry = self._open.pop(request_id, None)
        if entry is not None:
            self._router.release(entry.rank, entry.num_tokens)

    def _deliver(self, rank: int, load_of_others: int, outputs: list[RequestOutput]) -> None:
        """Hand what a rank sent to the requests that wait for it."""
        self._router.report(rank, load_of_others)
        for output in outputs:
            entry = self._open.get(output.request_id)
            if entry is not None:  # otherwise it was closed a moment ago
                entry.put(output)

    async def _watch(self, rank: int) -> None:
        """Returns when a rank has ended; Ray tells within milliseconds."""
        reason = "left its loop"
        try:
            await self._ranks[rank].done.remote()
        except RayError as error:
            reason = type(error).__name__
        # The supervisor knows better than we do, soon.
        deadline = time.monotonic() + 2 * supervisor.CULPRIT_S
        while self._failure is None and time.monotonic() < deadline:
            await self._ask_supervisor()
            await asyncio.sleep(POLL_S)
        self._fail(f"rank {rank}: {reason}")

    async def _beat(self) -> None:
        """Renew this ingress's lease and learn of failures that no stream shows."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            await self._ask_supervisor()

    async def _heartbeat(self) -> tuple[supervisor.State, str]:
        return await self._supervisor.heartbeat.remote(self._ingress_id, self.metrics_source())

    async def _ask_supervisor(self) -> None:
        try:
            state, error = await self._heartbeat()
        except RayError as gone:
            state, error = "failed", f"the supervisor is gone: {type(gone).__name__}"
            if self._stopping:  # it may end before it is asked
                error = supervisor.STOPPING
        if state != "ready":
            self._fail(error)

    def _fail(self, reason: str) -> None:
        """The group is lost: answer everybody who waits. The first reason is kept."""
        if self._failure is not None:
            return
        logger.error("the group failed: %s", reason)
        self._failure = reason
        for request_id, entry in self._open.items():
            entry.put(RequestOutput(request_id, [], "abort", reason))


async def _gather(refs: Iterable["ray.ObjectRef"]) -> list[Any]:
    async def wait(ref: "ray.ObjectRef") -> Any:
        return await ref

    return await asyncio.gather(*(wait(ref) for ref in refs))
