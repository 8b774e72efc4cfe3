"""Requests that another rank goes on with: their end is published when the other rank can find their KV.

Where KV never leaves the device there is nothing to wait for. Knows nothing of the places outside the device.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from workers.engine.open_requests import OpenRequests
from workers.kv_cache.manager import KVCacheManager
from workers.wire.request import EngineRequest, RequestOutput

HOLD_S = 2.0
"""Longest time for which an end is held back: by then it is faster to compute a prompt again."""


@dataclass(frozen=True)
class _HandOver:
    """An end that is held back.

    request  the part of a request that ends
    last     the output with its end
    names    contents of the cache that are on their way as the request ends
    """

    request: EngineRequest
    last: RequestOutput
    names: set[bytes]
    until: float


class HandOvers:
    """The hand-overs of one engine, used by the thread of its loop.

    publish  publish(ingress_id, outputs)
    """

    def __init__(
        self,
        cache: KVCacheManager,
        open_requests: OpenRequests,
        publish: Callable[[str, list[RequestOutput]], None],
    ):
        self._cache, self._open_requests, self._publish = cache, open_requests, publish
        self._held: list[_HandOver] = []

    def hold(self, output: RequestOutput) -> RequestOutput:
        """Return an output of an open request, without its end if that has to wait."""
        request = self._open_requests.request(output.request_id)
        if output.finish_reason != "length" or not request.hands_over:
            return output
        self._cache.save_all()
        names = self._cache.names_on_way
        if not names:
            return replace(output, kv_source=self._cache.kv_source)
        last = replace(output, token_ids=[], logprobs=None, prompt_logprobs=None, drafts=None)
        last.num_cached_tokens = 0
        self._held.append(_HandOver(request, last, names, time.monotonic() + HOLD_S))
        return replace(output, finish_reason=None, times=None)

    def publish_ended(self) -> None:
        """Publish the ends for which everything is in its place. Requests that were aborted meanwhile get nothing."""
        if not self._held:
            return
        self._cache.save_all()
        on_way, now = self._cache.names_on_way, time.monotonic()
        held, self._held = self._held, []
        for it in held:
            if not it.names.isdisjoint(on_way) and now < it.until:
                self._held.append(it)
            elif self._open_requests.is_open(it.request):
                ingress_id = self._open_requests.remove(it.last.request_id)
                self._publish(ingress_id, [replace(it.last, kv_source=self._cache.kv_source)])

    @property
    def left_s(self) -> float | None:
        """Time until an end has to be published; None: no end is held back."""
        if not self._held:
            return None
        return max(0.0, min(it.until for it in self._held) - time.monotonic())
