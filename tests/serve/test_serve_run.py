"""`serve run cluster.app:build`: Ray Serve starts the application, and again its HTTP processes and a failed group."""

import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.checkpoints.writer import make_checkpoint
from tests.serve.open_streams import Stream
from tests.serve.server import ROOT, free_port, left_running, title, write_config

START_S, RECOVERY_S = 120, 90
NUM_TOKENS = (
    12_000  # of a stream that is still open when the lease of a dead HTTP process has ended
)
MAX_LEN = NUM_TOKENS + 100
BODY = {"model": "tiny", "prompt": "x", "max_tokens": 4, "ignore_eos": True}


class ServeRun:
    """A running `serve run` with Serve's own proxy on a free port."""

    def __init__(self, folder: Path, checkpoint: Path, replicas: int):
        port = free_port()
        config = write_config(
            folder,
            checkpoint,
            port,
            model={"max_model_len": MAX_LEN},
            cluster={"ranks": 1, "rebuild_attempts": 0},
            cache={"num_blocks": 6 * MAX_LEN // 16},
            serve={"replicas": replicas},
        )
        application = {"name": "phalanx", "import_path": "cluster.app:build", "route_prefix": "/"}
        file = folder / "serve.yaml"
        settings = {
            "http_options": {"host": "127.0.0.1", "port": port},
            "applications": [{**application, "args": {"config": str(config)}}],
        }
        file.write_text(yaml.safe_dump(settings))
        self.url, self.log = f"http://127.0.0.1:{port}", folder / "log"
        program = "from ray.serve.scripts import cli; cli()"
        with self.log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", program, "run", "--address", "local", str(file)],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "RAY_worker_niceness": "0", "PYTHONPATH": str(ROOT)},
            )

    def ranks(self) -> list[psutil.Process]:
        return self.processes("RankActor")

    def processes(self, words: str) -> list[psutil.Process]:
        """The processes with `words` in their command line."""
        family = psutil.Process(self.process.pid).children(recursive=True)
        return [p for p in family if words in title(p)]

    def running(self) -> float:
        """The requests that run; infinitely many without an answer that has their number."""
        answer = httpx.get(f"{self.url}/metrics", timeout=60)
        found = re.findall(r"^phalanx:num_requests_running{.*} (\S+)$", answer.text, re.M)
        return sum(map(float, found)) if found else math.inf

    def complete(self) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=BODY, timeout=60)

    def wait_served(self, seconds: float) -> None:
        """Until a request is answered."""
        deadline = time.monotonic() + seconds
        while True:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            try:
                if self.complete().is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)

    def stop(self) -> None:
        family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(30)
        finally:
            for process in (*left_running(family, 30), self.process):
                process.kill()


@contextmanager
def serving(tmp_path: Path, *, replicas: int) -> Iterator[ServeRun]:
    """A `serve run` that has answered a request."""
    sizes = {"num_layers": 2, "hidden_size": 64, "num_experts": 6, "head_dim": 32}
    checkpoint = make_checkpoint(tmp_path / "tiny", max_position_embeddings=MAX_LEN, **sizes)
    subject = ServeRun(tmp_path, checkpoint, replicas)
    try:
        subject.wait_served(START_S)
        yield subject
    finally:
        subject.stop()


def lose_an_http_process(served: ServeRun) -> None:
    """Its streams end and their requests leave the rank; the other streams go on, and Serve replaces it."""
    before = served.processes("ServeReplica")
    streams = [Stream(served, NUM_TOKENS) for _ in range(6)]
    assert len(before) == 2 and served.running() == 6
    before[0].kill()
    deadline = time.monotonic() + RECOVERY_S

    def going() -> list[Stream]:
        return [stream for stream in streams if stream.is_alive()]

    while len(going()) == 6 or served.running() > len(going()):
        assert time.monotonic() < deadline, (len(going()), served.running())
        time.sleep(0.1)
    assert going(), "too late to prove anything"
    assert not any(s.lines[-1] == "data: [DONE]" for s in streams), "too late to prove anything"
    while len(served.processes("ServeReplica")) < 2:
        assert time.monotonic() < deadline, served.log.read_text()
        time.sleep(0.1)
    for stream in going():
        seen = len(stream.lines)
        while len(stream.lines) == seen:
            assert time.monotonic() < deadline, stream.lines[-1]
            time.sleep(0.01)


def lose_the_group(served: ServeRun) -> None:
    """Its HTTP processes are unhealthy without it, and those that Serve starts instead start the group again."""
    (rank,) = served.ranks()
    rank.kill()
    rank.wait(10)
    served.wait_served(RECOVERY_S)
    (successor,) = served.ranks()
    assert successor.pid != rank.pid


@pytest.mark.exhaustive
def test_it_recovers_from_the_losses_of_an_http_process_and_of_its_group(tmp_path):
    with serving(tmp_path, replicas=2) as served:
        lose_an_http_process(served)
        lose_the_group(served)
