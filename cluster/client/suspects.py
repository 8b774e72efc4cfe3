"""Finds the requests that end ranks, among the open requests of an ingress.

A rank names each request that it begins. When the rank fails, each of its requests that was begun and sent no token is
put on trial, with its copies: in the next epoch its rank runs it alone among requests without a token. A token clears
it. Failures in trials of one digest count together, those of several ranks at once as one. The third failure proves all
open requests of the digest to be poison; two happen by chance where ranks die often and copies run on several ranks. If
the notice was lost with its rank, three failures in a row without a token put a request on trial too.

Another group may go on with a request that has a token, or that its rank has not begun: once without a token, because
the notice may be lost. So a request that ends ranks cannot take one group after another with it. Knows nothing of
ranks, groups or Ray.
"""

from collections.abc import Callable, Iterable
from itertools import groupby
from operator import attrgetter

from cluster.client.open_request import OpenRequest
from cluster.client.router import Place

TRIAL_FAILURES = 3
UNEXPLAINED_FAILURES = 3
MAX_CAUSES = 2

_by_place = attrgetter("place")


class Suspects:
    """Counts the failures of ranks for one ingress.

    verdict   whether a request caused the failure of the last `judge`; None if the failed ranks had none on trial. A
              request may cause any number of failures; a rank that fails at more than MAX_CAUSES different requests,
              and serves none, is broken
    """

    def __init__(self) -> None:
        self.verdict: bool | None = None
        self._causes: set[bytes] = set()  # digests, since a failed rank has served a request
        self._served: set[Place] = set()  # of requests that have left with a token of this epoch

    def leave(self, requests: Iterable[OpenRequest]) -> None:
        """Note that other groups go on with requests of a group that has failed."""
        for request in requests:
            if request.fresh:
                request.failures += 1
            else:
                self._served.add(request.place)

    def judge(
        self, requests: Iterable[OpenRequest], failed: Callable[[Place], bool]
    ) -> list[OpenRequest]:
        """Count the failures that ended an epoch for its open requests; return the poison.

        failed   whether the rank of a place has failed
        """
        self.verdict = None
        requests, tried = list(requests), set()
        if any(map(failed, self._served)):
            self._causes.clear()
        self._served.clear()
        hit = sorted((request for request in requests if failed(request.place)), key=_by_place)
        for _, of_rank in groupby(hit, _by_place):
            tried |= self._judge_rank(list(of_rank))
        copies = [request for request in requests if tried and request.digest in tried]
        poison = set()
        for digest in tried:
            # A copy with a token in this epoch was cleared, and must not keep the failures of another copy.
            same = [request for request in copies if request.fresh and request.digest == digest]
            count = 1 + max(request.trial_failures for request in same)
            for request in same:
                request.trial_failures = count
            if count >= TRIAL_FAILURES:
                poison.add(digest)
        _try_copies(requests)
        return [request for request in copies if request.digest in poison]

    def _judge_rank(self, requests: list[OpenRequest]) -> set[bytes]:
        """Judge the requests of one failed rank; return the digests of the requests that had begun their trial."""
        begun = [request for request in requests if request.begun]
        tried = {request.digest for request in begun if request.on_trial}
        had_trials = any(request.on_trial for request in requests)
        for request in requests:
            request.failures += 1
            if request.begun or (not begun and request.failures >= UNEXPLAINED_FAILURES):
                request.on_trial = True
        if not all(request.fresh for request in requests):
            self._causes.clear()
        if tried:
            self._causes |= tried
        if had_trials:
            by_request = bool(tried) and len(self._causes) <= MAX_CAUSES
            self.verdict = bool(self.verdict) or by_request
        return tried


def _try_copies(requests: list[OpenRequest]) -> None:
    """Put the copies of requests on trial on trial too: a client may have sent one body to several ranks."""
    suspected = [request for request in requests if request.on_trial]
    lengths = {len(request.prompt_token_ids) for request in suspected}
    digests = {request.digest for request in suspected}
    for request in requests:
        if request.fresh and not request.on_trial and len(request.prompt_token_ids) in lengths:
            request.on_trial = request.digest in digests


def turn(request: OpenRequest) -> int:
    """Return the place of a request in the order of submission to an epoch: first trials, then requests without one.

    The requests with a failure in their trial are last, so that all other requests get tokens before the next one.
    """
    return 2 if request.trial_failures else 0 if request.on_trial else 1
