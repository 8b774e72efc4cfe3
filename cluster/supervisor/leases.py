"""Leases of ingresses, one for each group: without a heartbeat for LEASE_S the streams end. No Ray, no I/O."""

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

LEASE_S = 10.0
SUCCESSOR_S = 30.0  # after the end of the last ingress; Serve replaces a dead one within 15 s


@dataclass
class _Lease:
    ingress_id: str
    group: int
    renewed: float


class Leases:
    """The living ingresses.

    An ingress opens a lease, and a new one when an old one has expired: then its streams in the ranks are closed and
    its requests are aborted. The random part of a lease's name makes the streams of both leases differ, so that a late
    `close_stream` of the old lease cannot close a stream of the new one.

    start_timeout_s: time for the first ingress to come; after the last one has ended, another has SUCCESSOR_S to come.
    """

    def __init__(self, start_timeout_s: float, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._leases: dict[str, _Lease] = {}
        self._missing_since = clock()
        self._missing_limit_s = start_timeout_s

    @property
    def ingress_ids(self) -> set[str]:
        """The ingresses that have a lease."""
        return {lease.ingress_id for lease in self._leases.values()}

    def of_group(self, group: int) -> set[str]:
        """The leases of a group."""
        return {lease_id for lease_id, lease in self._leases.items() if lease.group == group}

    def open(self, ingress_id: str, group: int) -> str:
        """Give an ingress a new lease of a group; returns the lease's id."""
        lease_id = f"{ingress_id}.{uuid.uuid4().hex[:12]}"
        self._leases[lease_id] = _Lease(ingress_id, group, self._clock())
        return lease_id

    def adopt(self, lease_id: str, group: int) -> None:
        """Take over a lease that an earlier process of the supervisor gave."""
        self._leases[lease_id] = _Lease(lease_id.rpartition(".")[0], group, self._clock())

    def renew(self, lease_id: str) -> bool:
        """Whether the lease was still valid; it is renewed then."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        lease.renewed = self._clock()
        return True

    def close(self, lease_id: str) -> int | None:
        """End a lease. Returns its group, or None if the lease had ended before."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return None
        if not self._leases:
            self._missing_since, self._missing_limit_s = self._clock(), SUCCESSOR_S
        return lease.group

    def expired(self) -> list[tuple[str, str]]:
        """The leases that were not renewed for LEASE_S: (lease id, ingress id) of each."""
        limit = self._clock() - LEASE_S
        return [
            (lease_id, lease.ingress_id)
            for lease_id, lease in self._leases.items()
            if lease.renewed < limit
        ]

    def restart_wait(self) -> None:
        """Let the time without an ingress begin now."""
        self._missing_since = self._clock()

    def abandoned(self) -> bool:
        """Whether no ingress has come for too long."""
        missing_s = self._clock() - self._missing_since
        return not self._leases and missing_s > self._missing_limit_s
