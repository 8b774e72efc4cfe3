"""All groups as one ingress sees them: one message a request, one long stream from each rank.

Implements `cluster.api.backend.EngineBackend`. Knows nothing of HTTP.
"""

import asyncio
import logging
import math
import random
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from functools import partial
from typing import Any

from ray.exceptions import RayError

from cluster.client.group_client import GroupClient
from cluster.client.open_request import OpenRequest
from cluster.client.operator_calls import OperatorCalls
from cluster.client.router import Router
from cluster.client.suspects import Suspects, turn
from cluster.config.phalanx_config import PhalanxConfig
from cluster.errors import SHUTDOWN_REASON, EngineDeadError, ServingError
from cluster.metrics.snapshot import Snapshot
from cluster.supervisor import supervisor
from cluster.supervisor.status import GroupHealth, GroupMembers, GroupStatus
from workers.rank.actor import node_address
from workers.wire.request import RequestOutput, SamplingParams, expected_output

logger = logging.getLogger(__name__)

HEARTBEAT_S = 2.0
RETRY_S = 0.1
POISON = (
    "this request was set aside: its rank failed each time that it began the request, also alone"
)


class EngineClient(OperatorCalls):
    """One per ingress replica; `connect` before any other call.

    replace_failed: whether `connect` replaces a supervisor of failed groups.
    """

    def __init__(self, config: PhalanxConfig, *, replace_failed: bool = False):
        self.model_name: str = config.serve.model_name or ""
        self.num_ranks = config.cluster.ranks
        self.metrics_source: Callable[[], Snapshot] = dict
        """Returns the counts of this ingress; the owner sets it."""
        self._config = config
        self._replace_failed = replace_failed
        self._ingress_id = f"ingress-{uuid.uuid4().hex[:12]}"
        self._lease_id = ""
        self._supervisor: Any = None
        self._limits: tuple[int, int] | None = None  # tokens of a sequence, and of a rank's cache
        self._healths: list[GroupHealth] = []
        self._failure: str | None = "the ranks are starting"
        self._serving = asyncio.Event()  # clear while a group rebuilds
        self._reopening = asyncio.Lock()
        self._open: dict[str, OpenRequest] = {}  # by the id that their rank has
        self._suspects = Suspects()
        self._groups: list[GroupClient] = []
        self._router = Router([self.num_ranks])
        self._layout: tuple[Any, ...] = ()  # that the router was made for
        self._token_times: dict[int, float] = {}  # of the last tokens of each rank
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False

    async def connect(self) -> None:
        """Wait until all groups serve, then open a stream to each rank. Raises EngineDeadError if a group fails."""
        self._supervisor = await supervisor.start(self._config, replace_failed=self._replace_failed)
        self._healths = await self._supervisor.healths.remote()
        while not all(health.alive for health in self._healths):
            for health in self._healths:
                if health.ended:
                    raise EngineDeadError(health.error)
            self._healths = await self._supervisor.changed_healths.remote(self._healths)
        await self._open_streams()
        self._failure = None
        self._serving.set()
        jobs = (self._renew_lease(), self._follow_healths())
        self._tasks = [asyncio.create_task(job) for job in jobs]

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence. Raises EngineDeadError before the ranks serve."""
        return self._known_limits()[0]

    @property
    def max_request_tokens(self) -> int:
        """KV capacity of one rank in tokens. Raises EngineDeadError before the ranks serve."""
        return self._known_limits()[1]

    async def generate(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        rank: int | None = None,
        whole: bool = False,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The tokens of one request as they come; with `whole` at once, when all have come.

        Closing the generator early aborts the request in its rank. While a group rebuilds, a request in flight waits,
        then goes on in the next epoch. A new request waits for at most serve.limits.rebuild_wait_s.
        """
        self._check_alive()
        if not self._serving.is_set():
            await self._wait_serving()
        request = OpenRequest(
            request_id,
            prompt_token_ids,
            params,
            priority,
            cache_salt,
            pinned=rank,
            whole=whole,
            num_tokens=len(prompt_token_ids) + expected_output(params),
        )
        try:
            self._submit(request)
            finished = False
            while not finished:
                output = await request.get()
                if output.error == POISON:
                    raise ServingError(POISON, code="request_ended_ranks")
                if output.finish_reason == "abort":
                    raise EngineDeadError(output.error or "the request was aborted")
                finished = output.finish_reason is not None
                yield output
        finally:
            if not request.finished and self._failure is None and self._serving.is_set():
                self._abort(request)
            self._forget(request)

    def health(self) -> tuple[bool, str]:
        """(whether requests are taken, the reason if not)."""
        return self._failure is None, self._failure or ""

    def token_ages(self) -> list[float]:
        """Seconds since this ingress received tokens of each rank; infinite before the first."""
        now = time.monotonic()
        return [now - self._token_times.get(rank, -math.inf) for rank in range(self.num_ranks)]

    async def groups(self) -> list[dict[str, Any]]:
        """The state of each group, see `GroupStatus.to_json`."""
        statuses: list[GroupStatus] = await self._call_supervisor("status")
        return [status.to_json() for status in statuses]

    async def rank_stats(self) -> list[dict[str, Any]]:
        """Counters and gauges of each rank, in rank order."""
        self._check_alive()
        try:
            return [stats for group in self._groups for stats in await group.stats()]
        except RayError as error:
            raise EngineDeadError(f"a rank does not answer: {error}") from error

    async def ingress_metrics(self, own: Snapshot) -> Snapshot:
        """The sum of the counts of all ingresses; `own` are the counts of this one."""
        total: Snapshot = await self._call_supervisor("ingress_metrics", self._ingress_id, own)
        return total

    async def _call_supervisor(self, method: str, *args: Any) -> Any:
        if self._supervisor is None:
            raise EngineDeadError("the supervisor is starting")
        try:
            return await getattr(self._supervisor, method).remote(*args)
        except RayError as error:
            raise EngineDeadError(f"the supervisor does not answer: {error}") from error

    async def close(self) -> None:
        """Give the lease back and stop listening."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._lease_id:
            self._supervisor.unregister.remote(self._lease_id)
        for group in self._groups:
            group.close()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineDeadError(self._failure)

    def _known_limits(self) -> tuple[int, int]:
        if self._limits is None:
            raise EngineDeadError(self._failure or "the ranks are starting")
        return self._limits

    async def _wait_serving(self) -> None:
        """Return when the groups serve again. Raises EngineDeadError after the limit, or if a group fails."""
        limit_s = self._config.serve.limits.rebuild_wait_s
        try:
            async with asyncio.timeout(limit_s):
                await self._serving.wait()
        except TimeoutError:
            reasons = "; ".join(health.error for health in self._healths if health.error)
            raise EngineDeadError(
                f"the ranks are rebuilding for more than {limit_s:g} s (serve.limits.rebuild_wait_s): {reasons}"
            ) from None
        self._check_alive()

    def _submit(self, request: OpenRequest) -> None:
        """Send a request to a rank, with the tokens that an earlier attempt emitted."""
        request.begin_attempt()
        request.rank = self._router.pick(
            request.prompt_token_ids,
            request.num_tokens - len(request.prompt_token_ids),
            cache_salt=request.cache_salt,
            # A rank that the client chose may have left the group.
            pinned=None if (request.pinned or 0) >= self.num_ranks else request.pinned,
        )
        request.router, request.place = self._router, self._router.place(request.rank)
        request.begin_prefill(self._router.picked_prefill)
        self._open[request.wire_id] = request
        group, rank = request.place
        self._groups[group].submit(rank, request.to_engine())

    def _abort(self, request: OpenRequest) -> None:
        group, rank = request.place
        self._groups[group].abort(rank, request.wire_id)

    def _forget(self, request: OpenRequest) -> None:
        """Release what `_submit` took."""
        if self._open.pop(request.wire_id, None) is not None:
            request.router.release(request.rank, request.num_tokens)
            request.end_prefill()

    def _deliver(
        self, lease: str, group: int, rank: int, load_of_others: int, outputs: list[RequestOutput]
    ) -> None:
        """Pass the outputs of one step of a rank to the requests."""
        if lease != self._lease_id:
            return  # the other streams of the lease are still being opened: a rank only reports its load
        number = self._router.number(group, rank)
        self._router.report(number, load_of_others)
        if outputs and not outputs[0].begins:
            self._token_times[number] = time.monotonic()
        for output in outputs:
            request = self._open.get(output.request_id)
            if request is not None:  # otherwise its client has left
                request.put(output)

    async def _open_streams(self) -> list[GroupMembers]:
        """Open a lease, and under it a stream from each rank of each group."""
        registration: supervisor.Registration = await self._supervisor.register.remote(
            self._ingress_id
        )
        lease_id, address = registration.lease_id, node_address()
        groups = [
            GroupClient(members, lease_id, address, partial(self._deliver, lease_id, index))
            for index, members in enumerate(registration.groups)
        ]
        try:
            for index, group in enumerate(groups):
                await group.open(partial(self._submit_lost, lease_id, index), self._fail_streams)
        except BaseException:
            for group in groups:
                group.close()
            self._supervisor.unregister.remote(lease_id)
            raise
        for group in self._groups:
            group.close()  # the ranks compute the tokens again that it has not read
        self._lease_id, self._groups = lease_id, groups
        self._learn(registration.groups)
        return registration.groups

    def _learn(self, members: list[GroupMembers]) -> None:
        """Take over what depends on the ranks of the groups, which may be others in each epoch."""
        info = members[0].infos[0]
        self._limits = info.max_model_len, info.cache_tokens
        group_sizes = [len(group.ranks) for group in members]
        layout = (tuple(group_sizes), self.max_request_tokens)
        if layout == self._layout:
            return
        self._layout = layout
        self.num_ranks = sum(group_sizes)
        self._token_times.clear()
        self._router = Router(
            group_sizes,
            num_replicas=self._config.serve.replicas,
            start=random.randrange(self.num_ranks),
            cache_tokens=self.max_request_tokens if self._config.cache.prefix_caching else 0,
        )

    async def _renew_lease(self) -> None:
        """Send heartbeats. A lease that has expired took the streams with it: open new ones, submit requests again."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            counts = self.metrics_source()
            try:
                if await self._supervisor.heartbeat.remote(
                    self._ingress_id, self._lease_id, counts
                ):
                    for group in self._groups if self._serving.is_set() else ():
                        group.check_silence()
                    continue
                if not self._serving.is_set():
                    continue  # the next epoch gets a new lease
                logger.warning(
                    "the lease of this ingress has expired; its streams are opened again"
                )
                await self._reopen(rebuilt=False)
            except RayError as error:
                logger.debug("no heartbeat: %s", error)  # _follow_healths learns of the failure

    async def _reopen(self, *, rebuilt: bool) -> None:
        """Open new streams and submit the open requests again, with the tokens that they have emitted.

        rebuilt: a group is in another epoch; otherwise the ranks have aborted the requests of the lease that expired
        """
        async with self._reopening:
            members = await self._open_streams()
            requests = [request for request in self._open.values() if not request.finished]
            if rebuilt:
                self._set_aside_poison(requests, members)
            self._submit_all_again(requests)

    def _submit_lost(self, lease: str, group: int, rank: int) -> None:
        """Submit the requests again that a rank has aborted, because their stream had lost a message."""
        if lease == self._lease_id:
            self._submit_all_again(it for it in self._open.values() if it.place == (group, rank))

    def _submit_all_again(self, requests: Iterable[OpenRequest]) -> None:
        for request in sorted(requests, key=turn):
            if not request.finished:
                self._submit_again(request)

    def _submit_again(self, request: OpenRequest) -> None:
        self._forget(request)
        self._submit(request)

    def _set_aside_poison(self, requests: list[OpenRequest], members: list[GroupMembers]) -> None:
        """Put the requests on trial that may have ended ranks, and end those that are proved to."""

        def failed(request: OpenRequest) -> bool:
            group, rank = request.place
            return rank in members[group].failed

        for poison in self._suspects.judge(requests, failed):
            logger.error("request %s is set aside: it ends its rank", poison.request_id)
            poison.put(RequestOutput(poison.wire_id, [], "abort", POISON))
        if self._suspects.excused:
            self._supervisor.excuse_failures.remote()

    async def _resume(self) -> None:
        """Continue in the new epoch of a group. After a RayError the caller tries again: the group may have failed."""
        old_lease = self._lease_id
        try:
            await self._reopen(rebuilt=True)
        except RayError as error:
            logger.debug("the new epoch cannot be reached: %s", error)
            await asyncio.sleep(RETRY_S)
            return
        self._supervisor.unregister.remote(old_lease)
        logger.info("%d requests go on in the next epoch", len(self._open))
        self._serving.set()

    async def _follow_healths(self) -> None:
        """Follow the groups' states: pause while a group rebuilds, fail the open requests of a group that fails."""
        while self._failure is None:
            resuming = not self._serving.is_set() and all(health.alive for health in self._healths)
            try:
                if resuming:  # the last attempt failed
                    self._healths = await self._supervisor.healths.remote()
                else:
                    self._healths = await self._supervisor.changed_healths.remote(self._healths)
            except RayError as error:
                reason = f"the supervisor is gone: {type(error).__name__}"
                self._healths = [
                    GroupHealth("failed", health.epoch, reason) for health in self._healths
                ]
            ended = [health for health in self._healths if health.ended]
            if ended:
                self._fail(ended[0])
            elif any(health.epoch != group.epoch for health, group in self._pairs()):
                self._serving.clear()
                if all(health.alive for health in self._healths):
                    await self._resume()

    def _pairs(self) -> Iterator[tuple[GroupHealth, GroupClient]]:
        return zip(self._healths, self._groups, strict=True)

    def _fail_streams(self, error: BaseException) -> None:
        self._fail(GroupHealth("failed", 0, f"the streams of this ingress failed: {error!r}"))

    def _fail(self, health: GroupHealth) -> None:
        """End every open request with the error of a group."""
        stopped = self._stopping or health.state == "stopped"
        self._failure = SHUTDOWN_REASON if stopped else health.error
        self._serving.set()  # requests that wait are refused
        if not stopped:
            logger.error("the group failed: %s", health.error)
        for request in self._open.values():
            request.put(RequestOutput(request.wire_id, [], "abort", self._failure))
