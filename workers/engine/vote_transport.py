"""Vote transports: they send one small int64 row of every rank to every rank, with a timeout of their own.

This wait is the heartbeat of the group. Knows nothing of the fields of a row.
"""

from abc import ABC, abstractmethod

import numpy as np

from kernels.host.shm import SharedMemoryGroup
from workers.step.step_sync import AbortedError, LockstepError


class AbortableVote(ABC):
    """A vote transport that another thread can end."""

    _aborted = False

    def abort(self) -> None:
        """Make this call of `all_gather`, and all later ones, raise LockstepError."""
        self._aborted = True

    def close(self) -> None:  # noqa: B027 - most transports own nothing
        """Close the sockets and threads that the transport owns, when no thread waits in `all_gather`."""

    def all_gather(self, row: np.ndarray) -> np.ndarray:
        """int64 [n] -> int64 [num_ranks, n]; the result may be overwritten by the next call."""
        if self._aborted:
            raise AbortedError
        return self._all_gather(row)

    @abstractmethod
    def _all_gather(self, row: np.ndarray) -> np.ndarray: ...


class LocalVoteTransport(AbortableVote):
    """A group of one rank: returns its row."""

    def _all_gather(self, row: np.ndarray) -> np.ndarray:
        return row[None]


class SharedMemoryVoteTransport(AbortableVote):
    """Ranks of one host."""

    def __init__(self, group: SharedMemoryGroup):
        self._group = group

    def _all_gather(self, row: np.ndarray) -> np.ndarray:
        try:
            return self._group.all_gather_row(row)
        except (TimeoutError, ConnectionError) as error:
            raise LockstepError(f"vote: {error}") from None
