"""Outputs of an engine on their way to the ingresses: one message a step for each ingress. Knows nothing of steps."""

from collections import defaultdict
from collections.abc import Callable

from workers.engine.hand_overs import HandOvers
from workers.engine.open_requests import OpenRequests
from workers.kv_cache.manager import KVCacheManager
from workers.stats.request_times import RequestTimer
from workers.wire.request import RequestOutput

Publish = Callable[[str, list[RequestOutput]], None]
LOAD_INTERVAL_STEPS = 16  # steps


class Outbox:
    """Belongs to the thread of the step loop.

    publish(ingress_id, outputs)   sends outputs
    """

    def __init__(
        self,
        cache: KVCacheManager,
        open_requests: OpenRequests,
        timer: RequestTimer,
        publish: Publish,
    ):
        self._open_requests, self._timer, self._publish = open_requests, timer, publish
        self._hand_overs = HandOvers(cache, open_requests, publish)
        self._outputs: defaultdict[str, list[RequestOutput]] = defaultdict(list)  # by ingress

    def add(self, ingress_id: str, output: RequestOutput) -> None:
        """Add an output of no step."""
        self._outputs[ingress_id].append(output)

    def collect(self, committed: list[RequestOutput]) -> int:
        """Add the outputs of a step, and close the requests that end; return how many tokens count in metrics."""
        num_tokens = self._timer.num_tokens(committed)
        ingress_of, outputs = self._open_requests.ingress_of, self._outputs
        for entry in self._timer.committed(committed):
            if entry.finish_reason is not None:
                entry = self._hand_overs.hold(entry)
            ended = entry.finish_reason is not None
            find = self._open_requests.remove if ended else ingress_of
            outputs[find(entry.request_id)].append(entry)
        return num_tokens

    def send(self, step: int) -> None:
        """Publish all outputs behind step number `step`, now and then with this rank's load."""
        outputs, self._outputs = self._outputs, defaultdict(list)
        for ingress_id, messages in outputs.items():
            self._publish(ingress_id, messages)
        self.send_held()
        if step % LOAD_INTERVAL_STEPS == 0:
            self.send_load()

    def send_held(self) -> None:
        """Publish the ends of requests for which another rank can go on now."""
        self._hand_overs.publish_ended()

    @property
    def held_s(self) -> float | None:
        """Time until an end that is held back is sent at the latest; None: there is none."""
        return self._hand_overs.left_s

    def send_load(self) -> None:
        """Publish this rank's load to ingresses with another load in their last message."""
        for ingress_id in self._open_requests.stale_ingresses():
            self._publish(ingress_id, [])
