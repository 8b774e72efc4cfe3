"""One epoch of a rank: its connections to its peers, and the engine. Built from a RankProcess, closed as a whole.

The stages are collective: every rank runs them in one order. Knows nothing of Ray.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch

from kernels.attention.dummy import DummyAttention
from kernels.backends.memory import backend_memory
from kernels.backends.select import Backends
from workers.engine.datagram_vote import DatagramVoteTransport
from workers.engine.engine import Engine
from workers.engine.outbox import Publish
from workers.engine.vote_transport import (
    AbortableVote,
    LocalVoteTransport,
    SharedMemoryVoteTransport,
)
from workers.models.decoder import DecoderLM
from workers.overlap.epoch_ubatches import EpochUbatches
from workers.rank import process_group
from workers.rank.device_memory import free_unused, memory_for
from workers.rank.epoch_runner import RunnerMaker
from workers.rank.expert_staging import begin_serving
from workers.rank.peers import Peers, meet
from workers.rank.process import RankProcess
from workers.rank.rank_info import (
    GRAPHS,
    KERNELS,
    KV_CACHE,
    WEIGHTS,
    Progress,
    RankInfo,
    Rendezvous,
)
from workers.rank.warm_up import few_first, warm_up_sizes
from workers.rank.warm_up_steps import bind_beside
from workers.runner.graph_sizes import NO_PROMPTS, GraphSizes, graphs_off
from workers.runner.model_runner import ModelRunner
from workers.scheduler.scheduler import Scheduler
from workers.speculation.speculator import make_speculator
from workers.step.step_sync import PlanConfig

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class _Parts:
    """The parts that hold memory of the device or of the group, in the order in which the stages make them.

    None: its stage has not run. A closed epoch has none of them.
    """

    backends: Backends | None = None
    ubatches: EpochUbatches | None = None
    make: RunnerMaker | None = None
    runner: ModelRunner | None = None
    scheduler: Scheduler | None = None
    vote: AbortableVote | None = None
    engine: Engine | None = None


def _made(part: T | None) -> T:
    assert part is not None, "the stage that makes this part has not run, or the epoch is closed"
    return part


class Epoch:
    """This rank's membership in one group. The constructor joins the peers. Collective.

    left        ends the constructor early when it is set
    seconds     time of each stage
    failed      an error ended the engine, or `abort` was called: peers may still wait for this rank
    """

    def __init__(
        self,
        process: RankProcess,
        rendezvous: Rendezvous,
        timeout_s: float,
        left: threading.Event | None = None,
    ):
        self.process, self.rendezvous = process, rendezvous
        self.seconds: dict[str, float] = {}
        self.closed = self.failed = False
        self.graph_sizes = GraphSizes()
        self._peers, self._parts = Peers(process.warm), _Parts()
        self._attention_compiled: Future[None] | None = None
        self._graph_bytes, self._closing = 0, ExitStack()
        process.enter(self)
        process.kv_places.connect(process.config, process.caches, rendezvous)
        try:
            with self._timed("process group"):
                self._peers = meet(
                    process, rendezvous, timeout_s, left or threading.Event(), self._closing
                )
            with self._timed("all-to-all"):
                self._build_backends()
        except BaseException:
            self.failed = True
            self.close()
            raise

    @property
    def backends(self) -> Backends:
        """The backends of whole steps."""
        return _made(self._parts.backends)

    @property
    def ubatches(self) -> EpochUbatches:
        """The backends of ubatches, and the policy."""
        return _made(self._parts.ubatches)

    @property
    def make(self) -> RunnerMaker:
        """Makes runners of this epoch, once WEIGHTS has run."""
        return _made(self._parts.make)

    @property
    def model(self) -> DecoderLM:
        """The weights of the process, run with `backends`, once WEIGHTS has run."""
        return self.make.model

    @property
    def runner(self) -> ModelRunner:
        """The runner over the KV memory of the process, once KV_CACHE has run."""
        return _made(self._parts.runner)

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler of `runner`."""
        return _made(self._parts.scheduler)

    @property
    def engine(self) -> Engine:
        """The step loop, once `start_engine` has run."""
        return _made(self._parts.engine)

    @property
    def started(self) -> bool:
        """Return whether the engine has been made."""
        return self._parts.engine is not None

    def _build_backends(self) -> None:
        process, config, peers = self.process, self.process.config, self._peers
        takes = backend_memory(
            process.selection, process.shape, num_ubatches=config.overlap.num_ubatches
        )
        context = process.backend_context(peers.shared_memory, peers.network, peers.gather)
        with memory_for("the all-to-all's buffers", takes.kept):
            self._parts.backends = process.build_backends(context)
            self._closing.callback(self.backends.all2all.close)
        with memory_for("ubatches", takes.ubatches):
            self._parts.ubatches = EpochUbatches(
                process.overlap,
                config,
                process.selection,
                context,
                self.backends,
                peers.gather,
                pooling=process.pooling,
            )
            self._closing.callback(self.ubatches.close)

    def run_stage(self, name: str, progress: Progress) -> None:
        """Run one of rank_info.start_stages, which all ranks run in their order.

        A stage does nothing if every process has kept its result from an earlier epoch.
        """
        stages = {
            WEIGHTS: self.load,
            KERNELS: self.compile_kernels,
            KV_CACHE: self.size_cache,
            GRAPHS: self.capture_graphs,
        }
        with self._timed(name):
            stages[name](progress)

    def load(self, progress: Progress | None = None) -> None:
        """Read the weights, in the first epoch; attention's kernels are compiled at this time."""
        process = self.process
        if process.device.type == "cuda" and not self._peers.warm:
            with memory_for("attention's workspace"):
                caches = process.caches.new_kv_caches(1)
                self._attention_compiled = bind_beside(self.backends.attention, caches)
        process.load(progress, self._peers.gather)
        assert process.model is not None
        model = process.model.with_backends(self.backends)
        draft = process.draft_of(self.backends)
        self._parts.make = RunnerMaker(process, model, self.backends, self.ubatches, draft)

    def compile_kernels(self, progress: Progress | None = None) -> None:
        """Run all kernels that compile at first use, at every step size with its own kernels. Collective.

        Attention's kernels take longest. They are compiled in the background while DummyAttention takes their place.
        Few layers run in place of all, because the host takes most of the time of an eager step.
        """
        if self._peers.warm:
            return
        self.make.run_largest_image()
        steps, dense = self.make.warm_up_steps(), self.backends.grouped_gemm.compiles_by_rows
        total = 2 + len(sizes := warm_up_sizes(steps.limits.max_num_batched_tokens, dense=dense))
        report_progress = progress or (lambda done, total: None)
        dummy = DummyAttention(self.backends.attention)
        self.ubatches.bind_states(self.process.state_pools())
        with memory_for("a step"):
            dummy.bind(self.process.caches.new_kv_caches(1))
            make = replace(self.make, model=self.model.with_few_layers())
            runner, scheduler = make(self.process.caches.new_manager(steps.num_blocks), dummy)
            for done, (size, products) in enumerate(few_first(sizes)):
                report_progress(done, total)
                self.model.compile_products(products)
                steps.prefill(runner, scheduler, size)
            report_progress(len(sizes), total)
            steps.sample(runner, scheduler)
        report_progress(total - 1, total)
        self._wait_for_attention()
        report_progress(total, total)
        self.ubatches.bind(())

    def size_cache(self, progress: Progress | None = None) -> None:
        """Size and allocate the KV cache, and run a step with it, in the first epoch; bind it. Collective."""
        self._wait_for_attention()
        process, caches, steps = self.process, self.process.caches, self.make.warm_up_steps()
        with memory_for("attention's workspace"):
            self.ubatches.bind(caches.kv_caches)
        self.ubatches.bind_states(process.state_pools())
        self.graph_sizes = self.make.graph_sizes()
        if not caches.num_blocks:
            caches.take_sizes(*self.make.cache_sizes(self.graph_sizes))
            self.ubatches.bind_states(())  # the new pools need the memory of the old ones
            self.ubatches.bind_states(process.state_pools())
        with memory_for("the KV cache", caches.num_blocks * caches.block_bytes):
            if not caches.kv_caches:
                caches.allocate()
                self.ubatches.bind(caches.kv_caches)
            self.make.bind_draft(caches.draft_caches)
            self._parts.runner, self._parts.scheduler = self.make(caches.manager)
            self._closing.callback(self.runner.close)
            if not self._peers.warm:
                num_tokens = min(64, process.config.scheduler.max_num_batched_tokens)
                process.pace.begin(num_tokens * process.dims.num_ranks)
                steps.prefill(self.runner, self.scheduler, num_tokens)
                process.pace.end()
                if process.device.type == "cuda":
                    steps.cut_prompt(self.runner, self.scheduler)
        if not self.graph_sizes:
            self._tune(None)

    def capture_graphs(self, progress: Progress | None = None) -> None:
        """Capture the forwards of steps, if the backends can and the configuration wants it. Collective.

        A rebuild captures the largest alone, because open requests wait for it.
        """
        process, sizes = self.process, self.graph_sizes
        if not sizes:
            if process.device.type == "cuda" and process.rank == 0:
                wanted = process.config.scheduler.cuda_graphs
                reason = graphs_off(wanted, process.selection, "cuda") or NO_PROMPTS
                logger.info("no CUDA graphs: %s", reason)
            return
        on_demand, gather = self.rendezvous.epoch > 0, self._peers.gather
        made = self.make.capture_graphs(self.runner, sizes, gather, progress, on_demand=on_demand)
        self._graph_bytes = made
        self._tune(progress)

    def _tune(self, progress: Progress | None) -> None:
        facts = self.process.max_model_len, self.process.settings()
        with memory_for("ubatches"):
            self.ubatches.tune(self.runner, self.scheduler, *facts, progress)

    def start_engine(self, publish: Publish, wake_peers: Callable[[int], None]) -> RankInfo:
        """Make the engine, after all stages; size the cache first if that stage was left out."""
        if self._parts.runner is None:
            self.run_stage(KV_CACHE, lambda done, total: None)
            self.run_stage(GRAPHS, lambda done, total: None)
        process, measured = self.process, self.process.step_seconds
        with self._timed("engine"):
            self._parts.vote = vote = self._make_vote_transport()
            self._closing.callback(vote.close)
            stats, moves = begin_serving(process, self._closing, self._peers.gather)
            if not process.selection.all2all_class.needs_process_group:
                # Only the rendezvous needed the sockets, and gloo's thread would poll them 100 times a second.
                process_group.leave()
            self.scheduler.speculator = make_speculator(process.config.speculation, measured)
            equal_tokens = self.backends.all2all.needs_equal_tokens
            drafts = self.graph_sizes.draft_budget(measured)
            self._parts.engine = Engine(
                self.scheduler,
                self.runner,
                vote,
                PlanConfig(equal_tokens, process.config.overlap.num_ubatches, drafts),
                epoch=self.rendezvous.epoch,
                publish=publish,
                wake_peers=wake_peers,
                stats=stats,
                moves=moves,
                grammars=process.grammars,
                asynchronous=process.asynchronous,
                graph_sizes=self.graph_sizes,
                overlap=self.ubatches.policy,
                prefill_cap=process.prefill_cap,
            )
            wake, rebuilt = partial(self.engine.wake, -1), self.rendezvous.epoch > 0
            process.kv_places.begin(process.config, process.caches, wake, wait=rebuilt)
        process.warm = True
        return process.info(self._graph_bytes + self.ubatches.graph_bytes, self.seconds)

    def _make_vote_transport(self) -> AbortableVote:
        """Return the transport of this group's votes. Collective.

        Measured for a vote of two ranks: shared memory 3 us; datagrams between two network namespaces 71 us, on two
        cores that were busy with other work.
        """
        dims, rank, peers = self.process.dims, self.process.rank, self._peers
        if dims.alone:
            return LocalVoteTransport()
        shared, epoch = peers.shared_memory, self.rendezvous.epoch
        if dims.on_one_host and shared is not None:
            return SharedMemoryVoteTransport(shared)
        assert peers.network is not None, "a group of several ranks has met"
        return DatagramVoteTransport(rank, dims, epoch, peers.network, shared, peers.gather)

    def run(self) -> None:
        """Run the engine's loop until the group stops. An error aborts this rank's epoch and is raised."""
        if self.process.device.type == "cuda":
            torch.cuda.set_device(self.process.device)  # CUDA keeps the current device by thread
        try:
            self.engine.run()
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """End all waits of this rank for its peers and of the peers for it, on host and GPU. From any thread.

        Results of steps in flight are then undefined. The engine raises LockstepError at its next vote.
        """
        self.failed, parts, shared = True, self._parts, self._peers.shared_memory
        if parts.engine is not None:
            parts.engine.discard_outputs()  # before the waits end
        if parts.vote is not None:
            parts.vote.abort()
        if shared is not None:
            shared.abort()
        if parts.ubatches is not None:
            parts.ubatches.abort()
        if parts.backends is not None:
            parts.backends.all2all.abort()
        process_group.abort(self.process.device)
        if parts.engine is not None:
            parts.engine.stop()  # an engine that sleeps goes to the vote

    def close(self) -> None:
        """Leave the group and free this epoch's memory; the engine must have ended. Safe to call twice."""
        if self.closed:
            return
        self.closed = True
        if self.failed:
            self.abort()
        self._keep_blocks()
        self._closing.close()
        self._parts = _Parts()
        self._peers.shared_memory = None
        free_unused(self.process.device)

    def _keep_blocks(self) -> None:
        """Leave the KV blocks with their contents to the next epoch, unless their bookkeeping may be wrong."""
        caches, engine, scheduler = self.process.caches, self._parts.engine, self._parts.scheduler
        if engine is not None:
            engine.close()
        elif scheduler is not None:
            scheduler.close()
        failed = engine is not None and engine.failed
        if caches.kv_caches and (failed or caches.manager.pool.usage):
            caches.forget_prefixes()

    def _wait_for_attention(self) -> None:
        if self._attention_compiled is not None:
            with memory_for("attention's workspace"):
                self._attention_compiled.result()
            self._attention_compiled = None

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started
