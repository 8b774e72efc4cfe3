"""Finds the request that ends ranks, among the open requests of an ingress.

A request is a suspect after its rank has failed MAX_DEATHS times in a row before it sent a token of the request. A lone
suspect is poison. Of several suspects one at a time is submitted: all but the poison send a token and are cleared.
Knows nothing of ranks, groups or Ray.
"""

from collections.abc import Callable, Iterable

from cluster.group.open_request import OpenRequest

MAX_DEATHS = 2


class Suspects:
    """Suspects of one ingress. All methods run in one event loop."""

    def __init__(self) -> None:
        self._waiting: list[OpenRequest] = []
        self._on_trial: OpenRequest | None = None

    @property
    def any(self) -> bool:
        """Whether there are suspects."""
        return self._on_trial is not None or bool(self._waiting)

    def judge(
        self, requests: Iterable[OpenRequest], failed: Callable[[OpenRequest], bool]
    ) -> OpenRequest | None:
        """Count the end of an epoch for its open requests; return the poison, if it is found.

        failed   whether the rank of a request has failed
        """
        submitted = [request for request in requests if request not in self._waiting]
        for request in submitted:
            request.deaths += failed(request)
        trial, poison = self._on_trial, None
        if trial is not None and failed(trial):
            self._on_trial, poison = None, trial
        self._waiting += [
            request
            for request in submitted
            if request.deaths >= MAX_DEATHS and request is not trial
        ]
        if trial is None and len(self._waiting) == 1:
            poison = self._waiting.pop()
        return poison

    def holds(self, request: OpenRequest) -> bool:
        """Whether a request waits for its trial and must not be submitted."""
        return request in self._waiting

    def next(self) -> OpenRequest | None:
        """Return the request to submit now, if no trial is open: it is on trial until `ended`."""
        if self._on_trial is not None or not self._waiting:
            return None
        self._on_trial = self._waiting.pop(0)
        return self._on_trial

    def ended(self, request: OpenRequest) -> bool:
        """Note a token or the end of a request; return whether that ends a trial."""
        if request is self._on_trial:
            self._on_trial = None
            return True
        if request in self._waiting:
            self._waiting.remove(request)
        return False
