"""`phalanx check --cluster`: differences between nodes, each with its nodes; the facts of this machine."""

import io
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cluster.cli import app
from cluster.commands import check_cluster
from cluster.commands.check_cluster import ClusterReport, NodeReport, clock_skew, find_errors
from cluster.commands.cluster_table import render_cluster
from cluster.config.examples import DEMO
from cluster.config.load import load_config
from cluster.config.phalanx_config import PhalanxConfig
from workers.config import ModelSection
from workers.rank.node_facts import NodeFacts, matrix, node_facts, rdma_devices
from workers.rank.node_probe import NodeProbe
from workers.stats.versions import source_digest
from workers.weights.checkpoint_files import CheckpointFiles, FileFacts

ROOT = Path(__file__).parents[2]
EQUAL = {"GPUs": "8 x NVIDIA H200", "driver": "580.1", "torch": "2.11.0", "NVLink": "NV18"}


def node(number: int, checkpoint: str = "aaaa", **other: Any) -> NodeReport:
    facts = NodeFacts({**EQUAL, **other.pop("facts", {})}, 2**40, (2**37,) * 8, 2**39)
    missing = ("model.safetensors",) if not checkpoint else ()
    files = {"model.safetensors": FileFacts(1, checkpoint)} if checkpoint else {}
    fields = {"interface": "eth0", "facts": facts, "checkpoint": CheckpointFiles(files, missing)}
    return NodeReport(f"node-{number}", f"10.0.0.{number}", **{**fields, **other})


def config(*overrides: str) -> PhalanxConfig:
    return load_config(
        DEMO, ["cluster.ray_address=auto", "cluster.ranks=3", "cluster.nodes=3", *overrides]
    )


def errors(nodes: list[NodeReport], *overrides: str) -> list[str]:
    return list(find_errors(config(*overrides), nodes))


def test_equal_nodes_have_no_errors() -> None:
    assert errors([node(1), node(2), node(3, skew_s=0.2)]) == []


def test_each_node_needs_nixl_in_the_version_of_the_extra() -> None:
    nixl = ("cache.host_memory_gib=1", "cache.transfer=nixl")
    fits, old = {"nixl-cu12": "1.5.1"}, {"nixl-cu12": "1.4.0"}
    assert errors([node(number, facts=fits) for number in (1, 2, 3)], *nixl) == []
    assert errors([node(1), node(2), node(3)]) == [], "it is needed for the setting alone"
    found = errors([node(1, facts=fits), node(2, facts=old), node(3)], *nixl)
    assert found[0].startswith("nixl-cu12 differs: 1.5.1 on node-1; 1.4.0 on node-2; none on")
    install = "the extra nixl installs it: `pip install 'phalanx[nixl]'` there"
    assert found[1:] == [
        f"node-2: cache.transfer is nixl, but nixl-cu12 1.4.0 is installed, 1.5.1 is needed; {install}",
        f"node-3: cache.transfer is nixl, but nixl-cu12 is not installed; {install}",
    ]


def test_every_difference_names_values_and_nodes() -> None:
    nodes = [
        node(1),
        node(2, facts={"torch": "2.10.0"}),
        node(3, facts={"NVLink": "none", "triton": "3.6"}),
    ]
    assert errors(nodes) == [
        "torch differs: 2.11.0 on node-1, node-3; 2.10.0 on node-2",
        "NVLink differs: NV18 on node-1, node-2; none on node-3",
        "triton differs: none on node-1, node-2; 3.6 on node-3",
    ]


def test_defects_of_single_nodes() -> None:
    nodes = [
        node(1, unreachable={"10.0.0.2": "Connection timed out"}),
        NodeReport("node-2", "10.0.0.2", error="ModuleNotFoundError: No module named 'workers'"),
        node(3, skew_s=-7.25),
    ]
    assert errors(nodes) == [
        "node-1 (10.0.0.1) cannot connect to 10.0.0.2: Connection timed out",
        "node-2 (10.0.0.2): ModuleNotFoundError: No module named 'workers'",
        "node-3: its clock is -7.2 s off this machine's; run NTP on all nodes",
    ]
    assert errors(nodes[:1] * 2)[0] == "cluster.nodes is 3, the Ray cluster has 2 node(s)"


def test_a_missing_checkpoint_is_an_error_unless_it_will_be_fetched() -> None:
    nodes = [node(1), node(2, ""), node(3)]
    (only,) = errors(nodes)
    assert only.startswith("node-2 lacks model.safetensors of ") and "fetch_weights" in only
    assert errors(nodes, "cluster.fetch_weights=true") == []
    nowhere = [node(1, ""), node(2, ""), node(3, "")]
    assert len(errors(nowhere, "cluster.fetch_weights=true")) == 3


def test_checkpoints_that_differ_are_an_error_by_file() -> None:
    (only,) = errors([node(1), node(2), node(3, "bbbb")], "cluster.fetch_weights=true")
    assert only.endswith("model.safetensors differs: aaaa on node-1, node-2; bbbb on node-3")


def test_the_table_has_a_column_for_each_group_of_equal_nodes() -> None:
    console = Console(record=True, width=160, file=io.StringIO())
    nodes = [node(1), node(2, facts={"driver": "570.9"}), node(3)]
    render_cluster(ClusterReport(nodes, ["driver differs"]), console)
    lines = console.export_text().splitlines()
    assert any(line.split() == ["fact", "node-1,", "node-3", "node-2"] for line in lines)
    assert any(line.split() == ["driver", "580.1", "570.9"] for line in lines)
    assert lines[-1] == "error: driver differs"


def test_the_matrices_of_nvidia_smi() -> None:
    links = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \t{}\t0-15\nGPU1\t{}\t X \t0-15\n\nLegend:\n"
    assert matrix(links.format("NV18", "NV18")) == "NV18"
    assert matrix(links.format("NV18", "SYS")) == "X NV18; SYS X"
    assert matrix(" \tGPU0\tGPU1\t\n GPU0\tX\tOK\t\n GPU1\tOK\tX\t\n") == "OK"
    assert matrix("") == "none" and matrix("\tGPU0\nGPU0\t X \n") == "none"


def test_rdma_ports_with_state_and_rate(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert rdma_devices(tmp_path) == ["mlx5_0:1 ACTIVE 400 Gb/sec (4X NDR)"]
    assert rdma_devices(tmp_path / "none") == []


def test_other_code_of_one_version_has_another_digest(tmp_path: Path) -> None:
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "a.py").write_text("one")
    before = source_digest([tmp_path / "workers"])
    (tmp_path / "workers" / "a.py").write_text("two")
    assert source_digest([tmp_path / "workers"]) != before


def test_the_facts_of_this_machine() -> None:
    facts = node_facts()
    assert {"CPU", "GPUs", "driver", "NVLink", "P2P", "RDMA", "source", "torch", "ray"} <= set(
        facts.equal
    )
    assert facts.equal["ray"].startswith("2.") and facts.free_memory > 0


@pytest.mark.parametrize(
    ("ahead", "way", "found"), [(100.0, 0.0, 100.0), (-3.0, 0.01, -3.0), (0.0, 0.02, 0.0)]
)
def test_clock_skew(ahead: float, way: float, found: float) -> None:
    def read() -> float:
        time.sleep(way)
        return time.time() + ahead

    assert clock_skew(read) == pytest.approx(found, abs=0.5)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore what a probe sets in its process."""
    sockets = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME"
    for name in (*sockets, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, os.environ.get(name, "lo"))


@pytest.mark.usefixtures("environment")
def test_probes_reach_each_other_and_name_what_they_do_not_reach() -> None:
    one, other = (NodeProbe("127.0.0.1", ModelSection(path="nowhere")) for _ in range(2))
    assert one.port() != other.port() and one.interface() == "lo"
    assert one.reach({"127.0.0.1": other.port()}) == {}
    with socket.socket() as silent:  # has a port that no other process gets, and does not listen
        silent.bind(("127.0.0.1", 0))
        closed = silent.getsockname()[1]
        assert list(one.reach({"127.0.0.1": closed})) == ["127.0.0.1"]
    assert one.checkpoint().missing == ("config.json", "model.safetensors")


def test_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    reports = {"good": [], "bad": ["driver differs"]}
    for name, found in reports.items():
        report = ClusterReport([node(1)], found)
        monkeypatch.setattr(check_cluster, "check_cluster", lambda config, r=report: r)
        ended = CliRunner().invoke(app, ["check", str(DEMO), "--cluster", "--json"])
        assert ended.exit_code == (0 if name == "good" else 1)
        assert json.loads(ended.stdout)["errors"] == found
