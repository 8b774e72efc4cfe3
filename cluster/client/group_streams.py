"""The ranks of one epoch of a group as an ingress reaches them: their inboxes, and one stream of tokens from all ranks.

Valid for one lease of the ingress and one epoch of the group; after either has ended, a GroupClient opens the next one.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cluster.supervisor.ray_calls import gather
from cluster.supervisor.status import GroupMembers
from workers.wire.inbox import InboxSender
from workers.wire.request import EngineRequest, RequestOutput
from workers.wire.token_stream import TokenReceiver

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
        self._inboxes: list[InboxSender] = []
        self._receiver = TokenReceiver(address, self.epoch)
        self._receiver.listen(deliver)

    async def open(self) -> None:
        """Open the stream of every rank. Raises RayError when a rank is gone, ZMQError without a free descriptor."""
        target = self._receiver.address
        calls = [
            rank.open_stream.remote(self.epoch, self._stream_id, target)
            for rank in self._members.ranks
        ]
        for inbox in await gather(calls):
            self._inboxes.append(InboxSender(inbox, self.epoch))

    def submit(self, rank: int, request: EngineRequest) -> None:
        """Send a request to `rank`; its tokens come by this client's stream."""
        self._inboxes[rank].submit(replace(request, ingress_id=self._stream_id))

    def abort(self, rank: int, request_id: str) -> None:
        """End a request; a rank ignores requests that it has finished."""
        self._inboxes[rank].abort(request_id)

    async def stats(self) -> list[dict[str, Any]]:
        """Counters and gauges of each rank, in rank order. Raises RayError when a rank is gone."""
        return await gather([rank.stats.remote() for rank in self._members.ranks])

    def close(self) -> None:
        """Drop what was not sent or not read, and stop listening."""
        for inbox in self._inboxes:
            inbox.close()
        self._receiver.close()
