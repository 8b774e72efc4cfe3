"""Requests that have ended ranks: their digests, which are refused for a time."""

import hashlib
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

from cluster.errors import PoisonRequestError
from workers.wire.request import ImageInput, SamplingParams

REFUSE_S = 600.0
"""Time for which a digest is refused after its request was set aside."""


def request_digest(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    adapter: int = 0,
    images: Sequence[ImageInput] = (),
) -> bytes:
    """The digest of all that a rank computes from, without the seed, which the server draws anew for each attempt."""
    found = hashlib.sha256(array("q", prompt_token_ids).tobytes())
    found.update(repr(replace(params, seed=0, stop_token_ids=frozenset())).encode())
    found.update(repr((sorted(params.stop_token_ids), adapter)).encode())
    for image in images:
        found.update(image.digest)
    return found.digest()


class Refusals:
    """The digests that one ingress refuses."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[bytes, float] = {}

    def add(self, digest: bytes) -> None:
        """Refuse a digest for REFUSE_S seconds."""
        self._until[digest] = self._clock() + REFUSE_S

    def check(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        adapter: int = 0,
        images: Sequence[ImageInput] = (),
    ) -> None:
        """Raise PoisonRequestError if the request's digest is refused."""
        now = self._clock()
        self._until = {digest: until for digest, until in self._until.items() if until > now}
        if not self._until:
            return
        if request_digest(prompt_token_ids, params, adapter, images) in self._until:
            raise PoisonRequestError
