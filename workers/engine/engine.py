"""Step loop of one rank: drain the inbox, schedule, vote, launch, commit, publish; sleep while all ranks are idle.

On GPUs a step is launched before the tokens of the step before it are read (`asynchronous`), so that the device never
waits for the host. Ranks may commit at different times, because nothing between the vote and the collectives depends on
it. A failure outside the collectives is carried to the next vote, so that all ranks stop at once with its reason.

`run` and `step` belong to one thread; every other method may be called from any thread. Knows nothing of Ray: outputs
leave through `publish`, wakes through `wake_peers`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal

from kernels.host.owned import start_thread
from kernels.pending import Pending
from workers.engine.arrivals import Arrivals
from workers.engine.expert_moves import ExpertMoves
from workers.engine.in_flight import InFlightStep
from workers.engine.messages import Abort, AbortIngress, Message, Refusal
from workers.engine.outbox import Outbox, Publish
from workers.engine.postponed_captures import PostponedCaptures
from workers.overlap.policy import OverlapPolicy, never
from workers.runner.draft_passes import draft_vote, enter_plan
from workers.runner.graph_sizes import GraphSizes
from workers.runner.model_runner import ModelRunner
from workers.sampling.grammar_compiler import GrammarCompiler
from workers.scheduler.commit import Committed
from workers.scheduler.prefill_cap import PrefillCap
from workers.scheduler.scheduler import Scheduler
from workers.stats.stats import EngineStats, HostTimes
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.step_output import StepOutput
from workers.step.step_sync import (
    AbortedError,
    ForwardMode,
    LockstepError,
    PlanConfig,
    StepPlan,
    UnhealthyRankError,
    VoteTransport,
    decide,
    gather_reasons,
)
from workers.step.vote import HEALTHY, Vote
from workers.wire.request import EngineRequest

UNHEALTHY = 1
REPEAT_WAKE_S = 0.5


class Engine:
    """The step loop of one rank in one epoch.

    publish(ingress_id, outputs)  called once a step for each ingress with outputs, and without outputs when the load
                                  of the rank has changed
    wake_peers(step)              wakes all other ranks for vote number `step`
    asynchronous                  commit a step after the next one is launched; the runner must be asynchronous too
    overlap                       decides when this rank wants its steps in ubatches; the runner must have `ubatches`
    graph_sizes                   sizes of the runner's graphs
    prefill_cap, moves            prompt tokens of steps with decodes, and moves of experts; without them, neither
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        vote_transport: VoteTransport,
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
        prefill_cap: PrefillCap | None = None,
        moves: ExpertMoves | None = None,
    ):
        self.scheduler = scheduler
        self.runner = runner
        self.stats = stats or EngineStats()
        self._vote_transport = vote_transport
        self._plan_config = plan_config
        self._epoch = epoch
        self._wake_peers = wake_peers
        self._graph_sizes = graph_sizes or GraphSizes()
        self._prefill_cap = prefill_cap
        self.moves = moves or ExpertMoves()
        self._next_cap = 0  # of prompt tokens in the next step
        self._committed_at = 0.0  # time of the last commit; 0 = the group has slept since
        self._max_in_flight = int(asynchronous)
        self._overlap = overlap or never("this engine has none")
        self._in_flight: deque[InFlightStep] = deque()
        self._launching: list[ScheduledBatch] = []  # its draws wait for the steps in flight
        self._committed: list[tuple[InFlightStep, Committed]] = []
        self._commit_s = 0.0  # of this step
        self._arrivals = Arrivals(
            scheduler,
            self.stats.requests,
            grammars,
            publish=publish,
            answer=lambda ingress_id, output: self._outbox.add(ingress_id, output),
            enqueue=self._enqueue,
        )
        self.open_requests = self._arrivals.open_requests
        self._outbox = Outbox(scheduler.cache, self.open_requests, self.stats.requests, publish)
        self._step = 0
        self._vote_in_progress: int | None = None  # its number
        self._asleep = False
        self._captures = PostponedCaptures(self._sleep)
        self._failure: BaseException | None = None  # voted next
        self._aborted = False
        self._ended = threading.Event()
        self._changed = threading.Condition()
        # Guarded by _changed, because a sleeping loop must notice each change.
        self._inbox: deque[Message] = deque()
        self._awaited_step = -1
        self._stopping = False

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; its tokens, or its refusal, leave through `publish`."""
        self.stats.requests.arrived(request.request_id)
        self._enqueue(request)

    def refuse(self, request_id: str, ingress_id: str, error: str) -> None:
        """Answer a request that cannot be submitted with an error."""
        self._enqueue(Refusal(request_id, ingress_id, error))

    def abort(self, request_id: str) -> None:
        """End a request; nothing more is published for it. Unknown ids are ignored."""
        self._enqueue(Abort(request_id))

    def abort_ingress(self, ingress_id: str) -> None:
        """End all requests of an ingress that has left."""
        self._enqueue(AbortIngress(ingress_id))

    def wake(self, step: int) -> None:
        """Take part in vote number `step`, for which a peer waits. Early and repeated wakes do no harm."""
        with self._changed:
            self._awaited_step = max(self._awaited_step, step)
            self._changed.notify()

    def stop(self) -> None:
        """End the loops of all ranks after the current step."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def discard_outputs(self) -> None:
        """Raise AbortedError instead of committing an output that is read from now on: it may be undefined."""
        self._aborted = True

    def close(self) -> None:
        """Release all blocks; the loop must have ended."""
        self.scheduler.close([*(step.batch for step in self._in_flight), *self._launching])

    @property
    def failed(self) -> bool:
        """Whether this rank failed outside the collectives, perhaps in the middle of its bookkeeping."""
        return self._failure is not None

    def fail(self, error: BaseException) -> None:
        """Vote unhealthy from now on, because of `error`; the first error is kept."""
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify()

    def activity(self) -> tuple[int, Literal["step", "vote", "capture", "sleep"]]:
        """Return the number of complete votes, and the present activity of the loop."""
        if self._vote_in_progress is not None:
            return self._step, "vote"
        if self._asleep:
            return self._step, "sleep"
        return self._step, "capture" if self.runner.capturing else "step"

    def run(self) -> None:
        """Step until the group stops. Raises LockstepError, or the error of a step of this rank."""
        repeater = start_thread(self._repeat_wakes, self.fail, "repeat-wakes")
        try:
            while not (plan := self.step()).stop:
                if plan.sleeps and not self._captures.turn(plan, self._step, self.runner.graphs):
                    self._sleep()
        finally:
            self._ended.set()
            repeater.join()
        if self._failure is not None:
            raise self._failure

    def step(self) -> StepPlan:
        """Run one lockstep step of this rank."""
        started, self._commit_s = time.perf_counter(), 0.0
        batch = self._prepare()
        scheduled = time.perf_counter()
        schedule_s = scheduled - started - self._commit_s
        plan = self._vote(batch)
        self.moves.act(plan)
        self.scheduler.follow(plan)
        voted = time.perf_counter()
        if plan.run:
            assert batch is not None, "a rank without a batch votes unhealthy"
            self.stats.before_step(batch, plan)
            enter_plan(self.scheduler.speculator, batch, plan)
            output = self._launch(batch, plan)
            times = HostTimes(schedule_s, voted - scheduled)
            self._in_flight.append(InFlightStep(batch, plan, output, times, self._next_cap))
            self._launching.clear()
        else:
            self.stats.work.pause()
        self._next_cap = plan.prefill_cap
        with self._carried():
            self._commit(self._max_in_flight if plan.run else 0)
            self._publish_and_record()
        return plan

    @contextmanager
    def _carried(self) -> Iterator[None]:
        """Carry an error to the next vote."""
        try:
            yield
        except AbortedError:
            raise
        except Exception as error:
            self.fail(error)

    def _launch(self, batch: ScheduledBatch, plan: StepPlan) -> Pending[StepOutput]:
        """Launch a step. Draws that need a token of the step before wait behind the forward, not before the vote."""
        if batch.draws_late:
            output = self.runner.launch(batch, plan, partial(self._commit_before_draws, batch))
        else:
            output = self.runner.launch(batch, plan)
            self.scheduler.launched(batch)
        if self.scheduler.speculator is not None:
            self.scheduler.drafted(batch, self.runner.coming_drafts)
        return output

    def _commit_before_draws(self, batch: ScheduledBatch) -> None:
        """Enter the launch of a forward, and commit the steps before it."""
        self._launching.append(batch)
        self.scheduler.launched(batch)
        with self._carried():
            self._commit(0)

    def _prepare(self) -> ScheduledBatch | None:
        """Drain the inbox and schedule; None after a failure, which is then voted."""
        if self._failure is not None:
            return None
        with self._carried():
            self._arrivals.take(self._inbox)
            batch = self._schedule()
            self._arrivals.begin(batch.admitted)
            return batch
        return None

    def _schedule(self) -> ScheduledBatch:
        """Return this step's batch.

        Steps in flight are committed first if the batch depends on their tokens or is empty without them. A rank
        without requests does not wait for its steps, because all ranks would wait for its vote.
        """
        if self._in_flight and self.scheduler.needs_tokens:
            self._commit(0)
        batch = self.scheduler.schedule(self._next_cap)
        if self._in_flight and not batch.seqs and self.scheduler.has_work:
            self._commit(0)
            batch = self.scheduler.schedule(self._next_cap)
        return batch

    def _vote(self, batch: ScheduledBatch | None) -> StepPlan:
        failure, num_tokens = self._failure, batch.num_tokens if batch else 0
        mode = batch.forward_mode if batch else ForwardMode.IDLE
        vote = Vote(
            epoch=self._epoch,
            step=self._step,
            num_tokens=num_tokens,
            **self._graph_sizes.vote(mode, num_tokens, prompts=batch is None or batch.has_prompts),
            wants_ubatch=self._overlap.wants(mode, num_tokens),
            prefill_tokens=batch.prefill_tokens if batch else 0,
            prefill_cap=self._cap_of(batch),
            **draft_vote(self.scheduler.speculator, batch, self._step),
            **self.moves.vote(),
            **self.scheduler.adapter_vote(batch),
            has_work=self.scheduler.has_work,
            has_requests=self.scheduler.has_requests,
            wants_stop=self._stopping,
            health=UNHEALTHY if failure else HEALTHY,
        )
        self._vote_in_progress = self._step
        rows = self._vote_transport.all_gather(vote.row())
        self._vote_in_progress = None
        self._step += 1
        try:
            return decide(rows, self._plan_config)
        except UnhealthyRankError as error:
            own = f"{type(failure).__name__}: {failure}" if failure else ""
            reasons = gather_reasons(self._vote_transport, own)
            raise LockstepError(f"rank {error.rank}: {reasons[error.rank]}") from failure

    def _cap_of(self, batch: ScheduledBatch | None) -> int:
        """Return this rank's `Vote.prefill_cap`."""
        if self._prefill_cap is None or batch is None or not batch.decodes_next:
            return 0
        return self._prefill_cap.tokens

    def _note_gap(self, step: InFlightStep) -> None:
        """Observe the time since the commit before, where it bounds prompts, drafts or images."""
        now, before = time.perf_counter(), self._committed_at
        self._committed_at = now
        if before:
            self.scheduler.observe(step.plan, now - before)
        if self._prefill_cap is not None and step.prefill_cap and before:
            self._prefill_cap.observe(now - before, step.plan.prefill_tokens, step.prefill_cap)

    def _commit(self, max_in_flight: int) -> None:
        """Read the outputs of all but the last `max_in_flight` steps and enter them in the scheduler."""
        started = time.perf_counter()
        while len(self._in_flight) > max_in_flight:
            launched = self._in_flight[0]
            output = launched.output.wait()
            if self._aborted:
                raise AbortedError
            self._in_flight.popleft()
            self._note_gap(launched)
            committed = self.scheduler.commit(launched.batch, output)
            if self._arrivals.fresh:
                self._arrivals.served(committed.served())
            self._committed.append((launched, committed))
        self._commit_s += time.perf_counter() - started

    def _publish_and_record(self) -> None:
        """Publish the outputs since the last call, and count the steps that were committed.

        A device may wait for the next launch, so what that does not need is done here.
        """
        started = time.perf_counter()
        if self.scheduler.speculator is not None:
            self.scheduler.speculator.settle()
        generated = [self._outbox.collect(it.outputs()) for _, it in self._committed]
        self._outbox.send(self._step)
        spent = time.perf_counter() - started
        for (launched, committed), num_tokens in zip(self._committed, generated, strict=True):
            of_step = launched.batch, launched.plan, launched.times, committed.step
            publish = spent / len(self._committed)
            self.stats.record_step(self.scheduler, *of_step, generated=num_tokens, publish=publish)
        self._committed.clear()

    def _enqueue(self, message: Message) -> None:
        with self._changed:
            self._inbox.append(message)
            self._changed.notify()

    def _sleep(self, most_s: float | None = None) -> None:
        """Wait for a reason to vote again, or `most_s`, then wake the peers unless a peer was the reason."""
        with self._carried():
            self.stats.record_idle(self.scheduler)
            self._outbox.send_load()
            self.scheduler.check_integrity()
        with self._changed:
            self._asleep, self._committed_at = True, 0.0
            limits = [it for it in (most_s, self._outbox.held_s) if it is not None]
            self._changed.wait_for(self._must_vote, min(limits, default=None))
            self._asleep = False
            woken_by_peer = self._woken_by_peer()
        if not woken_by_peer:
            with self._carried():
                self._wake_peers(self._step)

    def _woken_by_peer(self) -> bool:
        return self._awaited_step >= self._step

    def _must_vote(self) -> bool:
        """Whether a sleeping rank has a reason to vote, such as a sequence that has waited for KV."""
        with self._carried():
            transfers, begun = self.scheduler.cache.transfers, -1
            # Transfers that `settle` begins may end at once, which wakes nothing.
            while begun < (begun := 0 if transfers is None else transfers.num_begun):
                self.scheduler.settle(idle=True)
                self._outbox.send_held()
            if transfers is not None:
                self.stats.record_idle(self.scheduler)  # a save that ends gives its blocks back
        # A commit behind `take` may have ended what the next request waited for.
        told = self._stopping or self.failed or bool(self._inbox) or self._arrivals.may_accept
        return told or self.scheduler.has_work or self._woken_by_peer()

    def _repeat_wakes(self) -> None:
        """Wake the peers again while this rank waits in one vote, because a wake is lost with its connection."""
        seen = None
        while not self._ended.wait(REPEAT_WAKE_S):
            step = self._vote_in_progress
            if step is not None and step == seen:
                self._wake_peers(step)
            seen = step
