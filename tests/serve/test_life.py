"""Starting and failing: no process left, clear messages, a dead rank noticed.

Servers of other tests end in one way each: with nothing to do (test_wheel.py), with open streams
(conftest.py, tests/clients/conftest.py), and by the death of a rank (test_qwen3_5.py).
"""

import json
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from tests.serve.open_streams import Stream
from tests.serve.server import (
    ROOT,
    SECRETS,
    START_TIMEOUT_S,
    Server,
    free_port,
    left_running,
    running,
    title,
    variables,
    write_config,
)

KEY = "a-key-of-a-server-that-stops"


def test_stops_while_it_starts_and_starts_nothing_more(tmp_path, checkpoint, monkeypatch):
    """Up to then no process but the first had the API key in its environment."""
    monkeypatch.setenv("PHALANX_API_KEY", KEY)
    port = free_port()
    config = write_config(tmp_path, checkpoint, port, cluster={"ranks": 1})
    server = Server(config, port, tmp_path / "log")
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while "  ray  " not in server.log.read_text():
            assert server.process.poll() is None, server.log.read_text()
            assert time.monotonic() < deadline, server.log.read_text()
            time.sleep(0.05)
        assert "raylet" in " ".join(map(title, server.descendants()))
        assert not [p for p in server.descendants() if KEY in variables(p)]
        seconds, left = server.stop()
    finally:
        server.stop()
    output = server.log.read_text()
    assert seconds < 40 and not left, (seconds, left)  # Ray may create the supervisor meanwhile
    assert server.process.returncode == 0, output
    assert "ready" not in output and "WARNING" not in output, output  # Ray warns of a second start


def test_streams_outlive_the_ends_of_processes(server):
    """The new rank takes the process that Ray has started before, and the new supervisor has left it."""
    whole = Stream(server, 490)
    whole.join(60)
    spares = wait_for_spares(server)
    stays, ends = server.ranks()
    supervisor = server.kill_supervisor()
    before = Stream(server, 490)
    server.wait_successor(supervisor)
    before.join(60)
    assert before.text() == whole.text() and set(server.ranks()) == {stays, ends}
    assert server.supervisor() != supervisor and server.spares() == spares
    hit = Stream(server, 490)
    ends.kill()
    hit.join(60)
    assert not hit.is_alive(), "the stream hangs"
    assert hit.lines[-1] == "data: [DONE]" and hit.text() == whole.text()
    (successor,) = set(server.ranks()) - {stays, ends}
    assert stays in server.ranks() and successor in spares


def test_a_stream_outlives_the_supervisor_and_all_ranks_at_once(server):
    """The next supervisor finds no rank, and starts all of them in the epoch after the last one."""
    whole = Stream(server, 490)
    whole.join(60)
    supervisor, ranks = server.supervisor(), server.ranks()
    hit = Stream(server, 490)
    for process in (supervisor, *ranks):
        process.kill()
    hit.join(START_TIMEOUT_S)
    assert not hit.is_alive(), "the stream hangs"
    assert hit.lines[-1] == "data: [DONE]" and hit.text() == whole.text()
    assert server.supervisor() != supervisor and not set(server.ranks()) & set(ranks)


def wait_for_spares(server: Server) -> list[psutil.Process]:
    """The spare processes; a server starts one some seconds after its ranks."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (found := server.spares()):
        assert time.monotonic() < deadline, "Ray has started no spare process"
        time.sleep(0.1)
    return found


@pytest.mark.exhaustive
def test_streams_outlive_many_ends_of_processes_and_deaths_in_a_row_end_the_server(
    tmp_path, checkpoint
):
    with running(
        tmp_path, checkpoint, cluster={"rebuild_attempts": 2, "hang_timeout_s": 3}
    ) as server:
        whole = Stream(server, 490)
        whole.join(60)
        ranks = server.ranks()
        supervisor = server.kill_supervisor()
        before = Stream(server, 490)
        server.wait_successor(supervisor)
        before.join(60)
        assert before.text() == whole.text() and server.ranks() == ranks
        _stop_a_rank_of_an_idle_group(server)
        hit = Stream(server, 490)
        server.ranks()[1].kill()
        hit.join(60)
        assert not hit.is_alive(), "the stream hangs"
        assert hit.lines[-1] == "data: [DONE]" and hit.text() == whole.text()
        server.wait_line("serving, epoch 2")
        ended = (AssertionError, LookupError, psutil.NoSuchProcess)
        for epoch in range(3, 12):  # a slow machine may serve for long before a death
            with suppress(*ended):
                server.ranks()[0].kill()
                server.wait_line(f"serving, epoch {epoch}")
            if server.process.poll() is not None:
                break
        assert server.process.wait(60) == 1
        told = server.log.read_text().split("ready in")[1]
        assert re.search(r"rank [01]: its process died \(after 2 rebuilds in a row", told), told
        assert "never retrieved" not in told and "Traceback" not in told


def _stop_a_rank_of_an_idle_group(server: Server) -> None:
    """The group notices it, and replaces this rank alone."""
    stays, stopped = server.ranks()
    stopped.suspend()
    server.wait_line("serving, epoch 1")
    assert stays in server.ranks()
    assert not left_running([stopped], 60), "the stopped process is left"
    asked = [sys.executable, "-m", "cluster.cli", "status", server.url, "--json"]
    answer = subprocess.run(
        asked, cwd=ROOT, capture_output=True, text=True, timeout=START_TIMEOUT_S
    )
    assert answer.returncode == 0, answer.stderr
    (state,) = json.loads(answer.stdout)["groups"]
    assert (state["state"], state["epoch"], state["rebuilds"]) == ("serving", 1, 1)
    last = state["last_rebuild"]
    assert re.match(r"rank [01]: no sign of life for 3 s", last["reason"]), last
    assert last["stages"]["detection"] == 3 and len(state["vote_age_seconds"]) == 2


@pytest.mark.exhaustive
def test_a_server_ends_with_its_gcs(tmp_path, checkpoint):
    """A local Ray cannot go on without it. Clients see an end, the command prints the reason, no process is left."""
    with running(tmp_path, checkpoint) as server:
        family = server.descendants()
        (gcs,) = (process for process in family if process.name() == "gcs_server")
        hit = Stream(server, 490)
        gcs.kill()
        assert server.process.wait(60) == 1
        hit.join(60)
        assert not hit.is_alive(), "the stream hangs"
        assert not left_running(family, 30)
        printed = server.log.read_text().split("ready in")[1]
        assert "error: Ray's process gcs_server has ended" in printed, printed
        assert "Traceback" not in printed, printed


def run_serve(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "cluster.cli", "serve", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=START_TIMEOUT_S
    )


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


def test_a_broken_checkpoint_is_told_by_the_ranks(
    tmp_path, checkpoint, server, ray_address, monkeypatch
):
    """The ranks and the ingress got their secrets without a line of them in the logs of the Ray that was joined."""
    import shutil

    broken = tmp_path / "broken"
    shutil.copytree(checkpoint, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    cluster = {"ranks": 1, "ray_address": ray_address}
    config = write_config(
        tmp_path, broken, free_port(), cluster=cluster, serve={"app_name": "broken"}
    )
    done = run_serve(str(config))
    assert done.returncode == 1 and "model.safetensors" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    logs = [path for path in (server.session_folder() / "logs").rglob("*") if path.is_file()]
    texts = {path: path.read_text(errors="replace") for path in logs}
    assert any("RankActor" in text for text in texts.values()), "the logs show the start of a rank"
    for name, value in SECRETS.items():
        assert [path for path, text in texts.items() if value in text] == [], name
