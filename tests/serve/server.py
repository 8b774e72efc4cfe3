"""A real server in a process of its own, as a person starts it."""

import math
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 150
# Which `ray.init` chooses by itself only where it starts a Ray.
JOINING = {"RAY_AUTH_MODE": "token"}
OPERATOR_KEY = "operator-of-the-tests"
SECRETS = {
    "HF_TOKEN": "hf_secret-of-the-tests",
    "PHALANX_OPERATOR_KEY": OPERATOR_KEY,
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=secret-of-the-tests",
}
ACTORS = ("RankActor", "ServeReplica", "SupervisorActor")
GCS_ADDRESS = re.compile(r"raylet .*--gcs-address=(\S+)")
SESSION_FOLDER = re.compile(r"raylet .*--raylet_socket_name=(\S+)/sockets/raylet")
AGAIN = "found 2 ranks again"
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
# httpx gives up after 5 s, for which a busy machine may stop a process. With `verify` it reads the certificates of all
# authorities for each request, which takes 16 ms, also of a server without TLS.
ANSWER_S = 60.0
FREE_STEPS = 1000  # a request of a client that has left would run for 1,200 or more


class Server:
    """A running `phalanx serve`, with a Ray of its own or in the Ray of the server `joins`."""

    def __init__(self, config: Path, port: int, log: Path, joins: "Server | None" = None):
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._joins = joins
        self._again = 0  # times that the output has told that a supervisor has found the ranks
        self._others = joins.actors() if joins else []
        command = [sys.executable, "-m", "cluster.cli", "serve", str(config)]
        environment = os.environ | SECRETS | (JOINING if joins else {})
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment
            )

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until it prints its URL; fails with its output when it ends or takes too long."""
        deadline = time.monotonic() + timeout_s
        while not re.search(r"^ready in .*http", self.log.read_text(), re.M):
            assert self.process.poll() is None, f"the server ended:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"not ready in time:\n{self.log.read_text()}"
            time.sleep(0.2)

    def wait_line(self, text: str, seconds: float = 60.0) -> None:
        """Until its output has `text`."""
        deadline = time.monotonic() + seconds
        while text not in (printed := self.log.read_text()):
            assert self.process.poll() is None and time.monotonic() < deadline, printed
            time.sleep(0.05)

    def descendants(self) -> list[psutil.Process]:
        """Every process that the server started, at any depth; its actors in a Ray that it has joined."""
        own = psutil.Process(self.process.pid).children(recursive=True)
        joined = self._joins.actors() if self._joins else []
        return own + [actor for actor in joined if actor not in self._others]

    def actors(self, *kinds: str) -> list[psutil.Process]:
        """The processes of its actors, or of these kinds of them.

        Until the constructor of an actor with a name has ended, Ray's title of its process has this name first.
        """
        titles = re.compile(rf"ray::(\S+:)?({'|'.join(kinds or ACTORS)})")
        return [p for p in self.descendants() if titles.match(title(p))]

    def ranks(self) -> list[psutil.Process]:
        """The processes of the rank actors."""
        return self.actors("RankActor")

    def supervisor(self) -> psutil.Process:
        """The process of the supervisor."""
        (found,) = self.actors("SupervisorActor")
        return found

    def kill_supervisor(self) -> psutil.Process:
        """End the process of the supervisor and return it; `wait_successor` follows."""
        self._again = self.log.read_text().count(AGAIN)
        supervisor = self.supervisor()
        supervisor.kill()
        return supervisor

    def wait_successor(self, supervisor: psutil.Process) -> None:
        """Until another supervisor has found the ranks.

        Ray may print such a line of another server in the same Ray here too.
        """
        deadline = time.monotonic() + 60
        while True:
            printed = self.log.read_text()
            others = [it for it in self.actors("SupervisorActor") if it != supervisor]
            if others and printed.count(AGAIN) > self._again:
                return
            assert self.process.poll() is None and time.monotonic() < deadline, printed
            time.sleep(0.05)

    def spares(self) -> list[psutil.Process]:
        """The processes that Ray has started for a later rank: they have imported torch and have no actor."""
        return [p for p in self.actors("IDLE") if _has_torch(p)]

    def ray_address(self) -> str:
        """The address by which other processes join the server's Ray."""
        return self._of_raylet(GCS_ADDRESS)

    def session_folder(self) -> Path:
        """The folder of the server's Ray, with logs that all users of the machine can read."""
        return Path(self._of_raylet(SESSION_FOLDER))

    def _of_raylet(self, pattern: re.Pattern[str]) -> str:
        titles = (title(process) for process in self.descendants())
        return next(found[1] for text in titles if (found := pattern.search(text)))

    def get(self, path: str) -> httpx.Response:
        """The answer to a GET."""
        return httpx.get(f"{self.url}{path}", timeout=ANSWER_S, verify=False)

    def post(self, path: str, **fields: Any) -> httpx.Response:
        """The answer to a POST; the fields are those of httpx."""
        return httpx.post(f"{self.url}{path}", timeout=ANSWER_S, verify=False, **fields)

    def figures(self, name: str) -> list[float]:
        """The samples of a metric, one for each rank."""
        lines = self.get("/metrics").text.splitlines()
        return [float(line.split()[-1]) for line in lines if line.startswith(f"phalanx:{name}{{")]

    def wait_free(self, seconds: float | None = None) -> None:
        """Nothing runs, nothing waits, no block is held, no request is open.

        By default within `FREE_STEPS`: how long a step takes depends on what else the machine computes.
        """
        deadline = time.monotonic() + (seconds or ANSWER_S)
        last_step = self._step() + FREE_STEPS if seconds is None else math.inf
        while any(now := [sum(self.figures(name)) for name in GAUGES] + self._open_requests()):
            assert time.monotonic() < deadline, now
            assert self._step() <= last_step, now
            time.sleep(0.05)

    def _step(self) -> float:
        return max(self.figures("steps_total"), default=0.0)

    def _open_requests(self) -> list[float]:
        """Those whose clients an ingress has not left yet, of which a rank may know nothing."""
        return [self.get("/load").json()["server_load"]]

    def stop(
        self, number: int = signal.SIGINT, family: list[psutil.Process] | None = None
    ) -> tuple[float, list[psutil.Process]]:
        """Seconds until it ended, and what it left running.

        family: its descendants, where the time to find them matters
        """
        if family is None:
            family = self.descendants() if self.process.poll() is None else []
        started = time.monotonic()
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait(60)
        seconds = time.monotonic() - started
        alive = left_running(family, 30)
        for process in alive:
            process.kill()
        return seconds, alive


def left_running(family: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """The processes that still run after at most `seconds`.

    A zombie has ended: an orphan stays one where the first process of a container reaps late or never.
    """
    deadline = time.monotonic() + seconds
    while (
        left := [process for process in family if _runs(process)]
    ) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def title(process: psutil.Process) -> str:
    """The command line, which Ray's actors replace; nothing of a process that has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def variables(process: psutil.Process) -> str:
    """The environment variables; nothing of a process that has ended."""
    try:
        return str(process.environ())
    except psutil.Error:
        return ""


def _has_torch(process: psutil.Process) -> bool:
    try:
        return any("libtorch" in area.path for area in process.memory_maps())
    except psutil.Error:
        return False


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def free_port() -> int:
    """A port that was free a moment ago, below the ports that the system gives to other tests' connections."""
    while True:
        port = secrets.choice(range(20_000, 32_000))  # a seed of `random` would give it again
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def write_config(folder: Path, checkpoint: Path, port: int, **sections: dict | list) -> Path:
    """A YAML for `checkpoint` on `port`."""
    values = {
        "model": {"path": str(checkpoint), "max_model_len": 512},
        "cluster": {"ranks": 2, "device": "cpu"},
        "cache": {"num_blocks": 256},
        # Tests compare figures of two moments.
        "serve": {"port": port, "model_name": "tiny", "stats_fresh_s": 0},
    }
    for name, changes in sections.items():
        values[name] = {**values.get(name, {}), **changes} if isinstance(changes, dict) else changes
    path = folder / "server.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


@contextmanager
def running(
    folder: Path,
    checkpoint: Path,
    *,
    start_timeout_s: float = START_TIMEOUT_S,
    meanwhile: Callable[[Server], None] = lambda server: None,
    joins: Server | None = None,
    **sections: dict | list,
) -> Iterator[Server]:
    """A ready server; stopped at the end whatever happens. `meanwhile` runs while it starts.

    joins: the server with the Ray that it joins, because the start of a Ray is half of its own start
    """
    port = free_port()
    if joins is not None:
        address = {"ray_address": joins.ray_address()}
        sections["cluster"] = {**sections.get("cluster", {}), **address}
        sections["serve"] = {**sections.get("serve", {}), "app_name": f"joined-{port}"}
    config = write_config(folder, checkpoint, port, **sections)
    server = Server(config, port, folder / "log", joins)
    try:
        meanwhile(server)
        server.wait_ready(start_timeout_s)
        yield server
    finally:
        server.stop()
