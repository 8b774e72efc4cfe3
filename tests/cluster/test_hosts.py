"""Three hosts on this machine: `ray up`, checks, a server over all hosts, a cable out, a host lost, `ray down`."""

import json
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
    is_public,
    listeners,
    phalanx,
)

REASON = hosts.unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

ON_CLUSTER = ("cluster.ray_address=auto", "cluster.nodes=3", "cluster.ranks=3")
JOIN = "import ray; ray.init(address='auto', log_to_driver=False)"


def settings(*overrides: str) -> list[str]:
    return [word for override in (*ON_CLUSTER, *overrides) for word in ("--set", override)]


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    with hosts.bed(tmp_path, 3, ENVIRONMENT) as made:
        yield made


def test_hosts_are_apart_and_a_cable_can_be_pulled(tmp_path: Path) -> None:
    with hosts.bed(tmp_path, 2, {"COLOUR": "deep blue"}) as bed:
        one, other = bed.hosts
        ssh = ("ssh", "-i", bed.key, "-o", "StrictHostKeyChecking=no", "-o", "ConnectTimeout=2")
        command = "hostname; echo $COLOUR; ls -A /dev/shm; ls ~/.ssh 2>&1"
        answer = one.run(*ssh, f"root@{other.address}", command)
        assert "host2\ndeep blue\nls: cannot access" in answer.stdout, answer.stdout
        one.run("touch", "/dev/shm/mine", "/tmp/mine", hosts.HOME / "mine")
        for folder in ("/dev/shm", "/tmp", str(hosts.HOME)):
            assert "mine" in one.run("ls", folder).stdout.split()
            assert "mine" not in other.run("ls", folder).stdout.split()
        bed.pull_cable(other)
        assert one.run(*ssh, f"root@{other.address}", "true").returncode != 0
        bed.plug_cable(other)
        assert one.run(*ssh, f"root@{other.address}", "true").returncode == 0
        bed.lose(other)
        wait_for(lambda: not Path(f"/proc/{other.pid}").exists(), 10, "the host is gone")
        mine = [one.pid, other.pid]
    assert not any(Path(f"/proc/{pid}").exists() for pid in mine), "no process is left"
    assert str(tmp_path) not in Path("/proc/mounts").read_text(), "no mount is left"


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
        "cluster.start_timeout_s=40",
    )
    server.wait_ready(120)
    print(f"serving: {time.monotonic() - started:.1f} s")
    size = (ROOT / "cluster/share/models/demo/model.safetensors").stat().st_size
    for host in bed.hosts:
        found = host.run("stat", "-c", "%s", model / "model.safetensors").stdout
        assert int(found) == size, host.name
        assert "part" not in host.run("ls", model).stdout
    return server


def nothing_of_ours_listens_on_all_interfaces(bed: Bed) -> None:
    """Ranks and ingress listen on addresses of the cluster or of the host alone."""
    for host in bed.hosts:
        ours = [line for line in listeners(host) if "ray::" in line or "python" in line]
        assert ours == [], ours


def stream_whole(server: Server) -> float:
    """Stream a request; return its tokens per second."""
    events = server.stream(64, 60).wait(90)
    assert events[-1].get("done"), events
    texts = [event for event in events if "text" in event]
    return len(texts) / (texts[-1]["at"] - texts[0]["at"])


def test_is_public() -> None:
    assert is_public("0.0.0.0:80") and is_public("*:80") and is_public("[::]:80")
    assert not is_public("127.0.0.1:80") and not is_public("[::1]:80")
