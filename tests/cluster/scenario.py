"""Three hosts on this machine: `ray up`, checks, a server over all hosts, a cable out, a host lost, `ray down`.

`scripts/test_cluster` runs it, in about four minutes on two cores; the suite does not.
"""

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import hosts
from tests.cluster.hosts import ROOT, Bed, wait_for
from tests.cluster.launched import (
    ENVIRONMENT,
    Server,
    listeners,
    phalanx,
    ray_command,
    start_cluster,
)

REASON = hosts.unavailable()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(900),
]

ON_CLUSTER = ("cluster.ray_address=auto", "cluster.nodes=3", "cluster.ranks=3")
JOIN = "import ray; ray.init(address='auto', log_to_driver=False)"


def settings(*overrides: str) -> list[str]:
    return [word for override in (*ON_CLUSTER, *overrides) for word in ("--set", override)]


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    with hosts.bed(tmp_path, 3, ENVIRONMENT) as made:
        yield made


def check_the_nodes(bed: Bed) -> None:
    found = phalanx(bed.hosts[0], "check", "--cluster", "--bandwidth", "--json", *settings())
    report = json.loads(found.stdout[found.stdout.index("{") :])
    assert found.returncode == 0 and report["errors"] == [], found.stdout
    assert [node["interface"] for node in report["nodes"]] == ["eth0"] * 3
    assert len(report["pairs"]) == 3
    assert all(pair["bytes_per_s"] > 1e6 for pair in report["pairs"].values()), report["pairs"]


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
    assert any("no room for 4 rank(s) on 4 node(s)" in line for line in lines), server.log
    for host in bed.hosts:
        assert any(host.address in line and line.rstrip().endswith("room") for line in lines)


def serve_a_model_that_one_host_has(bed: Bed) -> Server:
    """Start a server with one rank a host; the other hosts fetch the model."""
    head = bed.hosts[0]
    model = hosts.HOME / "model"
    head.run("cp", "-r", ROOT / "cluster" / "share" / "models" / "demo", model)
    started = time.monotonic()
    server = Server(
        head,
        *ON_CLUSTER,
        f"model.path={model}",
        "serve.model_name=demo",
        "cluster.fetch_weights=true",
        "cluster.vote_timeout_s=5",
        "cluster.start_timeout_s=60",
        "cluster.rebuild_attempts=2",
        "overlap.mode=off",
    )
    server.wait_ready(240)
    print(f"serving: {time.monotonic() - started:.1f} s")
    size = (ROOT / "cluster/share/models/demo/model.safetensors").stat().st_size
    for host in bed.hosts:
        found = host.run("stat", "-c", "%s", model / "model.safetensors").stdout
        assert int(found) == size, host.name
        assert "part" not in host.run("ls", model).stdout
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


def stream_whole(server: Server) -> float:
    """Stream a request; return its tokens per second."""
    events = server.stream(64, 60).wait(90)
    assert events[-1].get("done"), events
    texts = [event for event in events if "text" in event]
    return len(texts) / (texts[-1]["at"] - texts[0]["at"])


def pull_a_cable_for_a_while(bed: Bed, server: Server) -> None:
    """A stream of a rank on every host pauses while a cable is out, then goes on without an error."""
    stream = server.stream(1900, 200)
    wait_for(lambda: len(stream.events()) > 5, 60, "the stream runs")
    bed.pull_cable(bed.hosts[1])
    time.sleep(4)
    before = len(stream.events())
    time.sleep(2)
    assert len(stream.events()) == before, "no step without a host"
    bed.plug_cable(bed.hosts[1])
    plugged = time.monotonic()
    wait_for(lambda: len(stream.events()) > before + 5, 150, "the stream goes on")
    print(f"going on {time.monotonic() - plugged:.1f} s after the cable was plugged")
    assert all("text" in event for event in stream.events()), stream.events()[-1]
    stream.stop()


def lose_a_host(bed: Bed, server: Server) -> None:
    """The server goes on, or ends with the reason when two rebuilds of cluster.start_timeout_s found no host."""
    stream = server.stream(1900, 200)
    wait_for(lambda: len(stream.events()) > 5, 60, "the stream runs")
    before = len(stream.events())
    bed.lose(bed.hosts[2])
    lost = time.monotonic()

    def decided() -> bool:
        return server.process.poll() is not None or len(stream.events()) > before + 20

    wait_for(decided, 240, "the group goes on or fails")
    print(
        f"decided {time.monotonic() - lost:.1f} s after the host was lost, server {server.process.poll()}"
    )
    if server.process.poll() is None:
        assert all("text" in event for event in stream.events()), stream.events()[-1]
        stream.stop()
    else:
        assert server.process.returncode == 1, server.log
        assert re.search(r"error: rank \d: ", server.log), server.log
        assert "error" in stream.wait(20)[-2], stream.events()[-2:]


def end_the_cluster(bed: Bed, path: Path) -> None:
    """`ray down` ends Ray on the head at once; the other machines end it when the head is gone for a minute."""
    head, other, _ = bed.hosts
    ray_command(head, "down", path, "-y")
    ssh_master = "ssh: "  # of Ray's launcher; it ends 10 s after the last command
    assert [line for line in head.processes() if not line.startswith(ssh_master)] == []

    def rest() -> list[str]:
        return [
            line for line in other.processes() if "log_monitor.py" not in line
        ]  # `ray stop` ends it

    wait_for(lambda: not rest(), 150, "the other machine has ended Ray")


def test_a_cluster_from_up_to_down(bed: Bed) -> None:
    started = time.monotonic()
    path = start_cluster(bed)
    print(f"\nray up, three nodes: {time.monotonic() - started:.1f} s")
    check_the_nodes(bed)
    demand_too_many_nodes(bed)
    server = serve_a_model_that_one_host_has(bed)
    print(f"{stream_whole(server):.1f} tokens/s of one stream")
    refuse_a_command_without_the_token(bed)
    ranks_listen_on_their_address(bed)
    pull_a_cable_for_a_while(bed, server)
    lose_a_host(bed, server)
    server.stop()
    end_the_cluster(bed, path)
