"""Ray handles without Ray: calls of a local object's async methods, and ranks and launchers behind them."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray.exceptions

from cluster.config.phalanx_config import PhalanxConfig, Role
from cluster.supervisor.group import Group
from cluster.supervisor.group_spec import GroupSpec
from cluster.supervisor.placement import PlacementError, RankLocation
from kernels.interface.config import KernelsConfig
from kernels.routing.expert_map import STANDBY
from workers.config import CacheConfig, ModelSection, RankConfig, SchedulerConfig
from workers.lora_config import LoadedAdapter
from workers.rank.rank_info import Membership, Pulse, RankInfo, Rendezvous
from workers.rank.token_streams import TokenStreams
from workers.wire.inbox import Inbox
from workers.wire.request import EngineRequest, RequestOutput
from workers.wire.secure_socket import StreamAddress


class FakeHandle:
    """`handle.method.remote(...)` runs the method of `target` as a task; a dead handle raises ActorDiedError."""

    def __init__(self, target: Any):
        self.target = target
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        return _FakeMethod(self, name)


class _FakeMethod:
    def __init__(self, handle: FakeHandle, name: str):
        self._handle, self._name = handle, name

    def remote(self, *args: Any) -> asyncio.Future:
        return asyncio.ensure_future(self._run(args))

    async def _run(self, args: tuple) -> Any:
        if self._handle.dead:
            raise ray.exceptions.ActorDiedError
        return await getattr(self._handle.target, self._name)(*args)


class FakeRank:
    """A rank's actor: records its calls, fails where `fail` says, ends by `end`.

    Each request gets the tokens 100, 101, ... from the first that was not emitted before; `emit` sends some.
    """

    def __init__(self, rank: int, address: str = "127.0.0.1"):
        self.rank, self.address, self.node_id = rank, address, "node"
        self.calls: dict[str, list[tuple]] = defaultdict(list)
        self.fail: dict[str, BaseException] = {}
        self.hang: set[str] = set()
        self.ended: asyncio.Future[None] | None = None
        self.loop: Pulse | None = Pulse(0, "sleep", 0.0)
        self.died = False
        self.requests: dict[str, EngineRequest] = {}  # the inbox's thread adds: copy it to iterate
        self.aborted: list[str] = []
        self.digest = "of adapters"
        self.versions = {"phalanx": "1.0", "torch": "2.0"}
        self.epoch, self.fence = -1, 0
        self.info: RankInfo | None = None
        self.inbox: Inbox | None = None
        self.streams: TokenStreams | None = None

    async def _note(self, name: str, *args: Any) -> None:
        self.calls[name].append(args)
        if name in self.fail:
            raise self.fail[name]
        if name in self.hang:
            await asyncio.Event().wait()

    async def describe(self) -> dict[str, Any]:
        await self._note("describe")
        at = {
            "node_id": self.node_id,
            "address": self.address,
            "pid": 1,
            "started": 0,
            "gpu_ids": [],
        }
        inbox = StreamAddress(f"inbox {self.rank}", b"")
        return {**at, "inbox": inbox, "versions": self.versions}

    async def membership(self) -> Membership:
        await self._note("membership")
        leases = self.streams.leases if self.streams is not None else ()
        return Membership(self.rank, self.epoch, self.fence, self.info, leases)

    async def fetch_checkpoint(self, token: str | None) -> None:
        await self._note("fetch_checkpoint", token)

    async def host_rendezvous(self) -> tuple[str, int]:
        await self._note("host_rendezvous")
        return self.address, 1234

    async def join_group(self, rendezvous: Rendezvous, *seat: Any) -> None:
        await self._note("join_group", rendezvous, *seat)

    async def prepare(self, gpus: tuple) -> None:
        await self._note("prepare", gpus)

    async def joined(self) -> None:
        await self._note("joined")
        while not self.calls["join_group"]:
            await asyncio.sleep(0.001)
            if self.died:
                raise ray.exceptions.ActorDiedError

    async def run_stage(self, name: str) -> None:
        await self._note("run_stage", name)

    async def progress(self) -> tuple[int, int]:
        await self._note("progress")
        return self.rank + 1, 4

    async def start(self, epoch: int, peers: list[StreamAddress]) -> RankInfo:
        await self._note("start", epoch, peers)
        self.ended = asyncio.get_running_loop().create_future()
        self.epoch = epoch
        self.info = RankInfo(self.rank, {}, num_blocks=8, block_size=16, max_model_len=64)
        return self.info

    async def done(self, epoch: int) -> None:
        await self._note("done", epoch)
        await asyncio.shield(self.ended)

    async def stop(self, epoch: int) -> None:
        await self._note("stop", epoch)

    async def stage_adapter(self, adapter: LoadedAdapter) -> str:
        await self._note("stage_adapter", adapter)
        return self.digest

    async def drop_adapter(self, adapter: int) -> None:
        await self._note("drop_adapter", adapter)

    async def leave_epoch(self, fence: int) -> None:
        await self._note("leave_epoch", fence)
        self.epoch, self.fence, self.info = -1, fence, None
        self.close()
        self.requests.clear()

    async def pulse(self) -> Pulse | None:
        await self._note("pulse")
        return self.loop

    async def stats(self) -> dict[str, Any]:
        await self._note("stats")
        return {"rank": self.rank}

    async def open_stream(
        self, epoch: int, lease_id: str, address: StreamAddress, stream: bytes
    ) -> Any:
        await self._note("open_stream", epoch, lease_id)
        if self.inbox is None:
            self.inbox = Inbox("127.0.0.1")
            self.inbox.deliver_to(self, epoch)
            self.streams = TokenStreams(self.inbox)
        self._abort_lease(lease_id)
        self.streams.open(lease_id, address, epoch, stream)
        return self.inbox.address

    async def close_stream(self, epoch: int, lease_id: str) -> None:
        await self._note("close_stream", epoch, lease_id)
        self._abort_lease(lease_id)

    def _abort_lease(self, lease_id: str) -> None:
        if self.streams is not None:
            self.streams.close(lease_id)
        for name in [n for n, r in self.requests.copy().items() if r.ingress_id == lease_id]:
            del self.requests[name]

    # What the inbox's thread calls.

    def submit(self, request: EngineRequest) -> None:
        self.requests[request.request_id] = request

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def wake(self, *_: Any) -> None:
        pass

    # What a test does.

    async def emit(self, request_id: str, first: int, count: int, finish: bool = False) -> None:
        """Send tokens number `first` to `first + count`; waits for the request first."""
        tokens = [100 + number for number in range(first, first + count)]
        await self.send(RequestOutput(request_id, tokens, "length" if finish else None))

    async def send(self, output: RequestOutput) -> None:
        """Send one output; waits for the request first."""
        await until(lambda: output.request_id in self.requests)
        self.send_now(self.requests[output.request_id].ingress_id, [output])

    def send_now(self, lease_id: str, outputs: list[RequestOutput]) -> None:
        """Send a message as a step loop does."""
        if self.streams is not None:
            self.streams.send(lease_id, self.rank, 0, outputs)

    def close(self) -> None:
        if self.inbox is not None:
            self.streams.close_all()
            self.inbox.close()
            self.inbox = self.streams = None


class FakeLauncher:
    """Hands out fake ranks."""

    def __init__(self, ranks: list[FakeRank]):
        self.all = [FakeHandle(rank) for rank in ranks]
        self.num_ranks = len(ranks)
        self.group: Group | None = None
        self.killed = 0
        self.replaced: list[int] = []
        self.standbys: list[FakeRank] = []
        self.num_ended = self.num_spares = 0
        self.ended_at: list[RankLocation | None] = []
        self.full = False
        self.lost: set[int] = set()
        self.cut: set[int] = set()
        self.drained: dict[int, float] = {}
        self.num_free_nodes = 0
        self._nodes: dict[int, str] = {}  # of bundles that have moved
        self._left: set[FakeHandle] = set()
        self.make: Callable[[FakeRank], None] = lambda rank: None  # changes each new process
        self.error: Exception | None = None

    async def launch(self, timeout_s: float) -> list[FakeHandle]:
        if self.error is not None:
            raise self.error
        return self.all[:]

    def find(self) -> list[FakeHandle]:
        return [handle for handle in self.all if not handle.dead]

    def bundle_of(self, handle: FakeHandle) -> int:
        return 0

    async def start(self, rank: int, config: RankConfig, bundle: int) -> FakeHandle:
        if self.full:
            raise PlacementError("no free CPU")
        process = FakeRank(rank)
        process.node_id = self._nodes.get(bundle, f"node {bundle}")
        self.make(process)
        handle = FakeHandle(process)
        self.all.append(handle)
        if rank == STANDBY:
            self.standbys.append(process)
        else:
            self.replaced.append(rank)
        return handle

    def end(self, handle: FakeHandle, location: RankLocation | None) -> None:
        if not handle.dead:
            self.num_ended += 1
            self.ended_at.append(location)
        handle.dead = handle.target.died = True
        handle.target.close()

    async def start_spares(self) -> None:
        self.num_spares += 1

    def has_capacity(self, bundle: int) -> bool:
        return bundle not in self.lost

    async def answers(self, bundle: int) -> bool:
        return bundle not in self.lost | self.cut

    async def draining(self) -> dict[int, float]:
        return self.drained.copy()

    async def move(self, bundle: int) -> bool:
        if not self.num_free_nodes:
            return False
        self.num_free_nodes -= 1
        del self.drained[bundle]
        before = self._nodes.get(bundle, f"node {bundle}")
        self._left |= {handle for handle in self.all if handle.target.node_id == before}
        self._nodes[bundle] = f"{before}, moved"
        return True

    def in_place(self, handle: FakeHandle) -> bool:
        return handle not in self._left

    @property
    def handles(self) -> list[FakeHandle]:
        """The present processes of the ranks."""
        assert self.group is not None
        return self.group.members.ranks or self.all[: self.num_ranks]

    @property
    def ranks(self) -> list[FakeRank]:
        """The ranks of the present processes."""
        return [handle.target for handle in self.handles]

    def kill(self) -> None:
        self.killed += 1
        for handle in self.all:
            handle.dead = handle.target.died = True
            ended = handle.target.ended
            if ended is not None and not ended.done():
                ended.set_exception(ray.exceptions.ActorDiedError())
                ended.exception()


def rank_config(num_ranks: int = 2, device: str = "cpu", num_nodes: int = 1) -> RankConfig:
    return RankConfig(
        model=ModelSection(path="nowhere"),
        scheduler=SchedulerConfig(),
        cache=CacheConfig(),
        kernels=KernelsConfig(),
        num_ranks=num_ranks,
        num_nodes=num_nodes,
        device=device,
        threads=1,
        vote_timeout_s=1.0,
    )


def phalanx_config(
    num_ranks: int = 2, lora: dict[str, Any] | None = None, **serve: Any
) -> PhalanxConfig:
    return PhalanxConfig(
        model=ModelSection(path=str(Path("nowhere"))),
        cluster={"ranks": num_ranks, "device": "cpu", "start_timeout_s": 5.0},
        serve={"model_name": "tiny", **serve},
        lora=lora or {},
    )


def group_spec(
    num_ranks: int = 2, name: str = "app", num_nodes: int = 1, role: Role = "generate"
) -> GroupSpec:
    ranks = rank_config(num_ranks, num_nodes=num_nodes)
    return GroupSpec(name, role, "tiny", phalanx_config(num_ranks), ranks)


def fake_group(
    num_ranks: int = 2,
    num_nodes: int = 1,
    *,
    name: str = "app",
    role: Role = "generate",
    **options: Any,
) -> tuple[Group, list[FakeRank], FakeLauncher]:
    """A group over fake ranks, the ranks, and the launcher; `options` go to the group."""
    ranks = [FakeRank(rank) for rank in range(num_ranks)]
    spec = group_spec(num_ranks, name, num_nodes, role)
    for rank in ranks:
        rank.node_id = f"node {spec.ranks.dims.node(rank.rank)}"
    launcher = FakeLauncher(ranks)
    group = Group(spec, launcher, **{"start_timeout_s": 5.0, **options})
    launcher.group = group
    return group, ranks, launcher


async def until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds. The limit is longer than a pause of a busy machine."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)
