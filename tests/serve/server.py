"""A real server in a process of its own, as a person starts it."""

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import psutil
import yaml

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 150
JOINING = {
    "RAY_AUTH_MODE": "token"
}  # which `ray.init` chooses by itself only where it starts a Ray
OPERATOR_KEY = "operator-of-the-tests"
SECRETS = {
    "HF_TOKEN": "hf_secret-of-the-tests",
    "PHALANX_OPERATOR_KEY": OPERATOR_KEY,
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=secret-of-the-tests",
}
ACTORS = ("RankActor", "ServeReplica", "SupervisorActor")
GCS_ADDRESS = re.compile(r"raylet .*--gcs-address=(\S+)")
SESSION_FOLDER = re.compile(r"raylet .*--raylet_socket_name=(\S+)/sockets/raylet")
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


class Server:
    """A running `phalanx serve`, with a Ray of its own or in the Ray of the server `joins`."""

    def __init__(self, config: Path, port: int, log: Path, joins: "Server | None" = None):
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._joins = joins
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
        """The processes of its actors, or of these kinds of them."""
        titles = tuple(f"ray::{kind}" for kind in kinds or ACTORS)
        return [p for p in self.descendants() if _title(p).startswith(titles)]

    def ranks(self) -> list[psutil.Process]:
        """The processes of the rank actors."""
        return self.actors("RankActor")

    def supervisor(self) -> psutil.Process:
        """The process of the supervisor."""
        (found,) = self.actors("SupervisorActor")
        return found

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
        titles = (_title(process) for process in self.descendants())
        return next(found[1] for title in titles if (found := pattern.search(title)))

    def gauges(self) -> dict[str, float]:
        """What runs, what waits and how full the caches are; sums over the ranks."""
        found = dict.fromkeys(GAUGES, 0.0)
        for line in httpx.get(f"{self.url}/metrics").text.splitlines():
            name = line.partition("{")[0].removeprefix("phalanx:")
            if name in found:
                found[name] += float(line.split()[-1])
        return found

    def wait_free(self, seconds: float = 1.0) -> None:
        """Nothing runs, nothing waits, no block is held; a second is what clients are promised."""
        deadline = time.monotonic() + seconds
        while any((now := self.gauges()).values()):
            assert time.monotonic() < deadline, now
            time.sleep(0.05)

    def stop(self, number: int = signal.SIGINT) -> tuple[float, list[psutil.Process]]:
        """Seconds until it ended, and what it left running."""
        started = time.monotonic()
        family = self.descendants() if self.process.poll() is None else []
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait(30)
        seconds = time.monotonic() - started
        alive = left_running(family, 10)
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


def _title(process: psutil.Process) -> str:
    """The command line, which Ray's actors replace; nothing of a process that has ended."""
    try:
        return " ".join(process.cmdline())
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
        port = random.randrange(20_000, 32_000)
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
