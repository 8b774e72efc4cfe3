"""What a fetch of KV needs of no other node: check values, limits, runs of units, the settings."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq

from cluster.config.errors import ConfigError
from cluster.config.load import load_config
from tests.checkpoints.writer import make_checkpoint
from workers.config import CacheConfig
from workers.kv_transfer import row_checks
from workers.kv_transfer.contents import check_values
from workers.kv_transfer.keeper import KeeperConfig
from workers.kv_transfer.kv_pull import FetchLimits, _parts, _runs
from workers.kv_transfer.kv_source import Held, SourceLink, SourceLostError, address_of, source_of
from workers.kv_transfer.nixl_memory import Run
from workers.rank import kv_places
from workers.rank.kv_places import KVPlaces
from workers.rank.rank_info import Rendezvous
from workers.wire.secure_socket import StreamAddress


@pytest.mark.parametrize("cuts", [(), (64,), (8, 72, 512)])
def test_check_values_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch, cuts) -> None:
    monkeypatch.setattr(row_checks, "CHECK_WORDS", 50)
    rows_NB = torch.randint(0, 256, (20, 1024), dtype=torch.uint8)
    for row_B, right in zip(rows_NB, check_values(rows_NB).tolist(), strict=True):
        whole = memoryview(row_B.numpy())
        parts = [whole[a:b] for a, b in zip((0, *cuts), (*cuts, 1024), strict=True)]
        assert row_checks.check_value(parts) == right


def test_no_request_waits_10_s() -> None:
    limits = FetchLimits()
    assert limits.answer_s < limits.fetch_s < limits.wait_s < 10
    assert limits.lease_s > limits.part_s, "a lease outlives a part"


def test_units_side_by_side_are_one_run() -> None:
    pairs = [(4, 9), (5, 10), (6, 11), (7, 13), (9, 14), (10, 15)]
    assert list(_runs(pairs, 10)) == [Run(40, 90, 30), Run(70, 130, 10), Run(90, 140, 20)]
    assert not list(_runs([], 10))


def test_parts_hold_all_rows_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.kv_transfer.kv_pull.PART_BYTES", 100)
    rows = [(number, Held([0] * size, 0)) for number, size in enumerate([4, 6, 1, 30, 2])]
    parts = list(_parts(rows, 10))  # type: ignore[arg-type]
    assert [[number for number, _ in part] for part in parts] == [[0, 1], [2], [3], [4]]


def test_a_source_is_text() -> None:
    address = StreamAddress("tcp://[fd00::1]:7", b"k@y" * 13 + b"!")
    assert address_of(source_of(address)) == address
    with pytest.raises(ValueError, match="tcp://x is no source"):
        address_of("tcp://x")


def test_servers_share_a_keeper_where_one_process_has_started_their_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two servers of one machine, each in a Ray of its own, have equal names; groups of a pool have one parent."""
    keepers: list[KeeperConfig] = []
    monkeypatch.setattr(
        kv_places, "HostTier", lambda keeper, *args, **sizes: keepers.append(keeper)
    )
    config = SimpleNamespace(
        cache=CacheConfig(host_memory_gib=0.25), model=SimpleNamespace(folder=Path("/none"))
    )
    caches: Any = SimpleNamespace(
        block_bytes=512, slot_bytes=0, window_blocks=0, device=torch.device("cpu")
    )
    for parent, store in [(os.getpid(), "a"), (os.getpid(), "a"), (1, "a"), (1, "b")]:
        monkeypatch.setattr(kv_places.os, "getppid", lambda parent=parent: parent)
        KVPlaces().connect(config, caches, Rendezvous("127.0.0.1", 0, "group", store=store))  # type: ignore[arg-type]
    first, of_pool, *others = (keeper.name for keeper in keepers)
    assert first == of_pool
    assert len({first, *others}) == 3


def test_ucx_takes_the_interface_of_the_address_without_infiniband(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kv_places, "INFINIBAND", tmp_path / "none")
    assert kv_places.ucx_environment("127.0.0.1") == {"UCX_NET_DEVICES": "lo"}
    assert kv_places.ucx_environment("192.0.2.77") == {}
    with monkeypatch.context() as changed:
        changed.setattr(kv_places, "INTERFACES", tmp_path)
        assert kv_places.ucx_environment("127.0.0.1") == {}, "UCX does not see the interface"
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(kv_places, "INFINIBAND", tmp_path)
    assert kv_places.ucx_environment("127.0.0.1") == {}


def test_roles_on_several_nodes_need_the_setting_and_the_setting_needs_memory(
    tmp_path: Path,
) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny", num_layers=1, hidden_size=32, num_experts=4)
    path = tmp_path / "config.yaml"
    path.write_text(f"model: {{path: {checkpoint}}}\ncluster: {{device: cpu}}\n", encoding="utf-8")
    pool = "pool=[{role: prefill, ranks: 1}, {role: decode, ranks: 1}]"
    nodes = ["cluster.ranks=2", "cluster.nodes=2", "cluster.ray_address=auto", pool]
    memory, nixl = "cache.host_memory_gib=1", "cache.transfer=nixl"
    assert load_config(path, [*nodes, memory, nixl]).cache.transfer == "nixl"
    assert load_config(path, []).cache.transfer == "off"
    assert load_config(path, ["cache.transfer=off"]).cache.transfer == "off", "no boolean of YAML"
    with pytest.raises(ConfigError, match=r"cluster.nodes: 2, .* cache.transfer: nixl"):
        load_config(path, [*nodes, memory])
    with pytest.raises(ConfigError, match=r"cache.transfer: nixl needs cache.host_memory_gib"):
        load_config(path, [nixl])


def test_files_of_kv_need_a_folder(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny", num_layers=1, hidden_size=32, num_experts=4)
    settings = {"model.path": str(checkpoint), "cache.host_memory_gib": 1}
    folder, file = tmp_path / "new" / "kv", checkpoint / "config.json"
    assert load_config({}, settings | {"cache.disk_path": str(folder)}).cache.disk_path
    with pytest.raises(ConfigError, match=r"cache.disk_path: '.*config.json' is a file; expected"):
        load_config({}, settings | {"cache.disk_path": str(file)})


def test_a_source_that_is_no_address_is_lost() -> None:
    for source in ("no source", "tcp://x"):
        with pytest.raises(SourceLostError):
            SourceLink(zmq.Context.instance(), source)
