"""`serve run cluster.app:build`: Ray Serve starts the application, and starts it again when the group fails."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.serve.server import ROOT, free_port, left_running, write_config

START_S, RECOVERY_S = 120, 90
BODY = {"model": "tiny", "prompt": "x", "max_tokens": 4, "ignore_eos": True}


class ServeRun:
    """A running `serve run` with Serve's own proxy on a free port."""

    def __init__(self, folder: Path, checkpoint: Path):
        port = free_port()
        config = write_config(folder, checkpoint, port, cluster={"ranks": 1, "rebuild_attempts": 0})
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
        family = psutil.Process(self.process.pid).children(recursive=True)
        return [p for p in family if "RankActor" in " ".join(p.cmdline())]

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
            for process in (*left_running(family, 10), self.process):
                process.kill()


@pytest.fixture
def served(tmp_path: Path, checkpoint: Path) -> Iterator[ServeRun]:
    subject = ServeRun(tmp_path, checkpoint)
    try:
        yield subject
    finally:
        subject.stop()


def test_it_serves_and_recovers_from_a_failed_group(served):
    served.wait_served(START_S)
    (rank,) = served.ranks()
    rank.kill()
    rank.wait(10)
    served.wait_served(RECOVERY_S)
    (successor,) = served.ranks()
    assert successor.pid != rank.pid
