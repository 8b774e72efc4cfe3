"""The step loop of one rank: drain the inbox, schedule, agree, launch, commit, publish; sleep when all are idle.

On GPUs a step is launched before the tokens of the one before it are read (`asynchronous`), so that the device never
waits for the host. All that differs is when a rank commits, which no other rank notices: between the vote and the
collectives nothing is decided by it.

Runs on a thread of its own; `submit`, `abort`, `wake`, `pause`, `resume` and `stop` may be called from any other.
Knows nothing of Ray: what leaves goes through the two callables it is given.
"""

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

from kernels.pending import Pending
from workers.engine.open_requests import OpenRequests
from workers.engine.scheduler import ScheduledBatch, Scheduler
from workers.engine.step_sync import (
    HEALTHY,
    ForwardMode,
    LockstepError,
    PlanConfig,
    StepPlan,
    Vote,
    VoteTransport,
    decide,
)
from workers.runner.graph_sizes import GraphSizes
from workers.runner.model_runner import ModelRunner
from workers.runner.step_output import StepOutput
from workers.sampling.grammar import Compiled, GrammarCompiler
from workers.stats.stats import EngineStats, HostTimes
from workers.ubatch.policy import OverlapPolicy, never
from workers.wire.request import EngineRequest, RequestOutput

logger = logging.getLogger(__name__)

Publish = Callable[[str, list[RequestOutput]], None]
UNHEALTHY = 1
LOAD_INTERVAL_STEPS = 16  # steps


@dataclass(frozen=True)
class IngressGone:
    """In the inbox: forget all requests of this ingress."""

    id: str


@dataclass(frozen=True)
class Ready:
    """In the inbox: a request whose grammar was compiled, or why it was not."""

    request: EngineRequest
    grammar: Compiled | None


# A request to run, the id of one to forget, or an ingress whose requests to forget.
Message = EngineRequest | Ready | str | IngressGone


@dataclass(frozen=True)
class InFlightStep:
    """A step under way."""

    batch: ScheduledBatch
    plan: StepPlan
    output: Pending[StepOutput]
    times: HostTimes


class Engine:
    """One rank's loop.

    publish(ingress_id, outputs)   called once a step for each ingress with outputs; now and then without outputs
    wake_peers(step)               asks every other rank to come to exchange number `step`
    asynchronous                   commit a step when the next one is launched; the runner must be so too
    overlap                        when this rank wants its steps in slices; the runner must have `ubatches` for it
    graph_sizes                    of the graphs that the runner has
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        exchange: VoteTransport,
        plan_config: PlanConfig,
        *,
        epoch: int,
        publish: Publish,
        wake_peers: Callable[[int], None],
        stats: EngineStats | None = None,
        grammars: GrammarCompiler | None = None,
        asynchronous: bool = False,
        overlap: OverlapPolicy | None = None,
        graph_sizes: GraphSizes | None = None,
    ):
        self.scheduler = scheduler
        self.runner = runner
        self.stats = stats or EngineStats()
        self._exchange = exchange
        self._plan_config = plan_config
        self._epoch = epoch
        self._publish = publish
        self._wake_peers = wake_peers
        self._grammars = grammars
        self._graph_sizes = graph_sizes or GraphSizes()
        self._max_in_flight = int(asynchronous)
        self._overlap = overlap or never("this engine has none")
        self._in_flight: deque[InFlightStep] = deque()
        self._committed: list[tuple[InFlightStep, StepOutput, int]] = []
        self._committing = 0.0  # seconds of this step
        self._outputs: list[RequestOutput] = []
        self._step = 0
        self.open_requests = OpenRequests()
        self._changed = threading.Condition()
        # Guarded by _changed; deque.append alone would do, but a sleeper must not miss it.
        self._inbox: deque[Message] = deque()
        self._awaited_step = -1
        self._pausing = False
        self._voted_pause = False
        self._stopping = False

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; its tokens, or its refusal, leave through `publish`."""
        self.stats.requests.arrived(request.request_id)
        self._tell(request)

    def abort(self, request_id: str) -> None:
        """Forget a request; nothing more is published for it. Unknown ids are ignored."""
        self._tell(request_id)

    def abort_ingress(self, ingress_id: str) -> None:
        """Forget all requests of an ingress that is gone."""
        self._tell(IngressGone(ingress_id))

    def wake(self, step: int) -> None:
        """A peer goes to exchange number `step`: do not sleep through it.

        A number instead of a flag: it can come early or twice, but it is never lost and never wakes for nothing.
        """
        with self._changed:
            self._awaited_step = max(self._awaited_step, step)
            self._changed.notify()

    def pause(self) -> None:
        """The whole group stops after the current step and keeps its requests, until `resume`."""
        with self._changed:
            self._pausing = True
            self._changed.notify()

    def resume(self) -> None:
        """Undo this rank's `pause`."""
        with self._changed:
            self._pausing = False
            self._changed.notify()

    def stop(self) -> None:
        """The whole group leaves its loops after the current step."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def run(self) -> None:
        """Step until the group stops. Raises LockstepError, or what a step of this rank raised."""
        while True:
            plan = self.step()
            if plan.stop:
                return
            if not plan.run:
                self._sleep(plan)

    def step(self) -> StepPlan:
        """One lockstep step of this rank."""
        started, self._committing = time.perf_counter(), 0.0
        self._drain_inbox()
        batch, failure = self._schedule()
        scheduled = time.perf_counter()
        schedule = scheduled - started - self._committing
        plan = self._agree(batch, failure)
        agreed = time.perf_counter()
        if plan.run:
            self.stats.before_step(batch)
            output = self.runner.launch(batch, plan)
            self.scheduler.launched(batch)
            times = HostTimes(schedule, agreed - scheduled)
            self._in_flight.append(InFlightStep(batch, plan, output, times))
        self._commit(self._max_in_flight if plan.run else 0)
        self._publish_and_record()
        return plan

    def _commit(self, max_in_flight: int) -> None:
        """Read the outputs of all but the last so many steps and enter them."""
        started = time.perf_counter()
        while len(self._in_flight) > max_in_flight:
            launched = self._in_flight.popleft()
            output = launched.output.wait()
            outputs = self.scheduler.commit(launched.batch, output)
            generated = sum(len(output.token_ids) for output in outputs)
            self._outputs += self.stats.requests.committed(outputs)
            self._committed.append((launched, output, generated))
        self._committing += time.perf_counter() - started

    def _publish_and_record(self) -> None:
        """What was refused and committed since the last time."""
        started = time.perf_counter()
        outputs, self._outputs = self._outputs, []
        self._send(outputs)
        spent = time.perf_counter() - started
        for launched, output, generated in self._committed:
            self.stats.record_step(
                self.scheduler,
                launched.batch,
                launched.plan,
                launched.times,
                output,
                generated=generated,
                publish=spent / len(self._committed),
            )
        self._committed.clear()

    def _tell(self, message: Message) -> None:
        with self._changed:
            self._inbox.append(message)
            self._changed.notify()

    def _drain_inbox(self) -> None:
        """Take in what arrived, and answer requests that can never run here."""
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, str):
                self._forget(message)
                continue
            if isinstance(message, IngressGone):
                for request_id in self.open_requests.of_ingress(message.id):
                    self._forget(request_id)
                self.open_requests.forget_ingress(message.id)
                continue
            if isinstance(message, EngineRequest):
                self.open_requests.add(message)
                message = self._with_grammar(message)
            error = None if message is None else self._add(message)
            if error is not None:
                self.stats.requests.forget(message.request.request_id)
                refused = RequestOutput(message.request.request_id, [], "error", error)
                self._outputs.append(refused)

    def _with_grammar(self, request: EngineRequest) -> Ready | None:
        """`request` and its grammar; None while that is being compiled, then it comes by the inbox."""
        if request.params.grammar is None:
            return Ready(request, None)
        assert self._grammars is not None, "an engine without grammars got a request with one"
        grammar = self._grammars.ready(request.params.grammar)
        if grammar is not None:
            return Ready(request, grammar)
        self._grammars.compile(
            request.params.grammar, lambda compiled: self._tell(Ready(request, compiled))
        )
        return None

    def _add(self, ready: Ready) -> str | None:
        """Queue a request; why that is impossible, or None."""
        if ready.request.request_id not in self.open_requests:
            return None  # it was aborted while its grammar was compiled
        if isinstance(ready.grammar, str):
            return ready.grammar
        return self.scheduler.add(ready.request, ready.grammar)

    def _forget(self, request_id: str) -> None:
        self.scheduler.abort(request_id)
        self.stats.requests.forget(request_id)
        if request_id in self.open_requests:
            self.open_requests.remove(request_id)

    def _schedule(self) -> tuple[ScheduledBatch | None, Exception | None]:
        """This step's batch. A failure is carried to the vote, where every rank learns of it.

        Steps under way are committed first where the batch depends on their tokens, or is empty without them.
        """
        try:
            if self._in_flight and self.scheduler.needs_tokens:
                self._commit(0)
            batch = self.scheduler.schedule()
            if self._in_flight and not batch.seqs:
                self._commit(0)
                batch = self.scheduler.schedule()
            return batch, None
        except Exception as error:
            return None, error

    def _agree(self, batch: ScheduledBatch | None, failure: Exception | None) -> StepPlan:
        num_tokens = batch.num_tokens if batch else 0
        mode = batch.forward_mode if batch else ForwardMode.IDLE
        self._voted_pause = self._pausing
        vote = Vote(
            epoch=self._epoch,
            step=self._step,
            num_tokens=num_tokens,
            **self._graph_sizes.vote(mode, num_tokens),
            wants_ubatch=self._overlap.wants(mode, num_tokens),
            forward_mode=mode,
            has_work=self.scheduler.has_work,
            wants_pause=self._voted_pause,
            wants_stop=self._stopping,
            health=UNHEALTHY if failure else HEALTHY,
        )
        rows = self._exchange.all_gather(vote.row())
        self._step += 1
        try:
            return decide(rows, self._plan_config)
        except LockstepError as error:
            # The rank that failed tells its own reason, the others whose fault it was.
            raise error from failure

    def _send(self, outputs: list[RequestOutput]) -> None:
        by_ingress: defaultdict[str, list[RequestOutput]] = defaultdict(list)
        for output in outputs:
            done = output.finish_reason is not None
            find = self.open_requests.remove if done else self.open_requests.ingress_of
            by_ingress[find(output.request_id)].append(output)
        for ingress_id, messages in by_ingress.items():
            self._publish(ingress_id, messages)
        if self._step % LOAD_INTERVAL_STEPS == 0:
            self._publish_load()

    def _publish_load(self) -> None:
        """Every message tells its ingress how much the others have here; now those learn it that get none."""
        for ingress_id in self.open_requests.stale_ingresses():
            self._publish(ingress_id, [])

    def _sleep(self, plan: StepPlan) -> None:
        """Wait until there is a reason to go to the next exchange, then see that the peers come too."""
        self.stats.record_idle(self.scheduler)
        self._publish_load()
        with self._changed:
            while not (self._has_reason(plan) or self._awaited_step >= self._step):
                self._changed.wait()
            woken_by_peer = self._awaited_step >= self._step
        if not woken_by_peer:
            self._wake_peers(self._step)

    def _has_reason(self, plan: StepPlan) -> bool:
        if self._stopping:
            return True
        if plan.pause:
            # Requests wait while the group is paused; the rank that ends its pause wakes the others.
            return self._voted_pause and not self._pausing
        return bool(self._inbox)
