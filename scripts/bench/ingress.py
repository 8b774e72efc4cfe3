"""Measures the front end alone: HTTP, tokenising, routing, streaming, with ranks that answer at once.

Everything before the step loop is the real thing (Serve deployment, Ray calls, token stream); in place of each rank's
engine stands a thread that gives every open request a token at a fixed pace. Use through scripts/bench_ingress.
"""

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import ray
import typer
from ray import serve

from cluster.commands.start import RAY_ENVIRONMENT
from cluster.config.api_keys import KeyDigests
from cluster.config.load import load_config
from cluster.config.phalanx_config import PhalanxConfig
from cluster.config.resolve import resolve_rank_config
from cluster.ingress.ingress import Ingress
from cluster.supervisor import supervisor
from cluster.supervisor.actor import supervisor_name
from cluster.supervisor.group import Group
from cluster.supervisor.group_spec import GroupSpec
from cluster.supervisor.launcher import NAMESPACE, RankLauncher
from kernels.host.owned import OwnedTask
from scripts.bench import ROOT
from scripts.bench.results import origin, save
from scripts.bench.servers import free_port
from workers.engine.open_requests import OpenRequests
from workers.rank.actor import RankActor, node_address
from workers.rank.fence import Fence
from workers.rank.rank_info import RankInfo
from workers.rank.token_streams import TokenStreams
from workers.stats.stats import EngineStats
from workers.wire.inbox import Inbox
from workers.wire.request import EngineRequest, RequestOutput
from workers.wire.secure_socket import StreamAddress

RESULTS = ROOT / "docs" / "results" / "ingress"
CONNECTIONS = 32
STEPS_MS = (20.0, 4.0, 2.0, 1.0, 0.7)  # with 32 connections: 1,600 to 45,700 tok/s
ROUTES = ["chat", "completions", "responses", "messages"]
SECONDS = 3.0  # of one stream
TOKEN = 67  # "a" in the demo's vocabulary


class PacedEngine:
    """Gives each open request its first token at once and one more every step_s seconds."""

    def __init__(self, publish: Callable[[str, list[RequestOutput]], None], step_s: float):
        self.stats = EngineStats()
        self.open_requests = OpenRequests()
        self._publish, self.step_s = publish, step_s
        self._lock = threading.Lock()
        self._left: dict[str, tuple[str, int]] = {}  # request -> ingress, tokens to come
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, request: EngineRequest) -> None:
        """A new request."""
        with self._lock:
            self.open_requests.add(request)
            self._left[request.request_id] = (request.ingress_id, request.params.max_tokens)
            self._emit([request.request_id])

    def abort(self, request_id: str) -> None:
        """A client left."""
        with self._lock:
            if self._left.pop(request_id, None) is not None:
                self.open_requests.remove(request_id)

    def abort_ingress(self, ingress_id: str) -> None:
        """Nothing to do: the measurement is over."""

    def fail(self, error: BaseException) -> None:
        """End this rank, because the measurement is worthless."""
        os._exit(1)

    def _run(self) -> None:
        due = time.perf_counter()
        while True:
            due = max(due + self.step_s, time.perf_counter())
            time.sleep(max(0.0, due - time.perf_counter()))
            with self._lock:
                self._emit(list(self._left))

    def _emit(self, request_ids: list[str]) -> None:
        outputs: dict[str, list[RequestOutput]] = {}
        for request_id in request_ids:
            ingress_id, left = self._left[request_id]
            reason = "length" if left == 1 else None
            outputs.setdefault(ingress_id, []).append(RequestOutput(request_id, [TOKEN], reason))
            if left == 1:
                del self._left[request_id]
                self.open_requests.remove(request_id)
            else:
                self._left[request_id] = (ingress_id, left - 1)
        for ingress_id, messages in outputs.items():
            self._publish(ingress_id, messages)


class PacedRankActor(RankActor):
    """A rank's actor shell around a PacedEngine."""

    def __init__(self, rank: int, step_s: float):
        self._index, self._fence, self._step_loop = rank, Fence(rank, epoch=0), None
        self._info: dict[str, Any] = {}
        engine = PacedEngine(self._publish, step_s)
        self._current = SimpleNamespace(engine=engine, started=True)
        self._inbox = Inbox(node_address())
        self._streams = TokenStreams(self._inbox)
        self._inbox.deliver_to(engine, 0)
        self._beats: OwnedTask | None = None

    async def open_stream(self, *args: Any) -> StreamAddress:
        """Open a stream of an ingress, with beats as those of a rank that serves."""
        if self._beats is None:
            self._beats = OwnedTask(self._streams.beat(self._index), self._fail_epoch, "beat")
        return await super().open_stream(*args)

    async def set_step(self, step_s: float) -> None:
        """From now on a token each `step_s` seconds."""
        self._current.engine.step_s = step_s

    async def done(self, epoch: int) -> None:
        """Wait: a paced rank does not end."""
        await asyncio.Event().wait()


class PacedGroup(Group):
    """Starts paced ranks in place of real ranks."""

    def __init__(self, config: PhalanxConfig, step_s: float):
        cluster = config.cluster
        rank_config = resolve_rank_config(config, num_gpus=0)
        launcher = RankLauncher(rank_config, name="paced", joined=False)
        spec = GroupSpec("paced", "generate", config.serve.model_name or "", config, rank_config)
        super().__init__(spec, launcher, start_timeout_s=cluster.start_timeout_s)
        self._step_s = step_s

    async def start(self) -> None:
        """Serve at once."""
        actor = ray.remote(PacedRankActor).options(num_cpus=0)
        dims = self._roster.config.dims
        self._roster.adopt([actor.remote(i, self._step_s) for i in dims.ranks()])
        self.status.infos = [RANK_INFO]
        self._set_state("serving")


class PacedSupervisor(supervisor.Supervisor):
    """Owns a PacedGroup."""

    def __init__(self, config: PhalanxConfig, step_s: float):
        self._step_s = step_s
        super().__init__(config)

    def _create_groups(self, config: PhalanxConfig) -> list[Group]:
        return [PacedGroup(config, self._step_s)]


RANK_INFO = RankInfo(
    rank=0, num_blocks=2**20, block_size=16, max_model_len=2**16, backends={}, memory_bytes={}
)


def start(config: PhalanxConfig, step_s: float) -> None:
    """Ray, paced ranks, and the real ingress in front of them."""
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    ray.init("local", namespace="phalanx", num_cpus=8, include_dashboard=False, logging_level=40)
    ray.remote(PacedSupervisor).options(
        name=supervisor_name(config),
        namespace=NAMESPACE,
        lifetime="detached",
        num_cpus=0,
        max_concurrency=1000,
    ).remote(config, step_s)
    serve.start(proxy_location="Disabled")
    app = Ingress.options(num_replicas=1).bind(
        config, listen=True, keys=KeyDigests(), environment={}
    )
    serve.run(app, name=config.serve.app_name, route_prefix="/")


def load(url: str, route: str, output_tokens: int, rounds: int, *how: str) -> dict[str, Any]:
    """The median figures of `phalanx bench` against the route; `how` says how many requests, and when."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [sys.executable, "-m", "cluster.cli", "bench", "--url", url, "--endpoint", route]
        command += ["--input-len", "64", "--output-len", str(output_tokens), *how]
        command += ["--repeats", str(rounds), "--output", str(output)]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE)
        figures = json.loads(output.read_text())["servers"][0]["median"]
    assert not figures["errors"], figures["errors"]
    return figures


def measure_rate(url: str, route: str, step_s: float, rounds: int) -> dict[str, Any]:
    """Streams over all connections at one pace of the ranks."""
    step_ms = round(step_s * 1e3, 3)
    output_tokens = min(2000, int(SECONDS / step_s))
    count = ["--requests", str(2 * CONNECTIONS), "--concurrency", str(CONNECTIONS)]
    figures = load(url, route, output_tokens, rounds, *count)
    return {
        "step_ms": step_ms,
        "offered_tokens_per_s": round(CONNECTIONS / step_s),
        "output_tokens_per_s": figures["output_tokens_per_s"],
        "tokens_per_chunk": round(figures["output_tokens"] / figures["chunks"], 2),
        "client_us_per_chunk": figures["client_us_per_chunk"],
    }


def measure_first_token(url: str, route: str, step_s: float, rounds: int) -> dict[str, Any]:
    """Time to the first token, which the ranks give at once, of requests that come one by one among 32 streams."""
    output_tokens = int(SECONDS / step_s)
    rate = CONNECTIONS / (output_tokens * step_s)
    times = ["--requests", "128", "--request-rate", f"{rate:.3f}"]
    figures = load(url, route, output_tokens, rounds, *times)
    return {
        "step_ms": step_s * 1e3,
        "requests_per_s": round(rate, 2),
        "most_in_flight": figures["max_in_flight"],
        "first_token_ms": figures["ttft_ms"],
    }


def main(
    out: Annotated[Path, typer.Option(help="Path of the results, less suffix.")] = RESULTS,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds at each pace.")] = 3,
    ranks: Annotated[int, typer.Option(min=1, help="Paced ranks.")] = 1,
    route: Annotated[list[str], typer.Option(help="Endpoints of `phalanx bench`.")] = ROUTES,
) -> None:
    """Stream 32 answers at once through one ingress replica, on several routes, at several paces of the ranks."""
    port = free_port()
    sets = [f"cluster.ranks={ranks}", f"serve.port={port}", "cluster.device=cpu"]
    config = load_config(ROOT / "configs" / "local.yaml", sets)
    start(config, STEPS_MS[0] / 1e3)
    owner = ray.get_actor(supervisor_name(config), namespace=NAMESPACE)
    actors = ray.get(owner.register.remote("bench", 0)).members.ranks
    url = f"http://127.0.0.1:{port}"
    routes: dict[str, Any] = {}
    for name in route:
        found = measure_first_token(url, name, STEPS_MS[0] / 1e3, rounds)
        routes[name] = {"first_token": found, "paces": []}
        first, most = found["first_token_ms"], found["most_in_flight"]
        print(f"{name}: first token after {first} ms, {most} in flight")
    for step_ms in STEPS_MS:
        ray.get([rank.set_step.remote(step_ms / 1e3) for rank in actors])
        for name in route:
            pace = measure_rate(url, name, step_ms / 1e3, rounds)
            routes[name]["paces"].append(pace)
            print(
                f"{name}: a token each {step_ms:g} ms, {pace['offered_tokens_per_s']:,} tok/s offered: "
                f"{pace['output_tokens_per_s']:,.0f} tok/s, {pace['tokens_per_chunk']} tokens a chunk"
            )
    report = {
        **origin(0, None, served=True),
        "connections": CONNECTIONS,
        "ranks": ranks,
        "routes": routes,
    }
    save(out, report)
    print(f"wrote {out.with_suffix('.json')}")
    ray.shutdown()


if __name__ == "__main__":
    typer.run(main)
