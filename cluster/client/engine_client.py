"""All groups as one ingress sees them: one message a request, one long stream from each rank.

Implements `cluster.api.backend.EngineBackend`. Each group has a GroupClient. When its ranks fail, other groups go on
with its requests; a request that cannot leave waits for the rebuild, or ends with the group. Knows nothing of HTTP.
"""

import asyncio
import logging
import math
import random
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

from ray.exceptions import RayError

from cluster.client.adapters import ListedAdapters
from cluster.client.expert_reports import settled
from cluster.client.group_client import GroupClient
from cluster.client.open_request import OpenRequest
from cluster.client.operator_calls import OperatorCalls
from cluster.client.refusals import Refusals
from cluster.client.request_run import PromptPlace, RequestRuns, takers
from cluster.client.router import Place, Router
from cluster.config.phalanx_config import PhalanxConfig
from cluster.errors import EngineDeadError
from cluster.metrics.snapshot import Snapshot
from cluster.supervisor import actor, status
from cluster.supervisor.group_spec import group_sizes
from cluster.supervisor.status import GroupHealth, GroupMembers, GroupStatus, Renewal
from kernels.host.owned import OwnedTask
from workers.specs.expert_layout import ExpertLayout
from workers.wire.request import (
    ImageInput,
    PoolingParams,
    RequestOutput,
    SamplingParams,
    expected_output,
)

logger = logging.getLogger(__name__)

HEARTBEAT_S = 2.0


class EngineClient(OperatorCalls):
    """One per ingress replica; `connect` before any other call.

    replace_failed: whether `connect` replaces a supervisor of failed groups.
    """

    def __init__(self, config: PhalanxConfig, *, replace_failed: bool = False):
        self.model_name: str = config.serve.model_name or ""
        self.metrics_source: Callable[[], Snapshot] = dict
        """Returns the counts of this ingress; the owner sets it."""
        self.count_prompt: Callable[[PromptPlace], None] = lambda place: None
        """Counts where a prompt was computed, in a pool with the role prefill; the owner sets it."""
        self._config = config
        self._replace_failed = replace_failed
        self._ingress_id = f"ingress-{uuid.uuid4().hex[:12]}"
        self._supervisor: Any = None
        self._limits: dict[int, tuple[int, int]] = {}  # by group: tokens of a sequence, of a cache
        self._failure: str | None = "the ranks are starting"  # of this client, beside its groups'
        self._broken = False
        self._changed = asyncio.Event()  # replaced after each change of a group
        self._groups: list[GroupClient] = []
        self._router = Router(group_sizes(config))
        self._refusals = Refusals()
        self._adapters = ListedAdapters()
        self._layouts: dict[int, tuple[int, int]] = {}  # by group, as the router has it
        self._tasks: list[OwnedTask] = []
        self._stopping = False

    async def connect(self) -> None:
        """Wait until the groups serve, then open a stream to each rank. Raises EngineDeadError if no group can serve.

        A group that has failed, or that drains, keeps no other group from serving.
        """
        self._supervisor = await actor.start(self._config, replace_failed=self._replace_failed)
        healths = await self._supervisor.healths.remote()
        while not status.can_begin(healths):
            healths = await self._supervisor.changed_healths.remote(healths)
        if all(health.ended for health in healths):
            raise EngineDeadError(status.reasons_of(healths))
        self._router = Router(
            group_sizes(self._config),
            num_replicas=self._config.serve.replicas,
            start=random.randrange(1 << 16),
            lead=self._config.serve.prefix_lead,
        )
        self._groups = [
            GroupClient(
                index,
                self._supervisor,
                self._ingress_id,
                self._router,
                self._refusals,
                self.fail,
                self._learn,
                self._regroup,
            )
            for index in range(len(healths))
        ]
        self._runs = RequestRuns(
            self._groups,
            self._router,
            self._available,
            lambda: self.max_model_len,
            self._left,
            lambda place: self.count_prompt(place),
        )
        for group in self._groups:
            self._own(group.keep_open(), f"group-{group.index}")
        self._follow(healths)
        self._own(self._follow_healths(), "follow-healths", may_end=True)
        if self._config.lora.max_loras:
            self._adapters.follow(await self._supervisor.changed_adapters.remote(None))
            self._own(self._follow_adapters(), "follow-adapters", may_end=True)
        await self._opened()
        self._failure = None
        self._own(self._renew_leases(), "renew-leases")

    @property
    def num_ranks(self) -> int:
        """Ranks of all groups."""
        return self._router.num_ranks

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest sequence. Raises EngineDeadError before the ranks serve."""
        return min(length for length, _ in self._known_limits())

    @property
    def max_request_tokens(self) -> int:
        """KV capacity of one rank in tokens. Raises EngineDeadError before the ranks serve."""
        return min(tokens for _, tokens in self._known_limits())

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
        pooling: PoolingParams | None = None,
        adapter: str = "",
        images: tuple[ImageInput, ...] = (),
        session: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """The tokens of one request as they come; with `whole` at once, when all have come.

        Closing the generator early aborts the request in its rank. When its group fails, it goes on in another group or
        in the next epoch. Without a group that serves, a new request waits for at most serve.limits.rebuild_wait_s.
        """
        pinned = None if rank is None else self._router.place(rank)
        with self._adapters.open(adapter) as adapter_id:
            self._refusals.check(prompt_token_ids, params, adapter_id, images)
            groups = await self._available(pinned)
            request = OpenRequest(
                request_id,
                prompt_token_ids,
                params,
                priority,
                cache_salt,
                pinned=pinned,
                whole=whole,
                pooling=pooling,
                adapter=adapter_id,
                images=images,
                session=session,
                num_tokens=len(prompt_token_ids) + expected_output(params),
            )
            async with aclosing(self._runs.run(request, groups)) as outputs:
                async for output in outputs:
                    yield output

    def health(self) -> tuple[bool, str]:
        """(whether requests are taken, the reason if not)."""
        if self._failure is not None:
            return False, self._failure
        healths = [group.health for group in self._groups]
        if all(health.ended for health in healths):
            return False, status.reasons_of(healths)
        return True, ""

    def check(self) -> None:
        """Raise EngineDeadError when a task of this client has ended, so that its ingress must be replaced."""
        if self._broken:
            raise EngineDeadError(self._failure or "")

    def fail(self, error: BaseException) -> None:
        """End every request, because a task of this ingress has ended: nothing would notice a failure any more."""
        self._broken = True
        self._failure = f"this ingress failed: {type(error).__name__}: {error}"
        logger.error("the ingress must be replaced", exc_info=error)
        for group in self._groups:
            group.fail_requests(self._failure)
        self._wake()

    def token_ages(self) -> dict[int, float]:
        """Seconds since this ingress received tokens of each rank that can be reached; infinite before the first."""
        return {
            self._router.number(load.place): ages.get(load.place[1], math.inf)
            for group in self._groups
            if group.reachable
            for ages in (group.token_ages(),)
            for load in self._router.reachable(group.index)
        }

    @property
    def adapters(self) -> dict[str, str]:
        """Folder or Hub name of each LoRA adapter that takes requests, by name."""
        return self._adapters.folders()

    async def groups(self) -> list[dict[str, Any]]:
        """The state of each group, see `GroupStatus.to_json`."""
        statuses: list[GroupStatus] = await self._call_supervisor("status")
        return [it.to_json() for it in statuses]

    async def rank_stats(self) -> list[dict[str, Any]]:
        """Counters and gauges of each rank, see GroupStreams; `rank` is the number over all groups."""
        healthy, reason = self.health()
        if not healthy:
            raise EngineDeadError(reason)
        groups = [group for group in self._groups if group.reachable]
        try:
            of_groups = await asyncio.gather(*(group.stats() for group in groups))
        except RayError as error:
            raise EngineDeadError(f"a rank does not answer: {error}") from error
        return [
            {**stats, "rank": self._router.number((group.index, stats["rank"]))}
            for group, of_group in zip(groups, of_groups, strict=True)
            for stats in of_group
        ]

    async def expert_layouts(self) -> list[ExpertLayout]:
        """The map and the recent load of the experts of each group that can be reached."""
        found = []
        try:
            for group in self._groups:
                if group.reachable:
                    found.append(await settled(group.expert_reports))
        except RayError as error:
            raise EngineDeadError(f"a rank does not answer: {error}") from error
        return found

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
        """Give the leases back and stop listening."""
        for task in self._tasks:
            await task.close()
        for group in self._groups:
            group.close()

    def _known_limits(self) -> list[tuple[int, int]]:
        if not self._limits:
            raise EngineDeadError(self._failure or "the ranks are starting")
        return list(self._limits.values())

    def _available_now(self, pinned: Place | None) -> list[int]:
        """The groups that can answer a request now. Raises EngineDeadError when none will."""
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        wanted = self._groups if pinned is None else [self._groups[pinned[0]]]
        if all(group.over for group in wanted):
            reasons = status.reasons_of([group.health for group in wanted])
            raise EngineDeadError(reasons or f"the group is {wanted[0].health.state}")
        return takers(wanted)

    async def _available(self, pinned: Place | None = None) -> list[int]:
        """The groups that can answer requests, as soon as there is one. Raises EngineDeadError after the limit."""
        limit_s = self._config.serve.limits.rebuild_wait_s
        try:
            async with asyncio.timeout(limit_s):
                while not (groups := self._available_now(pinned)):
                    await self._changed.wait()
        except TimeoutError:
            reasons = status.reasons_of([group.health for group in self._groups])
            raise EngineDeadError(
                f"the ranks are rebuilding for more than {limit_s:g} s (serve.limits.rebuild_wait_s): {reasons}"
            ) from None
        return groups

    def _left(self, group: GroupClient) -> None:
        """A request has left a group."""
        if group.health.state == "draining":
            self._release_drained()

    def _regroup(self) -> None:
        """Move the requests of groups that have failed, and let each wait look at the groups again."""
        self._runs.move()
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _opened(self) -> None:
        """Return when the streams of all groups that compute are open, but for those given back."""
        while any(group.awaited for group in self._groups):
            self.check()
            await self._changed.wait()

    def _release_drained(self) -> None:
        """Give back the leases of groups that drain beside a group that serves, so that the supervisor ends them."""
        if any(it.health.state == "serving" and it.role != "prefill" for it in self._groups):
            for group in self._groups:
                if group.health.state == "draining" and not group.open:
                    group.release()

    def _learn(self, index: int, members: GroupMembers) -> None:
        """Take over what depends on the ranks of a group, which may be others in each epoch."""
        self._limits[index] = (
            min(info.max_model_len for info in members.infos),
            min(info.cache_tokens for info in members.infos),
        )
        room = self._limits[index][1] if self._config.cache.prefix_caching else 0
        layout = len(members.ranks), room
        if layout != self._layouts.get(index):
            self._layouts[index] = layout
            self._router.resize(index, *layout)

    async def _renew_leases(self) -> None:
        """Send heartbeats. A lease that has expired took the streams with it, which its GroupClient opens again."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            leases = {group.lease_id: group for group in self._groups if group.lease_id}
            counts = self.metrics_source()
            try:
                renewal: Renewal = await self._supervisor.heartbeat.remote(
                    self._ingress_id, list(leases), counts
                )
            except RayError as error:
                logger.debug("no heartbeat: %s", error)  # _follow_healths reports the failure
                continue
            for digest in renewal.refused:
                self._refusals.add(digest)
            for lease_id in leases.keys() - renewal.expired:
                leases[lease_id].check_silence()
            self._report_adapters()
            for lease_id in renewal.expired:
                if leases[lease_id].lease_id == lease_id and leases[lease_id].reachable:
                    logger.warning("a lease of this ingress has expired; its streams are reopened")
                leases[lease_id].expire(lease_id)

    async def _follow_healths(self) -> None:
        """Pass the changes of the groups' healths to their clients."""
        while not all(group.health.ended for group in self._groups):
            healths = [group.health for group in self._groups]
            try:
                healths = await self._supervisor.changed_healths.remote(healths)
            except RayError as error:
                reason = f"the supervisor is gone: {type(error).__name__}"
                healths = [health._replace(state="failed", error=reason) for health in healths]
            self._follow(healths)

    async def _follow_adapters(self) -> None:
        """Take over the adapters that the supervisor lists, as long as there is one."""
        while not all(group.health.ended for group in self._groups):
            try:
                listed = await self._supervisor.changed_adapters.remote(self._adapters.listed)
            except RayError as error:
                logger.debug("no adapters: %s", error)  # _follow_healths reports the failure
                await asyncio.sleep(HEARTBEAT_S)
                continue
            self._adapters.follow(listed)
            self._report_adapters()

    def _report_adapters(self) -> None:
        """Let the supervisor drop adapters that were unloaded and have no requests."""
        if self._config.lora.max_loras:
            self._supervisor.report_adapters.remote(self._ingress_id, self._adapters.used())

    def _follow(self, healths: Sequence[GroupHealth]) -> None:
        news = [it for it in zip(self._groups, healths, strict=True) if it[0].health != it[1]]
        for group, health in news:
            group.follow(health)
        self._regroup()  # before the end of a group ends its requests
        for group, _ in news:
            group.settle(stopping=self._stopping)
        self._release_drained()

    def _own(self, work: Coroutine[Any, Any, None], name: str, *, may_end: bool = False) -> None:
        self._tasks.append(OwnedTask(work, self.fail, name, may_end=may_end))
