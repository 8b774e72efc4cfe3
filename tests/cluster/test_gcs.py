"""Ray's GCS with external storage: stopped, killed and started again under streams; then gone for ever.

One host with `ray start` and Redis. Ray does not start its GCS again by itself: on Kubernetes the kubelet does.
"""

import re
import shutil
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from tests.cluster import hosts
from tests.cluster.hosts import Bed, Host, wait_for
from tests.cluster.launched import (
    BIN,
    TOKEN,
    Server,
    Stream,
    rank_processes,
    ray_command,
)

REDIS = shutil.which("redis-server") or shutil.which("valkey-server")
REASON = hosts.unavailable() or (None if REDIS else "neither redis-server nor valkey-server")
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(1500),
]

START_S = 300.0
GONE_S = 5.0
STOPPED_S = 20.0
STORAGE = {"RAY_REDIS_ADDRESS": "127.0.0.1:6390"}
NICENESS = {"RAY_worker_niceness": "0"}  # as `phalanx serve` starts a Ray
SETTINGS = ("cluster.ray_address=auto", "cluster.ranks=2", "serve.model_name=demo")
NUM_TOKENS = 900


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Host]:
    """A host with Redis, and a head of Ray that keeps its state there."""
    with hosts.bed(tmp_path, 1) as bed:
        (host,) = bed.hosts
        ray_command(host, "get-auth-token", "--generate")
        start_storage(bed, host)
        start = ("start", "--head", "--port=6379", "--num-cpus=8", "--include-dashboard=false")
        found = host.run(BIN / "ray", *start, environment=TOKEN | STORAGE | NICENESS, timeout=120)
        assert found.returncode == 0, found.stdout
        yield host


def start_storage(bed: Bed, host: Host) -> None:
    with (bed.folder / "redis.log").open("w") as output:
        options = ("--port", 6390, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no")
        host.start(REDIS, *options, output=output)
    log = bed.folder / "redis.log"
    wait_for(lambda: "Ready to accept connections" in log.read_text(), 20, "Redis")


def pid_of(host: Host, name: str) -> str:
    """The only process of a host with `name` as its program."""
    (pid,) = host.run("pgrep", "-x", name).stdout.split()
    return pid


def restart_gcs(host: Host, seconds: float) -> None:
    """SIGKILL, and the same command line after some seconds."""
    pid = pid_of(host, "gcs_server")
    script = f"tr '\\0' '\\n' < /proc/{pid}/cmdline; echo; tr '\\0' '\\n' < /proc/{pid}/environ"
    command, variables = host.run("sh", "-c", script).stdout.split("\n\n")
    host.run("kill", "-KILL", pid)
    time.sleep(seconds)
    environment = dict(line.split("=", 1) for line in variables.splitlines() if "=" in line)
    with (host.folder / "gcs.log").open("w") as output:
        host.start(*command.splitlines(), output=output, environment=environment)


def open_streams(server: Server) -> list[Stream]:
    streams = [server.stream(NUM_TOKENS, 200) for _ in range(4)]
    wait_for(lambda: all(len(stream.events()) > 5 for stream in streams), 60, "all streams run")
    return streams


def whole(streams: list[Stream], expected: str) -> None:
    for stream in streams:
        events = stream.wait(200)
        assert events[-1].get("done"), events[-1]
        assert text_of(stream) == expected, "no token is lost, doubled or other"


def text_of(stream: Stream) -> str:
    return "".join(event.get("text", "") for event in stream.events())


def longest_pause(stream: Stream) -> float:
    times = [event["at"] for event in stream.events() if "text" in event]
    return max(later - earlier for earlier, later in pairwise(times))


def kill_a_rank(host: Host, server: Server, expected: str) -> None:
    """The group is rebuilt as ever."""
    streams = open_streams(server)
    before = server.group()["epoch"]
    host.run("kill", "-KILL", rank_processes(host)[0])
    whole(streams, expected)
    wait_for(lambda: server.group()["epoch"] > before, 120, "the group is rebuilt")
    print(f"last rebuild: {server.group()['last_rebuild']}")


def test_streams_go_on_without_the_gcs_and_the_server_after_it(head: Host) -> None:
    server = Server(head, *SETTINGS, "overlap.mode=off")
    server.wait_ready(START_S)
    first = server.stream(NUM_TOKENS, 100)
    first.wait(150)
    expected = text_of(first)
    before = rank_processes(head)
    streams = open_streams(server)
    head.run("kill", "-STOP", pid_of(head, "gcs_server"))
    time.sleep(STOPPED_S)
    head.run("kill", "-CONT", pid_of(head, "gcs_server"))
    whole(streams, expected)
    print(f"longest pause, GCS stopped: {max(map(longest_pause, streams)):.1f} s")
    streams = open_streams(server)
    restart_gcs(head, GONE_S)
    whole(streams, expected)
    print(f"longest pause, GCS restarted: {max(map(longest_pause, streams)):.1f} s")
    assert rank_processes(head) == before and server.process.poll() is None, server.log
    kill_a_rank(head, server, expected)
    the_gcs_is_gone_for_ever(head, server)


def the_gcs_is_gone_for_ever(head: Host, server: Server) -> None:
    """Ray's node gives up after a minute; the server ends with it, and leaves no process of its own."""
    started = time.monotonic()
    head.run("kill", "-KILL", pid_of(head, "gcs_server"))
    wait_for(lambda: server.process.poll() is not None, 180, "the server ends")
    print(f"the server has ended {time.monotonic() - started:.1f} s after the GCS")
    assert server.process.returncode == 1, server.log
    # The launcher says it, or Ray's own client, which may end the process first.
    said = r"^error: .*Ray|Failed to connect to GCS"
    assert re.search(said, server.log, re.M), server.log
    wait_for(lambda: not rank_processes(head), 60, "no rank is left")
    own = ("cluster.cli", "RankActor", "Supervisor", "Serve")  # the node's agents are Ray's

    def left() -> list[str]:
        return [line for line in head.processes() if any(title in line for title in own)]

    wait_for(lambda: not left(), 60, "no process of the server is left")
