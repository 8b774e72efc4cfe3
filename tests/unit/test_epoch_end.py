"""The end of an epoch by one thread while another one ends it too."""

from typing import Any

import torch

from workers.rank.epoch import Epoch, _Parts


class Shared:
    """The shared memory of a group, of which only the abort counts."""

    aborted = False

    def abort(self) -> None:
        self.aborted = True


class ClosingPeers:
    """Peers of an epoch that is closed as soon as its shared memory has been read once."""

    def __init__(self, shared: Shared):
        self._shared: Shared | None = shared

    @property
    def shared_memory(self) -> Shared | None:
        shared, self._shared = self._shared, None
        return shared


def test_an_abort_may_come_while_the_loop_closes_the_epoch() -> None:
    epoch: Any = object.__new__(Epoch)
    shared = Shared()
    epoch.failed, epoch._parts, epoch._peers = False, _Parts(), ClosingPeers(shared)
    epoch.process = type("Process", (), {"device": torch.device("cpu")})
    epoch.abort()
    assert epoch.failed and shared.aborted
