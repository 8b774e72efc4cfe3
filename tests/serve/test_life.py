"""Starting, failing and stopping: no process left, clear messages, a dead rank noticed."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import httpx
import psutil
import pytest

from tests.serve.server import (
    ROOT,
    START_TIMEOUT_S,
    Server,
    free_port,
    running,
    write_config,
)


def test_stops_within_ten_seconds_and_leaves_nothing(tmp_path, checkpoint):
    """By SIGTERM with nothing to do; by SIGINT the shared server does (conftest.py), below with a stream under way."""
    with running(tmp_path, checkpoint, cluster={"ranks": 1}) as server:
        assert len(server.ranks()) == 1
        seconds, left = server.stop(signal.SIGTERM)
    assert seconds < 10 and not left, (seconds, left)
    assert server.process.returncode == 0, server.log.read_text()
    output = server.log.read_text()
    assert "ERROR" not in output and "WARNING" not in output, output


def test_stops_while_it_starts_and_starts_nothing_more(tmp_path, checkpoint):
    port = free_port()
    server = Server(write_config(tmp_path, checkpoint, port), port, tmp_path / "log")
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while "  ray  " not in server.log.read_text():
            assert server.process.poll() is None, server.log.read_text()
            assert time.monotonic() < deadline, server.log.read_text()
            time.sleep(0.05)
        seconds, left = server.stop()
    finally:
        server.stop()
    output = server.log.read_text()
    assert seconds < 10 and not left, (seconds, left)
    assert server.process.returncode == 0, output
    assert "ready" not in output and "WARNING" not in output, output  # Ray warns of a second start


class Stream(threading.Thread):
    """A client that reads one long stream; `lines` grows as it comes."""

    def __init__(self, url: str, max_tokens: int):
        super().__init__(daemon=True)
        self.lines: list[str] = []
        self._url = f"{url}/v1/completions"
        self._body = {"model": "tiny", "prompt": "x", "max_tokens": max_tokens} | {
            "stream": True,
            "seed": 1,
            "ignore_eos": True,
        }
        self.start()
        deadline = time.monotonic() + 20
        while not self.lines:
            assert time.monotonic() < deadline, "the stream does not begin"
            time.sleep(0.005)

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=60) as answer:
            self.lines.extend(line for line in answer.iter_lines() if line)

    def text(self) -> str:
        """The text of the answer."""
        items = [json.loads(line.removeprefix("data: ")) for line in self.lines[:-1]]
        return "".join(item["choices"][0]["text"] for item in items)


LONG = {"model": {"max_model_len": 4096}, "cache": {"num_blocks": 2048}, "cluster": {"ranks": 1}}


def test_sigterm_lets_streams_finish_and_nobody_in(tmp_path, checkpoint):
    with running(tmp_path, checkpoint, **LONG) as server:
        streams = [Stream(server.url, 1500) for _ in range(3)]
        family = server.descendants()
        server.process.send_signal(signal.SIGTERM)
        body = {"model": "tiny", "prompt": "x", "max_tokens": 1}
        deadline = time.monotonic() + 10
        while (answer := httpx.post(f"{server.url}/v1/completions", json=body)).is_success:
            assert time.monotonic() < deadline, "it still takes requests"
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert httpx.get(f"{server.url}/ready").status_code == 503
        assert httpx.get(f"{server.url}/live").status_code == 200
        assert all(stream.is_alive() for stream in streams), "too quick to prove anything"
        for stream in streams:
            stream.join(30)
            assert stream.lines[-1] == "data: [DONE]"
            assert '"finish_reason":"length"' in stream.lines[-2], stream.lines[-2]
        server.process.wait(10)
        _, left = psutil.wait_procs(family, timeout=3)
        assert not left and server.process.returncode == 0, server.log.read_text()
        assert "drained" in server.log.read_text()


@pytest.mark.parametrize("how", ["time is over", "a second signal", "one SIGINT"])
def test_what_does_not_finish_is_told_why(tmp_path, checkpoint, how):
    drain_timeout_s = 0.5 if how == "time is over" else 30
    serve = {"drain_timeout_s": drain_timeout_s}
    with running(tmp_path, checkpoint, **LONG, serve=serve) as server:
        stream = Stream(server.url, 4000)
        if how == "a second signal":
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        seconds, left = server.stop(signal.SIGINT if how == "one SIGINT" else signal.SIGTERM)
        assert seconds < 10 and not left, (seconds, left)
        assert server.process.returncode == 0, server.log.read_text()
        stream.join(5)
        assert not stream.is_alive(), "the stream hangs"
        assert len(stream.lines) < 4000
        assert stream.lines[-1] == "data: [DONE]", stream.lines[-1]
        assert "the server is stopping" in stream.lines[-2], stream.lines[-2]


def test_streams_outlive_a_killed_rank_and_deaths_in_a_row_end_the_server(tmp_path, checkpoint):
    with running(tmp_path, checkpoint, cluster={"rebuild_attempts": 1}) as server:
        whole = Stream(server.url, 490)
        whole.join(60)
        hit = Stream(server.url, 490)
        server.ranks()[1].kill()
        hit.join(60)
        assert not hit.is_alive(), "the stream hangs"
        assert hit.lines[-1] == "data: [DONE]" and hit.text() == whole.text()
        server.wait_line("serving, epoch 1")
        for epoch in range(
            2, 10
        ):  # a slow machine serves for long enough before the first of these deaths
            server.ranks()[0].kill()
            with suppress(AssertionError):  # the server has ended
                server.wait_line(f"serving, epoch {epoch}")
            if server.process.poll() is not None:
                break
        assert server.process.wait(20) == 1
        told = server.log.read_text().split("ready in")[1]
        assert "rank 0: its process died (after 1 rebuilds in a row" in told
        assert "never retrieved" not in told and "Traceback" not in told


def run_serve(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "cluster.cli", "serve", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_a_taken_port_is_named(tmp_path, checkpoint):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_serve(str(write_config(tmp_path, checkpoint, port)))
    assert done.returncode == 1
    assert f"127.0.0.1:{port}" in done.stderr and "serve.port" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_foreign_address_is_named(tmp_path, checkpoint):
    done = run_serve(
        str(write_config(tmp_path, checkpoint, 8000)), "--set", "serve.host=203.0.113.1"
    )
    assert done.returncode == 1
    assert "203.0.113.1:8000" in done.stderr and "serve.host" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_checkpoint_is_named(tmp_path):
    done = run_serve(str(write_config(tmp_path, tmp_path / "nowhere", 8000)))
    assert done.returncode == 2 and "nowhere" in done.stderr and "model.path" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_broken_checkpoint_is_told_by_the_ranks(tmp_path, checkpoint):
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    done = run_serve(str(write_config(tmp_path, broken, 8000)), "--set", "serve.port=0")
    assert done.returncode == 2 and "serve.port" in done.stderr
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    done = run_serve(str(write_config(tmp_path, broken, port)))
    assert done.returncode == 1 and "model.safetensors" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
