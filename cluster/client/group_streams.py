"""The ranks of one epoch of a group as an ingress reaches them: their inboxes, and one stream of tokens from all ranks.

Valid for one lease of the ingress and one epoch of the group; after either has ended, a GroupClient opens the next one.
A stream is opened again, without the other streams, after a message in either direction was lost or cannot be read. A
rank that this ingress cannot reach, while its peers can, delays no other rank.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from ray.exceptions import RayError

from cluster.client.stream_watch import StreamWatch
from cluster.supervisor.ray_calls import gather, result_future
from cluster.supervisor.status import GroupMembers
from kernels.host.awake import wait_awake
from kernels.host.owned import Failed, OwnedTask
from workers.specs.expert_layout import ExpertReport
from workers.wire.inbox import InboxSender
from workers.wire.request import EngineRequest, RequestOutput
from workers.wire.secure_socket import StreamAddress
from workers.wire.token_stream import TokenReceiver

logger = logging.getLogger(__name__)

RETRY_S = 0.5
OPEN_S = 5.0
"""Time for a rank to open a stream; a rank needs some milliseconds."""
STATS_S = 1.5
"""Time for a rank to report its statistics; below `ApiSettings.stats_timeout_s`, so that slow ranks hide no others."""
REOPEN_S = 1.0
"""Time to open a stream again after a lost message, while the rank is taken for one that can be reached."""

OfRank = Callable[[int], Awaitable[None]]

Deliver = Callable[[int, int, list[RequestOutput]], None]
"""deliver(rank, load_of_others, outputs): what one rank sent after one step."""


class GroupStreams:
    """Call `open` first.

    stream_id: names the streams in the ranks; differs from that of all earlier GroupStreams.
    """

    def __init__(self, members: GroupMembers, stream_id: str, address: str, deliver: Deliver):
        self.epoch = members.epoch
        self._members = members
        self._stream_id = stream_id
        self._deliver = deliver
        self._reopened: OfRank
        self._unreachable: OfRank
        self._failed: Failed
        self._inboxes: dict[int, InboxSender] = {}  # of ranks that have been reached
        self._watches: dict[int, StreamWatch] = {}
        self._broken: dict[int, OwnedTask] = {}  # by rank; outputs of these ranks are dropped
        self._opened = asyncio.Event()
        self._receiver = TokenReceiver(address, self.epoch)
        self._receiver.listen(self)

    async def open(self, reopened: OfRank, unreachable: OfRank, failed: Failed) -> None:
        """Open the stream of every rank that can be reached. Raises RayError when a rank is gone, OSError without free
        descriptors and when no rank can be reached.

        reopened(rank): called when a stream is open again, and its rank has aborted the requests of the stream before
        unreachable(rank): called when a rank cannot be reached now; until `reopened` its requests get no tokens
        failed: called with an unexpected error of a task
        """
        self._reopened, self._unreachable, self._failed = reopened, unreachable, failed
        ranks = range(len(self._members.ranks))
        streams = [self._receiver.open_stream(rank) for rank in ranks]
        calls = [result_future(call) for call in map(self._open_stream, ranks, streams)]
        answered, _ = await asyncio.wait(calls, timeout=OPEN_S, return_when=asyncio.FIRST_EXCEPTION)
        for rank, call in enumerate(calls):
            if call in answered:
                self._opened_by(rank, call.result(), streams[rank])
        if not answered:
            raise TimeoutError(f"no rank has opened a stream within {OPEN_S:g} s")
        self._opened.set()
        for rank in ranks:
            if rank not in self._inboxes:
                self._give_up(rank, f"the rank has not opened it within {OPEN_S:g} s", 0.0)

    def check_silence(self) -> None:
        """Open the streams again of ranks that send no beats."""
        for rank, watch in self._watches.items():
            self._give_up(rank, watch.silence(), 0.0)

    def submit(self, rank: int, request: EngineRequest) -> None:
        """Send a request to `rank`; its tokens come by this client's stream.

        While the stream is opened again nothing is sent, because `reopened` submits all requests of the rank.
        """
        if rank not in self._broken:
            self._inboxes[rank].submit(replace(request, ingress_id=self._stream_id))

    def abort(self, rank: int, request_id: str) -> None:
        """End a request; a rank ignores requests that it has finished."""
        if rank in self._inboxes:
            self._inboxes[rank].abort(request_id)

    async def stats(self) -> list[dict[str, Any]]:
        """Counters and gauges of each rank, in rank order. Raises RayError when a rank is gone.

        A rank that cannot be reached, or does not answer within STATS_S, has nothing but `rank` and `silent`.
        """
        ranks = enumerate(self._members.ranks)
        calls = {r: result_future(it.stats.remote()) for r, it in ranks if r not in self._broken}
        await wait_awake(calls.values(), STATS_S)
        # `cancel` returns False for a call that is done.
        found = {rank: call.result() for rank, call in calls.items() if not call.cancel()}
        return [found.get(r, {"rank": r, "silent": True}) for r in range(len(self._members.ranks))]

    async def expert_reports(self) -> list[ExpertReport]:
        """Where the experts are, of each rank. Raises RayError when a rank is gone."""
        members = self._members
        return await gather([it.expert_report.remote(members.epoch) for it in members.ranks])

    def close(self) -> None:
        """Drop what was not sent or not read, and stop listening."""
        for task in self._broken.values():
            task.cancel()
        for inbox in self._inboxes.values():
            inbox.close()
        self._receiver.close()

    # What the receiver calls.

    def deliver(self, rank: int, load_of_others: int, outputs: list[RequestOutput]) -> None:
        """Pass outputs on, unless they continue outputs that were lost."""
        if rank not in self._broken:
            self._deliver(rank, load_of_others, outputs)

    def beat(self, rank: int, num_taken: int | None) -> None:
        """Check that the messages of this client arrive."""
        if self._opened.is_set() and rank not in self._broken:
            num_sent = self._inboxes[rank].num_sent
            self._give_up(rank, self._watches[rank].beat(num_taken, num_sent))

    def lost(self, rank: int) -> None:
        """Open the stream of a rank again."""
        self._give_up(rank, "a message of the rank is missing or cannot be read")

    def _give_up(self, rank: int, reason: str | None, patience_s: float = REOPEN_S) -> None:
        """Open a stream again, if there is a reason; until then its rank's outputs are dropped.

        patience_s: time for the rank to answer, before it is taken for one that cannot be reached
        """
        if reason is None or rank in self._broken:
            return
        logger.warning("the stream of rank %d is opened again: %s", rank, reason)
        reopen = self._reopen(rank, patience_s)
        self._broken[rank] = OwnedTask(reopen, self._failed, "reopen", may_end=True)

    async def _reopen(self, rank: int, patience_s: float) -> None:
        await self._opened.wait()
        opening = asyncio.create_task(self._open_again(rank))
        try:
            if not (await asyncio.wait({opening}, timeout=patience_s))[0]:
                await self._unreachable(rank)
            await opening
        finally:
            opening.cancel()
        del self._broken[rank]
        await self._reopened(rank)

    async def _open_again(self, rank: int) -> None:
        """Open the stream of a rank; try until `close` while the rank does not answer."""
        while True:
            stream = self._receiver.open_stream(rank)
            try:
                self._opened_by(rank, await self._open_stream(rank, stream), stream)
                return
            except (RayError, OSError) as error:
                logger.warning("the stream of rank %d cannot be opened yet: %s", rank, error)
                await asyncio.sleep(RETRY_S)

    def _opened_by(self, rank: int, inbox: StreamAddress, stream: bytes) -> None:
        """Use the stream that a rank has opened. Raises OSError without free descriptors."""
        sender = InboxSender(inbox, self.epoch, stream)
        if rank in self._inboxes:
            self._inboxes[rank].close()
        self._inboxes[rank] = sender
        self._watches[rank] = StreamWatch()

    def _open_stream(self, rank: int, stream: bytes) -> Awaitable[StreamAddress]:
        """Return the inbox of a rank, once the rank sends to this client."""
        handle, address = self._members.ranks[rank], self._receiver.address
        opened: Awaitable[StreamAddress] = handle.open_stream.remote(
            self.epoch, self._stream_id, address, stream
        )
        return opened
