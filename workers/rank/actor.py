"""The Ray actor shell of a rank: inbox, senders, life cycle. The rest is in its RankProcess and the open Epoch.

The event loop answers calls; the stages of start-up and the step loop run on threads of their own. Only the actor
imports torch, so that a supervisor can create it quickly.
"""

import asyncio
import gc
import logging
import os
import threading
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import ActorDiedError, RayError

from kernels.host.cuda_environment import check_multicast_off, share_compiled_kernels
from kernels.host.owned import OwnedTask
from kernels.host.processes import start_ticks
from kernels.routing.expert_map import STANDBY
from workers.config import RankConfig
from workers.log import set_up_logging
from workers.lora_config import LoadedAdapter
from workers.rank.checkpoint_holder import CheckpointHolder
from workers.rank.fence import Fence
from workers.rank.in_thread import in_thread
from workers.rank.network import address_on, bind_to_address
from workers.rank.rank_info import Membership, Pulse, RankInfo, RankTrace, Rendezvous
from workers.rank.step_loop import RankFailedError, StepLoop
from workers.rank.token_streams import TokenStreams
from workers.specs.expert_layout import ExpertMove, ExpertReport
from workers.stats.stats_line import log_stats
from workers.stats.versions import rank_versions
from workers.weights.checkpoint_copy import CopyAddress
from workers.weights.checkpoint_files import CheckpointFiles, FileFacts
from workers.wire.inbox import Inbox, InboxSender
from workers.wire.request import RequestOutput
from workers.wire.secure_socket import StreamAddress

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # exported, but not in __all__

    from workers.engine.engine import Engine
    from workers.rank.epoch import Epoch
    from workers.rank.process import RankProcess

logger = logging.getLogger(__name__)

FOLLOW_S = 10.0  # interval at which a rank checks that its supervisor lives
LOST_CHECKS = 6  # failed checks in a row after which the supervisor, or its node, has ended


class RankActor:
    """One rank. The group calls join_group, each stage and start, one call on all ranks before the next call.

    Calls that belong to an epoch carry its number; another number than that of join_group raises StaleEpochError.
    `leave_epoch` fences the rank: it refuses to join an earlier epoch afterwards. A process may have another rank, in a
    group of another number of ranks, in each epoch. One that was created as STANDBY gets `prepare` before its first
    epoch, so that it has only its experts to load then.
    """

    def __init__(self, rank: int, config: RankConfig):
        if config.device == "cuda":
            check_multicast_off(os.environ)
            share_compiled_kernels(os.environ, config.kernels.cache)
        self._index, self._config = rank, config
        self._set_up_logging()
        self._fence = Fence(rank)
        self._joining = asyncio.Lock()  # held by the thread that joins, leaves or runs a stage
        self._called = asyncio.Event()  # by join_group
        self._left = threading.Event()  # set when the epoch that the thread is in is over
        self._process: RankProcess | None = None
        self._current: Epoch | None = None  # the open one
        self._step_loop: StepLoop | None = None
        self._store: TCPStore | None = None
        self._progress = (0, 0)
        self._address = address_on(config.network) if config.network else node_address()
        bind_to_address(os.environ, self._address)
        self._holder = CheckpointHolder(config.model, self._address)
        self._inbox = Inbox(self._address)
        self._peers: list[InboxSender] = []
        self._streams = TokenStreams(self._inbox)
        self._info: dict[str, Any] = {}
        self._rank_info: RankInfo | None = None  # while the step loop runs
        self._tasks: tuple[OwnedTask, ...] = ()  # while the step loop runs

    def _set_up_logging(self) -> None:
        rank = None if self._index == STANDBY else self._index
        name = "standby rank" if rank is None else f"rank {rank}"
        set_up_logging(name, self._config.log_level, self._config.log_format, rank=rank)

    async def describe(self) -> dict[str, Any]:
        """Return this rank's node id, node address, process, GPUs, inbox, and versions of its software."""
        return {
            "node_id": ray.get_runtime_context().get_node_id(),
            "address": self._address,
            "pid": os.getpid(),
            "started": start_ticks(os.getpid()),
            "gpu_ids": ray.get_gpu_ids(),
            "inbox": self._inbox.address,
            "versions": await asyncio.to_thread(rank_versions),
        }

    async def follow(self, supervisor: Any) -> None:
        """End this rank and its placement group when the actor `supervisor` has ended, or cannot be followed."""
        try:
            await _end_of(supervisor)
            logger.error("the supervisor has ended; this rank ends too")
            if (place := ray.util.get_current_placement_group()) is not None:
                async with asyncio.timeout(FOLLOW_S):
                    await asyncio.to_thread(ray.util.remove_placement_group, place)
        except Exception:
            logger.exception("this rank cannot follow its supervisor, and ends")
        os._exit(1)

    async def membership(self) -> Membership:
        """Return the epoch and the streams, for a supervisor that was restarted."""
        loop, fence, leases = self._step_loop, self._fence, self._streams.leases
        info = self._rank_info if loop is not None and loop.running else None
        return Membership(self._index, fence.epoch, fence.first, info, leases, self._config)

    async def fetch_checkpoint(self, token: str | None) -> None:
        """Fetch the model of the Hub to this node, see CheckpointHolder."""
        await asyncio.to_thread(self._holder.fetch, token, self._set_progress)

    async def checkpoint_files(self) -> CheckpointFiles | None:
        """Return the checkpoint's files on this node; None if this process has read its weights already."""
        if self._process is not None and self._process.model is not None:
            return None
        return await asyncio.to_thread(self._holder.files)

    async def share_checkpoint(self) -> CopyAddress:
        """Send the checkpoint's files to other nodes from now on, until `end_sharing`."""
        return await asyncio.to_thread(self._holder.share)

    async def end_sharing(self) -> None:
        """Send no more files."""
        await asyncio.to_thread(self._holder.close)

    async def copy_checkpoint(self, address: CopyAddress, files: dict[str, FileFacts]) -> None:
        """Copy the files that this node lacks from the node that shares them."""
        await asyncio.to_thread(self._holder.copy, address, files, self._set_progress)

    async def host_rendezvous(self) -> tuple[str, int]:
        """Open the group's rendezvous store, and return its host and port. Called on rank 0 only."""
        from workers.rank import process_group

        self._store = store = process_group.host_store(self._address)
        return store.host, store.port

    async def prepare(self, gpus: Sequence[int | str]) -> None:
        """Load everything that depends on no rank and no peer: modules and the weights of no expert.

        gpus    as in `join_group`
        """
        async with self._joining:
            await in_thread(lambda: self._rank_process(gpus).load(self._set_progress))

    async def joined(self) -> None:
        """Return when this process has been called to join a group; a standby's end ends the call."""
        await self._called.wait()

    async def join_group(
        self,
        rendezvous: Rendezvous,
        timeout_s: float,
        gpus: Sequence[int | str],
        rank: int,
        config: RankConfig,
    ) -> None:
        """Join the peers as `rank`, compare settings, build the backends. Collective. Enters the rendezvous's epoch.

        It may be called again after `leave_epoch`: the process keeps its weights, compiled kernels and KV memory.

        gpus    Ray's ids of the GPUs visible to this process, its own first, as device 0; the first call decides
        """
        self._fence.join(rendezvous.epoch)
        self._left = threading.Event()
        self._called.set()
        if (rank, config) != (self._index, self._config):
            self._index, self._config = rank, config
            self._fence.rank = rank
            self._set_up_logging()
        async with self._joining:
            await in_thread(self._join_group, rendezvous, timeout_s, gpus)

    def _join_group(
        self, rendezvous: Rendezvous, timeout_s: float, gpus: Sequence[int | str]
    ) -> None:
        process = self._rank_process(gpus)
        from workers.rank.epoch import Epoch

        process.become(self._index, self._config, rendezvous.layout)
        self._current = Epoch(process, rendezvous, timeout_s, self._left)

    def _rank_process(self, gpus: Sequence[int | str]) -> "RankProcess":
        """Return the RankProcess, made by the first call."""
        if self._process is None:
            if gpus:
                os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
            # These modules start CUDA, which reads the variable once.
            from workers.rank.process import RankProcess

            import_module("workers.rank.epoch")

            gc.freeze()  # modules live as long as the process, so `Epoch.close` need not search them
            self._process = RankProcess(self._index, self._config)
        return self._process

    async def leave_epoch(self, fence: int) -> None:
        """Leave the open epoch, and refuse all epochs before `fence` from now on.

        The step loop, a join or a stage ends, if it still runs. Peers that wait for this rank fail at once.
        """
        self._fence.leave(fence)
        self._rank_info = None
        for task in self._tasks:
            task.cancel()
        if self._joining.locked():
            await asyncio.to_thread(self._end_waits)
        async with self._joining:
            await asyncio.to_thread(self._close_epoch)
        while self._peers:
            self._peers.pop().close()
        self._streams.close_all()

    def _end_waits(self) -> None:
        """End the waits for peers of the thread that joins or runs a stage. Peers fail as rank 0 closes its store."""
        self._left.set()
        self._store = None
        if (current := self._current) is not None:
            current.abort()

    def _close_epoch(self) -> None:
        current, self._current = self._current, None
        self._inbox.release()
        if current is None:
            return
        if self._step_loop is not None:
            self._step_loop.end(current)
            self._step_loop = None
        current.close()
        self._store = None

    async def run_stage(self, name: str) -> None:
        """Run one of start_stages. Collective."""
        self._progress = (0, 0)
        async with self._joining:
            await in_thread(self._epoch.run_stage, name, self._set_progress)

    async def progress(self) -> tuple[int, int]:
        """Return done and total of the stage, in bytes of weights or pieces of work; (0, 0) if unknown."""
        return self._progress

    async def trace(self, phase: str, num_tokens: int) -> RankTrace:
        """Run a step of `num_tokens` tokens, whole and in ubatches, in place of `start`. Collective."""
        from workers.rank.trace_step import trace_step

        return await in_thread(trace_step, self._epoch, phase, num_tokens)

    async def start(self, epoch: int, peers: list[StreamAddress]) -> RankInfo:
        """Start the step loop. Collective. `peers` are the inboxes of the other ranks."""
        self._fence.check(epoch)
        self._peers = [InboxSender(address, epoch) for address in peers]
        async with self._joining:
            info = await in_thread(self._epoch.start_engine, self._publish, self._wake_peers)
        self._fence.check(epoch)  # leave_epoch, called meanwhile, ends no task that begins now
        sizes = ("block_size", "num_blocks", "max_model_len")
        self._info = {**{size: getattr(info, size) for size in sizes}, **info.backends}
        self._inbox.deliver_to(self._engine, epoch)
        self._tasks = (
            OwnedTask(log_stats(self._snapshot), self._fail_epoch, "log-stats", may_end=True),
            OwnedTask(self._streams.beat(self._index), self._fail_epoch, "beat"),
        )
        self._step_loop = StepLoop(self._epoch)
        self._rank_info = info
        return info

    async def done(self, epoch: int) -> None:
        """Return when the group has stopped. Raises RankFailedError when this rank's loop failed."""
        self._fence.check(epoch)
        assert self._step_loop is not None, "start() comes first"
        await self._step_loop.done()

    async def open_stream(
        self, epoch: int, lease_id: str, address: StreamAddress, stream: bytes
    ) -> StreamAddress:
        """Send the outputs of requests of a lease to `address`, one message a step. Returns this rank's inbox.

        It may be called again when a message was lost: the requests of the stream before are aborted.

        stream   of the messages in both directions
        """
        self._fence.check(epoch)
        if lease_id in self._streams:
            await self.close_stream(epoch, lease_id)
        self._streams.open(lease_id, address, epoch, stream)
        return self._inbox.address

    async def close_stream(self, epoch: int, lease_id: str) -> None:
        """Close the stream of a lease and abort its requests."""
        self._fence.check(epoch)
        self._streams.close(lease_id)  # first, so that no request comes after the abort
        self._engine.abort_ingress(lease_id)

    async def stats(self) -> dict[str, Any]:
        """Return counters and gauges, see workers.stats.stats; `info` holds constants."""
        own = {"rank": self._index, "epoch": self._fence.epoch, "info": self._info}
        return own | {"stale_messages": self._inbox.num_stale} | self._engine.stats.snapshot()

    async def pulse(self) -> Pulse | None:
        """Return the present state of the step loop; None without one. This call is answered in any epoch."""
        current, loop = self._current, self._step_loop
        cpu_s = None if loop is None else loop.cpu_s()
        if current is None or not current.started or cpu_s is None:
            return None
        activity, stats = current.engine.activity(), current.engine.stats
        return Pulse(*activity, cpu_s, stats.pace.overdue(), stats.work.total)

    async def expert_report(self, epoch: int) -> ExpertReport:
        """Return where the experts are, and their recent load on this rank."""
        self._fence.check(epoch)
        report = import_module("workers.rank.expert_staging").report
        return report(self._process, self._engine.moves, self._engine.stats)  # type: ignore[no-any-return]

    async def move_experts(self, epoch: int, move: ExpertMove) -> None:
        """Begin a move, which all ranks commit together, layer by layer. Raises ValueError while another one runs."""
        self._fence.check(epoch)
        self._engine.moves.begin(move)

    async def stage_adapter(self, adapter: LoadedAdapter) -> str:
        """Read a LoRA adapter into host memory, beside the steps; return the digest of its files."""
        assert self._process is not None and self._process.adapters is not None, "no rank serves"
        return await in_thread(self._process.adapters.begin(adapter))

    async def drop_adapter(self, adapter: int) -> None:
        """Free the host memory of an adapter that no request has any more."""
        if self._process is not None and self._process.adapters is not None:
            self._process.adapters.drop(adapter)

    async def stop(self, epoch: int) -> None:
        """Vote to stop the loops of the whole group; `done` returns when this rank's loop has ended."""
        self._fence.check(epoch)
        self._engine.stop()

    @property
    def _epoch(self) -> "Epoch":
        if self._current is None:
            raise RankFailedError("it is in no epoch")
        return self._current

    @property
    def _engine(self) -> "Engine":
        if self._current is None or not self._current.started:
            raise RankFailedError("it is not started")
        return self._current.engine

    def _snapshot(self) -> dict[str, Any] | None:
        """Return the counters of the engine; None once the epoch is closed."""
        current = self._current
        return current.engine.stats.snapshot() if current is not None and current.started else None

    def _fail_epoch(self, error: BaseException) -> None:
        """Let the engine vote that this rank has failed."""
        if self._current is not None and self._current.started:
            self._current.engine.fail(error)

    def _set_progress(self, done: int, total: int) -> None:
        self._progress = (done, total)

    def _wake_peers(self, step: int) -> None:
        for peer in self._peers:
            peer.wake(step)

    def _publish(self, lease_id: str, outputs: list[RequestOutput]) -> None:
        """Send outputs from the step loop; a lease without a stream, or of an epoch that is left, gets nothing."""
        if lease_id in self._streams and (current := self._current) is not None:
            others = current.engine.open_requests.report_load(lease_id)
            self._streams.send(lease_id, self._index, others, outputs)


async def _end_of(supervisor: Any) -> None:
    """Return when the actor `supervisor` has ended for good."""
    failures = 0
    while failures < LOST_CHECKS:
        try:
            await supervisor.ping.remote()
            failures = 0
        except ActorDiedError:
            return
        except RayError:
            failures += 1
        await asyncio.sleep(FOLLOW_S)


def node_address() -> str:
    """Return the IPv4 or IPv6 address of this process's node in the Ray cluster."""
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
