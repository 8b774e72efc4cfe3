"""One group as an ingress sees it, over all its epochs: health, lease, streams, and the requests that the group has.

One task opens the streams, for a new epoch and when the lease has expired, so that two causes at once do not submit
requests twice. Knows nothing of other groups.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from ray.exceptions import RayError

from cluster.client.group_streams import GroupStreams
from cluster.client.open_request import OpenRequest
from cluster.client.refusals import Refusals
from cluster.client.router import Router
from cluster.client.suspects import Suspects, turn
from cluster.config.phalanx_config import Role
from cluster.errors import SHUTDOWN_REASON, PoisonRequestError
from cluster.supervisor.status import GroupHealth, GroupMembers, Registration
from kernels.host.owned import Failed
from workers.rank.actor import node_address
from workers.specs.expert_layout import ExpertReport
from workers.wire.request import RequestOutput

logger = logging.getLogger(__name__)

RETRY_S = 0.1
ANNOUNCE_S = 2.0
"""Time for the supervisor to take the notice of a trial."""
POISON = str(PoisonRequestError())


class GroupClient:
    """`follow` the health of the group, then `settle`; `keep_open` runs as a task meanwhile.

    index       of the group in the pool
    supervisor  handle of the supervisor
    router      of all groups; `learn` is called before it counts requests of a new epoch
    refusals    gets the digests of requests that have ended ranks
    failed      called with an unexpected error of a task
    learn       learn(index, members): take over what depends on the ranks of a new epoch
    opened      called when the streams of an epoch are open
    """

    def __init__(
        self,
        index: int,
        supervisor: Any,
        ingress_id: str,
        router: Router,
        refusals: Refusals,
        failed: Failed,
        learn: Callable[[int, GroupMembers], None],
        opened: Callable[[], None],
    ):
        self.index = index
        self.health = GroupHealth("starting", 0, "")
        self.lease_id = ""
        self.open: dict[str, OpenRequest] = {}  # by the id that their rank has
        self._supervisor, self._ingress_id = supervisor, ingress_id
        self._router, self._refusals, self._failed = router, refusals, failed
        self._learn, self._opened = learn, opened
        self._suspects = Suspects()
        self._streams: GroupStreams | None = None
        self._token_times: dict[int, float] = {}  # of the last tokens of each rank
        self._expired_lease: str | None = None
        self._ends = self._released = False
        self._woken = asyncio.Event()

    @property
    def role(self) -> Role:
        """Its part of new requests."""
        return self.health.role

    @property
    def epoch(self) -> int:
        """The epoch of the streams; -1 without any."""
        return -1 if self._streams is None else self._streams.epoch

    @property
    def reachable(self) -> bool:
        """Whether the ranks of the present epoch can be reached."""
        return self.health.alive and self.epoch >= self.health.epoch

    @property
    def awaited(self) -> bool:
        """Whether the streams of the present epoch are still to be opened."""
        return self.health.alive and not self.reachable and not self._released

    @property
    def over(self) -> bool:
        """Whether no request can come to the group again: it has ended, or its lease is given back for good."""
        return self.health.ended or self._released

    def follow(self, health: GroupHealth) -> None:
        """Note the present health."""
        self._ends = health.ended and not self.health.ended
        self.health = health
        self._woken.set()

    def give_up(self) -> list[OpenRequest]:
        """Forget the requests that other groups can go on with, because ranks have failed, and return them."""
        left = [request for request in self.open.values() if request.may_leave]
        self._suspects.leave(left)
        for request in left:
            self._forget(request)
        return left

    def settle(self, *, stopping: bool) -> None:
        """End the requests that are left: all of a group that has ended, prompts for other groups in a rebuild.

        stopping: the server ends, so the end of the group is no failure
        """
        if self._ends:
            stopped = stopping or self.health.state == "stopped"
            if not stopped:
                logger.error("the group failed: %s", self.health.error)
            self.fail_requests(SHUTDOWN_REASON if stopped else self.health.error)
            self.close()
        elif not self.health.alive:
            _abort_prompts(self.open.values(), f"the prefill group is {self.health.state}")

    def fail_requests(self, reason: str) -> None:
        """End the requests that have not ended."""
        _abort_all(self.open.values(), reason)

    def expire(self, lease_id: str) -> None:
        """Note that a lease has expired, and its streams with it. One that was replaced meanwhile is ignored."""
        self._expired_lease = lease_id
        self._woken.set()

    def release(self) -> None:
        """Give the lease back for good, because the group drains and has no request of this ingress."""
        assert not self.open, f"{len(self.open)} requests are open"
        self._released = True
        self.close()

    def submit(self, request: OpenRequest) -> None:
        """Send a request to the rank that the router has picked, with the tokens that an earlier attempt emitted."""
        assert self._streams is not None, "the group is not reachable"
        self.open[request.wire_id] = request
        self._streams.submit(request.place[1], request.to_engine())

    def leave(self, request: OpenRequest) -> None:
        """Forget a request; one that has not ended is aborted."""
        if not request.finished and self.reachable:
            self._abort(request)
        self._forget(request)

    def token_ages(self) -> dict[int, float]:
        """Seconds since the last tokens of each rank that sent some, by the rank in the group."""
        now = time.monotonic()
        return {rank: now - then for rank, then in self._token_times.items()}

    def check_silence(self) -> None:
        """Open the streams again of ranks that send no beats."""
        if self._streams is not None and self.reachable:
            self._streams.check_silence()

    async def stats(self) -> list[dict[str, Any]]:
        """Counters and gauges of each rank, see GroupStreams. Raises RayError when a rank is gone."""
        return [] if self._streams is None else await self._streams.stats()

    async def expert_reports(self) -> list[ExpertReport]:
        """Where the experts are, of each rank in rank order. Raises RayError when a rank is gone."""
        return [] if self._streams is None else await self._streams.expert_reports()

    async def keep_open(self) -> None:
        """Hold a lease and streams in the present epoch of the group, until the task is cancelled."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            while self._must_open():
                try:
                    await self._open_streams()
                except (RayError, OSError) as error:  # OSError: no descriptor is free
                    logger.warning("the ranks cannot be reached: %s", error)
                    await asyncio.sleep(RETRY_S)

    def close(self) -> None:
        """Give the lease back and stop listening."""
        if self.lease_id:
            self._supervisor.unregister.remote(self.lease_id)
            self.lease_id = ""
        if self._streams is not None:
            self._streams.close()
            self._streams = None
        self._token_times.clear()

    def _must_open(self) -> bool:
        if self._released or not self.health.alive:
            return False
        return not self.reachable or self._expired_lease == self.lease_id

    async def _open_streams(self) -> None:
        """Open a lease, and under it a stream from each rank; submit the open requests again."""
        registered: Registration | None = await self._supervisor.register.remote(
            self._ingress_id, self.index
        )
        if registered is None:  # the group has begun to rebuild
            await asyncio.sleep(RETRY_S)
            return
        lease_id, members = registered.lease_id, registered.members
        streams = None
        try:
            deliver = partial(self._deliver, lease_id)
            streams = GroupStreams(members, lease_id, node_address(), deliver)
            await streams.open(
                partial(self._submit_lost, lease_id), partial(self._move, lease_id), self._failed
            )
        except BaseException:
            if streams is not None:
                streams.close()
            self._supervisor.unregister.remote(lease_id)
            raise
        if self.health.ended or self._released:
            streams.close()
            self._supervisor.unregister.remote(lease_id)
            return
        rebuilt = members.epoch != self.epoch
        self.close()  # the ranks compute the tokens again that were not read
        self.lease_id, self._streams = lease_id, streams
        self._learn(self.index, members)
        self._router.reach_all(self.index)
        requests = [request for request in self.open.values() if not request.finished]
        if rebuilt:
            self._set_aside_poison(requests, members.failed)
        await self._submit_again(requests)
        self._opened()

    async def _submit_lost(self, lease_id: str, rank: int) -> None:
        """Submit the requests again that a rank has aborted, because their stream had lost a message."""
        if lease_id == self.lease_id:
            self._router.load_of((self.index, rank)).reachable = True
            await self._submit_again([it for it in self.open.values() if it.place[1] == rank])

    async def _move(self, lease_id: str, rank: int) -> None:
        """Let the other ranks go on with the requests of a rank that this ingress cannot reach.

        The rank ends its part of them when its stream is opened again. Requests for this rank alone wait until then.
        """
        if lease_id != self.lease_id:
            return
        self._router.load_of((self.index, rank)).reachable = False
        moved = [it for it in self.open.values() if it.place[1] == rank and it.pinned is None]
        if any(load.reachable for load in self._router.reachable(self.index)):
            logger.warning("rank %d cannot be reached; other ranks go on with its requests", rank)
            await self._submit_again(moved)
        else:
            _abort_prompts(moved, f"rank {rank} of the prefill group cannot be reached")

    async def _submit_again(self, requests: Iterable[OpenRequest]) -> None:
        """Submit requests that their ranks have no longer, with the tokens that they have emitted."""
        lease_id = self.lease_id
        for request in (requests := list(requests)):
            if request.hands_over and request.emitted and not request.finished:
                # It has all its tokens, so ranks refuse it. Its end was held back, and the KV is where it is.
                request.put(RequestOutput(request.wire_id, [], "length"))
        ordered = [it for it in sorted(requests, key=turn) if not it.finished]
        for request in ordered:
            self._route_again(request)
        attempts = {request.wire_id: request for request in ordered}
        on_trial = frozenset(it.place[1] for it in ordered if it.on_trial)
        if on_trial:
            await self._expect_failures(on_trial)
        for wire_id, request in attempts.items():  # a lease may have expired, a client have left
            if lease_id == self.lease_id and wire_id in self.open and not request.finished:
                self.submit(request)

    def _route_again(self, request: OpenRequest) -> None:
        """Choose the rank of the next attempt."""
        self._forget(request)
        request.route(self._router, (self.index,))
        self.open[request.wire_id] = request

    async def _expect_failures(self, ranks: frozenset[int]) -> None:
        """Announce trials, so that no failure in them counts before it is judged."""
        try:
            async with asyncio.timeout(ANNOUNCE_S):
                await self._supervisor.expect_failures.remote(self.index, self.epoch, ranks)
        except (RayError, TimeoutError) as error:  # the supervisor may start anew
            logger.warning("the supervisor takes no notice of requests on trial: %r", error)

    def _set_aside_poison(self, requests: list[OpenRequest], failed: frozenset[int]) -> None:
        """Put the requests on trial that may have ended ranks, and end those that are proved to."""
        for poison in self._suspects.judge(requests, lambda place: place[1] in failed):
            logger.error("request %s is set aside: it ends its rank", poison.request_id)
            self._refusals.add(poison.digest)
            self._supervisor.refuse.remote(poison.digest)
            poison.put(RequestOutput(poison.wire_id, [], "abort", POISON))
        if self._suspects.verdict is not None:
            self._supervisor.judge_failure.remote(self.index, self._suspects.verdict)

    def _deliver(
        self, lease_id: str, rank: int, load_of_others: int, outputs: list[RequestOutput]
    ) -> None:
        """Pass the outputs of one step of a rank to the requests."""
        if lease_id != self.lease_id:
            return  # the other streams of the lease are still being opened: a rank only reports its load
        self._router.report((self.index, rank), load_of_others)
        if outputs and not outputs[0].begins:
            self._token_times[rank] = time.monotonic()
        for output in outputs:
            request = self.open.get(output.request_id)
            if request is not None:  # otherwise its client has left
                request.put(output)

    def _abort(self, request: OpenRequest) -> None:
        assert self._streams is not None
        self._streams.abort(request.place[1], request.wire_id)

    def _forget(self, request: OpenRequest) -> None:
        """Release what the last submission took."""
        if self.open.pop(request.wire_id, None) is not None:
            request.release()
            self._router.keep(request.load, request.tail, request.emitted)


def _abort_prompts(requests: Iterable[OpenRequest], reason: str) -> None:
    """End the prompts that a group computes for other groups, which compute them sooner than it can go on."""
    _abort_all((request for request in requests if request.apart), reason)


def _abort_all(requests: Iterable[OpenRequest], reason: str) -> None:
    """End the requests that have not ended."""
    for request in requests:
        if not request.finished:  # otherwise its client has still to read the last tokens
            request.put(RequestOutput(request.wire_id, [], "abort", reason))
