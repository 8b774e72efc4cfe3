"""Starting, failing and stopping: no process left, clear messages, a dead rank noticed."""

import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest

from tests.serve.server import (
    ROOT,
    START_TIMEOUT_S,
    Server,
    free_port,
    running,
    write_config,
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stops_within_ten_seconds_and_leaves_nothing(tmp_path, checkpoint, number):
    with running(tmp_path, checkpoint, cluster={"ranks": 1}) as server:
        assert len(server.ranks()) == 1
        seconds, left = server.stop(number)
    assert seconds < 10 and not left, (seconds, left)
    assert server.process.returncode == 0, server.log.read_text()


def test_stops_while_it_starts_and_starts_nothing_more(tmp_path, checkpoint):
    port = free_port()
    server = Server(write_config(tmp_path, checkpoint, port), port, tmp_path / "log")
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while "ray and checks" not in server.log.read_text():
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


def test_a_killed_rank_is_told_to_everybody(tmp_path, checkpoint):
    with running(tmp_path, checkpoint) as server:
        last: list[str] = []

        def read_stream() -> None:
            body = {
                "model": "tiny",
                "prompt": "x",
                "max_tokens": 490,
                "stream": True,
                "ignore_eos": True,
            }
            with httpx.stream(
                "POST", f"{server.url}/v1/completions", json=body, timeout=60
            ) as answer:
                for line in answer.iter_lines():
                    if line:
                        last.append(line)

        reader = threading.Thread(target=read_stream)
        reader.start()
        while not last:
            time.sleep(0.01)
        server.ranks()[1].kill()
        reader.join(30)
        assert not reader.is_alive(), "the stream hangs"
        assert last[-1] == "data: [DONE]" and '"error"' in last[-2], last[-3:]
        server.process.wait(20)
        assert server.process.returncode == 1
        assert "rank" in server.log.read_text().split("ready in")[1]


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
