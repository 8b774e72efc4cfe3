"""Three hosts on this machine: `ray up`, checks, a server over all hosts, a cable out, a host lost, `ray down`.

Takes about nine minutes on two cores: `scripts/test_cluster` runs it, and the suite with `--exhaustive`.
"""

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import hosts
from tests.cluster.hosts import ROOT, Bed, Host, wait_for
from tests.cluster.launched import (
    ENVIRONMENT,
    Server,
    Stream,
    listeners,
    phalanx,
    ray_command,
    share_token,
    start_cluster,
)

REASON = hosts.unavailable(ssh=True)
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(1500),
]

MODEL = hosts.HOME / "model"
START_TIMEOUT_S = 40
NUM_TOKENS = 1000
ON_CLUSTER = ("cluster.ray_address=auto", "cluster.nodes=3", "cluster.ranks=3")
JOIN = "import ray; ray.init(address='auto', log_to_driver=False)"


def settings(*overrides: str) -> list[str]:
    return [word for override in (*ON_CLUSTER, *overrides) for word in ("--set", override)]


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    with hosts.bed(tmp_path, 3, ENVIRONMENT) as made:
        yield made


def check_the_nodes(bed: Bed) -> None:
    found = phalanx(bed.hosts[0], "check", "--cluster", "--json", *settings())
    report = json.loads(found.stdout[found.stdout.index("{") :])
    assert found.returncode == 0 and report["errors"] == [], found.stdout
    assert [node["interface"] for node in report["nodes"]] == ["eth0"] * 3


def refuse_a_command_without_the_token(bed: Bed) -> None:
    stranger = bed.hosts[1]
    without = {**ENVIRONMENT, "RAY_AUTH_MODE": "disabled"}
    address = f"{bed.hosts[0].address}:6379"
    script = JOIN.replace("'auto'", f"'{address}'")
    refused = stranger.run(sys.executable, "-c", script, timeout=90, environment=without)
    assert refused.returncode != 0, refused.stdout
    assert "auth" in refused.stdout.lower(), refused.stdout


def demand_too_many_nodes(bed: Bed) -> None:
    started = time.monotonic()
    server = Server(
        bed.hosts[0], *ON_CLUSTER, "cluster.nodes=4", "cluster.ranks=4", "serve.port=8009"
    )
    assert server.process.wait(90) == 1
    print(f"too many nodes: {time.monotonic() - started:.1f} s")
    lines = server.log.splitlines()
    assert any("no capacity for 4 rank(s) on 4 node(s)" in line for line in lines), server.log
    for host in bed.hosts:
        assert any(host.address in line and line.rstrip().endswith("room") for line in lines)


def deploy_by_serve(bed: Bed, path: Path) -> None:
    """`serve deploy` of the repository's file answers by Serve's proxy on the head until `serve shutdown`."""
    head = bed.hosts[0]
    started = time.monotonic()
    ray_command(head, "exec", path, "serve deploy ~/phalanx/serve.yaml")
    try:
        answers(head, 300)
    except AssertionError as error:
        raise AssertionError(ray_command(head, "exec", path, "serve status")) from error
    print(f"serve deploy: {time.monotonic() - started:.1f} s")
    assert "status: RUNNING" in ray_command(head, "exec", path, "serve status")
    assert all(ranks(bed)), "one rank a host"
    ray_command(head, "exec", path, "serve shutdown -y")
    wait_for(lambda: not any(ranks(bed)), 60, "the ranks end with the application")


def submit_a_job(bed: Bed) -> None:
    """`phalanx serve` as a job of the cluster; `ray job stop` ends it with its ranks."""
    head = bed.hosts[0]
    started = time.monotonic()
    address = ("--address", "http://127.0.0.1:8265")
    command = f"exec ~/phalanx/venv/bin/phalanx serve {' '.join(settings())}"
    job = ("--no-wait", "--submission-id", "phalanx", "--", "bash", "-c", command)
    ray_command(head, "job", "submit", *address, *job)
    try:
        answers(head, 300)
    except AssertionError as error:
        raise AssertionError(ray_command(head, "job", "logs", *address, "phalanx")) from error
    print(f"ray job submit: {time.monotonic() - started:.1f} s")
    ray_command(head, "job", "stop", *address, "phalanx")
    wait_for(lambda: not any(ranks(bed)), 90, "the ranks end with the job")


def answers(head: Host, timeout: float) -> None:
    """Return when the server of a host has answered a request."""

    def tried() -> bool:
        done = bool(text_of(Stream(head, 4, 30).wait(60)))
        time.sleep(0 if done else 2)
        return done

    wait_for(tried, timeout, "the server answers")


def start_server(head: Host, *overrides: str) -> Server:
    """Start a server of the demo with one rank a host."""
    started = time.monotonic()
    server = Server(
        head,
        *ON_CLUSTER,
        f"model.path={MODEL}",
        "serve.model_name=demo",
        f"cluster.start_timeout_s={START_TIMEOUT_S}",
        "overlap.mode=off",  # its measurement takes a minute on a busy machine
        *overrides,
    )
    server.wait_ready(240)
    print(f"serving: {time.monotonic() - started:.1f} s")
    return server


def serve_a_model_that_one_host_has(bed: Bed) -> Server:
    """Start a server; the other hosts fetch the model."""
    head = bed.hosts[0]
    head.run("cp", "-r", ROOT / "cluster" / "share" / "models" / "demo", MODEL)
    server = start_server(head, "cluster.fetch_weights=true")
    size = (ROOT / "cluster/share/models/demo/model.safetensors").stat().st_size
    for host in bed.hosts:
        found = host.run("stat", "-c", "%s", MODEL / "model.safetensors").stdout
        assert int(found) == size, host.name
        assert "part" not in host.run("ls", MODEL).stdout
    return server


def ranks_listen_on_their_address(bed: Bed) -> None:
    """Each process of ours has one port on all interfaces, by which Ray calls it; ranks listen on their address."""
    for host in bed.hosts:
        for program in ("ray::RankActor", "ray::Supervisor"):
            ports = [
                int(line.split()[0].rsplit(":", 1)[1])
                for line in listeners(host)
                if program in line
            ]
            assert len(ports) <= 1 and all(10002 <= port <= 19999 for port in ports), ports


def stream_whole(server: Server) -> str:
    """Stream a request; return its text."""
    events = server.stream(NUM_TOKENS, 60).wait(150)
    assert events[-1].get("done"), events
    texts = [event for event in events if "text" in event]
    rate = len(texts) / (texts[-1]["at"] - texts[0]["at"])
    print(f"{rate:.1f} tokens/s of one stream")
    return text_of(events)


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event.get("text", "") for event in events)


def open_streams(server: Server) -> list[Stream]:
    """Open a stream for each rank; return when tokens of all of them come."""
    streams = [server.stream(NUM_TOKENS, 200) for _ in range(3)]
    wait_for(lambda: all(len(stream.events()) > 5 for stream in streams), 60, "all streams run")
    return streams


def streams_go_on(streams: list[Stream], expected: str, since: float, what: str) -> None:
    """All streams end with the text of an undisturbed stream."""
    counts = [len(stream.events()) for stream in streams]
    wait_for(
        lambda: all(len(s.events()) > n for s, n in zip(streams, counts, strict=True)),
        150,
        f"the streams go on after {what}",
    )
    print(f"streams go on {time.monotonic() - since:.1f} s after {what}")
    for stream in streams:
        events = stream.wait(200)
        assert events[-1].get("done"), events[-1]
        assert text_of(events) == expected, "no token is lost, doubled or other"


def counts_at_rest(streams: list[Stream]) -> list[int] | None:
    """The numbers of events when none has come for half a second; the last ones are on their way before."""
    before = [len(stream.events()) for stream in streams]
    time.sleep(0.5)
    return before if before == [len(stream.events()) for stream in streams] else None


def ranks(bed: Bed) -> list[str]:
    """The process of each host's rank."""
    return [host.run("pgrep", "-f", "ray::RankActor").stdout.strip() for host in bed.hosts]


def pull_a_cable_for_a_while(bed: Bed, server: Server, expected: str, seconds: float) -> None:
    """Streams of all ranks pause while a cable is out, then go on in the same processes without an error."""
    before = ranks(bed)
    streams = open_streams(server)
    bed.pull_cable(bed.hosts[1])
    pulled = time.monotonic()
    counts = wait_for(lambda: counts_at_rest(streams), 20, "the streams pause")
    time.sleep(max(0.0, pulled + seconds - time.monotonic()))
    assert [len(s.events()) for s in streams] == counts, "no step without a host"
    print(f"state after {seconds:g} s: {server.group()['state']}")
    bed.plug_cable(bed.hosts[1])
    streams_go_on(streams, expected, time.monotonic(), "the cable was plugged")
    print(f"last rebuild: {server.group()['last_rebuild']}")
    assert ranks(bed) == before, "no process is replaced for a cable"


def pull_a_cable_for_ever(bed: Bed, server: Server) -> None:
    """Without room for a rank the group fails with the reason, and its streams with it."""
    (stream, *_), pulled = open_streams(server), time.monotonic()
    bed.pull_cable(bed.hosts[1])
    wait_for(
        lambda: server.process.poll() is not None,
        60 + 3 * START_TIMEOUT_S,
        "the server ends",
    )
    print(f"failed {time.monotonic() - pulled:.1f} s after the cable was pulled for ever")
    assert server.process.returncode == 1, server.log
    reason = rf"the node of rank \d did not answer for {START_TIMEOUT_S} s"
    assert re.search(reason, server.log), server.log
    events = stream.wait(20)
    assert any("error" in event for event in events), events[-2:]
    bed.plug_cable(bed.hosts[1])


def lose_a_host(bed: Bed, server: Server, expected: str) -> None:
    """The ranks of the other hosts go on."""
    streams = open_streams(server)
    bed.lose(bed.hosts[2])
    lost = time.monotonic()
    streams_go_on(streams, expected, lost, "a host was lost")
    print(f"last rebuild: {server.group()['last_rebuild']}")
    assert len(server.group()["vote_age_seconds"]) == 2


def end_the_cluster(bed: Bed, path: Path) -> None:
    """`ray down` ends Ray on the head at once; the other machines end it when the head is gone for a minute."""
    head, other, _ = bed.hosts
    ray_command(head, "down", path, "-y")
    ssh_master = "ssh: "  # of Ray's launcher; it ends 10 s after the last command
    assert [line for line in head.processes() if not line.startswith(ssh_master)] == []

    def rest() -> list[str]:
        lines = other.processes()
        return [line for line in lines if "log_monitor.py" not in line]  # `ray stop` ends it

    started = time.monotonic()
    try:
        wait_for(lambda: not rest(), 240, "the other machine has ended Ray")
        print(f"the other machine has ended Ray after {time.monotonic() - started:.1f} s")
    except AssertionError as error:
        raise AssertionError("\n".join(rest())) from error


def test_a_cluster_from_up_to_down(bed: Bed) -> None:
    started = time.monotonic()
    path = start_cluster(bed)
    print(f"\nray up, three nodes: {time.monotonic() - started:.1f} s")
    check_the_nodes(bed)
    demand_too_many_nodes(bed)
    deploy_by_serve(bed, path)
    submit_a_job(bed)
    server = serve_a_model_that_one_host_has(bed)
    expected = stream_whole(server)
    refuse_a_command_without_the_token(bed)
    ranks_listen_on_their_address(bed)
    for seconds in (2, 9):  # before and after cluster.hang_timeout_s
        pull_a_cable_for_a_while(bed, server, expected, seconds)
    server.stop()
    server = start_server(bed.hosts[0], "cluster.shrink=true")
    lose_a_host(bed, server, expected)
    server.stop()
    # Last, because Ray counts a host as dead after about a minute without its network.
    server = start_server(bed.hosts[0], "cluster.ranks=2", "cluster.nodes=2")
    pull_a_cable_for_ever(bed, server)
    end_the_cluster(bed, path)


def test_a_group_over_ipv6(tmp_path: Path) -> None:
    """Two hosts without IPv4 addresses on their network."""
    with hosts.bed(tmp_path, 2) as bed:
        head, other = bed.hosts
        share_token(head, [other])
        for host in bed.hosts:
            host.run("ip", "address", "del", f"{host.address}/24", "dev", "eth0")
            host.run("ip", "-6", "route", "add", "default", "dev", "eth0")
        ray_command(head, "start", "--head", "--port=6379", f"--node-ip-address={head.address6}")
        join = ("start", f"--address=[{head.address6}]:6379")
        ray_command(other, *join, f"--node-ip-address={other.address6}")
        two = ("cluster.ray_address=auto", "cluster.nodes=2", "cluster.ranks=2")
        server = Server(head, *two, "serve.model_name=demo", "overlap.mode=off")
        server.wait_ready(240)
        stream_whole(server)
        assert server.group()["state"] == "serving"
        server.stop()
        found = phalanx(head, "check", "--cluster", *(w for s in two for w in ("--set", s)))
        assert found.returncode == 0 and other.address6 in found.stdout, found.stdout
