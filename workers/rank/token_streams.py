"""The streams between a rank and its ingresses in one epoch: tokens to an ingress, its requests to the inbox.

Knows nothing of Ray and of the engine.
"""

import asyncio
from dataclasses import dataclass

from workers.wire.inbox import Inbox
from workers.wire.request import RequestOutput
from workers.wire.secure_socket import StreamAddress
from workers.wire.token_stream import BEAT_S, TokenSender


@dataclass(frozen=True)
class _Stream:
    """Both directions; `stream` names them in the messages."""

    sender: TokenSender
    stream: bytes


class TokenStreams:
    """The open streams by the lease of their ingress. `send` belongs to the step loop, the rest to the event loop."""

    def __init__(self, inbox: Inbox):
        self._inbox = inbox
        self._open: dict[str, _Stream] = {}

    def __contains__(self, lease_id: str) -> bool:
        return lease_id in self._open

    @property
    def leases(self) -> tuple[str, ...]:
        """The leases that have a stream."""
        return tuple(self._open)

    def open(self, lease_id: str, address: StreamAddress, epoch: int, stream: bytes) -> None:
        """Open the stream of a lease that has none: send tokens to `address`, and take its requests.

        Raises OSError where the process has no descriptors left.
        """
        assert lease_id not in self._open, f"{lease_id} has a stream"
        sender = TokenSender(address, epoch, stream)
        self._inbox.open_stream(stream)
        self._open[lease_id] = _Stream(sender, stream)

    def close(self, lease_id: str) -> None:
        """Take no more requests of a lease, and send it nothing more."""
        found = self._open.pop(lease_id, None)
        if found is not None:
            self._inbox.close_stream(found.stream)
            found.sender.close()

    def close_all(self) -> None:
        """Close the streams of all leases."""
        for lease_id in self.leases:
            self.close(lease_id)

    def send(
        self, lease_id: str, rank: int, load_of_others: int, outputs: list[RequestOutput]
    ) -> None:
        """Send outputs of a step, unless the stream has just been closed."""
        found = self._open.get(lease_id)
        if found is not None:
            found.sender.send(rank, load_of_others, outputs)

    async def beat(self, rank: int) -> None:
        """Send beats to all ingresses, until cancelled."""
        while True:
            await asyncio.sleep(BEAT_S)
            for found in self._open.values():
                found.sender.beat(rank, self._inbox.num_taken(found.stream))
