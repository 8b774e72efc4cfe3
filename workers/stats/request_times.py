"""Times of each request of a rank: waiting, prefill, decode. Keeps one entry per request, nothing per token."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

from workers.stats.histogram import Histogram
from workers.step.sequence import Sequence
from workers.wire.request import PROBE_PREFIX, RequestOutput, RequestTimes

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0),
    *(10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
)


@dataclass(slots=True)
class _Open:
    """Moments of one request in seconds; 0 before they come."""

    arrived: float
    admitted: float = 0.0
    first_token: float = 0.0


class RequestTimer:
    """Times the requests of one rank. `arrived` may be called from any thread; the step loop calls all else."""

    def __init__(self) -> None:
        self.queue = Histogram(SECONDS)
        self.prefill = Histogram(SECONDS)
        self.decode = Histogram(SECONDS)
        self.inference = Histogram(SECONDS)
        self._open: dict[str, _Open] = {}
        self._probes: set[str] = set()  # those that run
        self._without_token: set[str] = set()

    def arrived(self, request_id: str) -> None:
        """A request reached this rank. An id in use keeps the times of its first request. Probes are not timed."""
        if request_id.startswith(PROBE_PREFIX):
            self._probes.add(request_id)
            return
        self._open.setdefault(request_id, _Open(time.perf_counter()))

    def admitted(self, seqs: Iterable[Sequence]) -> None:
        """`seqs` start to run: for the first time, or again after a preemption."""
        now = time.perf_counter()
        for seq in seqs:
            times = self._open.get(seq.request.request_id)
            if times is not None and not times.admitted:
                times.admitted = now
                self.queue.observe(now - times.arrived)
                self._without_token.add(seq.request.request_id)

    def num_tokens(self, outputs: list[RequestOutput]) -> int:
        """Return the tokens of the outputs, without those of probes; called before `committed`."""
        probes = self._probes
        if not probes:
            return sum(len(output.token_ids) for output in outputs)
        return sum(len(it.token_ids) for it in outputs if it.request_id not in probes)

    def committed(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Return the outputs; an output that ends a request gets the times of the request."""
        if self._without_token:
            now = time.perf_counter()
            for output in outputs:
                if output.request_id in self._without_token:
                    self._without_token.remove(output.request_id)
                    times = self._open[output.request_id]
                    times.first_token = now
                    self.prefill.observe(now - times.admitted)
        return [
            output if output.finish_reason is None else self._ended(output) for output in outputs
        ]

    def forget(self, request_id: str) -> RequestTimes | None:
        """Remove a request that ended or was aborted; return its times, None if it got no token."""
        self._without_token.discard(request_id)
        self._probes.discard(request_id)
        times = self._open.pop(request_id, None)
        if times is None or not times.first_token:
            return None
        now = time.perf_counter()
        self.decode.observe(now - times.first_token)
        self.inference.observe(now - times.admitted)
        return RequestTimes(
            times.admitted - times.arrived,
            times.first_token - times.admitted,
            now - times.first_token,
        )

    def _ended(self, output: RequestOutput) -> RequestOutput:
        times = self.forget(output.request_id)
        return output if times is None else replace(output, times=times)
