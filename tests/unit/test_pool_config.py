"""The section `pool`: its problems, the groups that come of it, and their reports."""

from pathlib import Path

import pytest

from cluster.commands.check import check_groups
from cluster.config.errors import ConfigError
from cluster.config.load import load_config
from cluster.config.resolve import resolve_threads
from cluster.supervisor.group_spec import group_sizes, group_specs
from tests.checkpoints.writer import make_checkpoint

SPLIT = "pool=[{role: prefill, ranks: 1}, {role: decode, ranks: 3}]"
SPLIT_OF_THREE = "pool=[{role: prefill, ranks: 1}, {role: decode, ranks: 2}]"
MEMORY = "cache.host_memory_gib=1"


@pytest.fixture(scope="module")
def yaml_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pools")
    checkpoint = make_checkpoint(folder / "tiny", num_layers=1, hidden_size=32, num_experts=4)
    path = folder / "config.yaml"
    path.write_text(f"model: {{path: {checkpoint}}}\ncluster: {{device: cpu}}\n", encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([SPLIT], "cluster.ranks: 1 rank.s., but the groups of pool have 4; expected their sum"),
        (["cluster.ranks=2", "pool=[{role: prefill, ranks: 2}]"], "prefill and none decode"),
        (["cluster.ranks=2", "pool=[{role: decode, ranks: 2}]"], "decode and none prefill"),
        (
            ["cluster.ranks=2", "pool=[{ranks: 2, nodes: 2}]"],
            r"pool.0.nodes: 2 nodes of 1 \(cluster",
        ),
        (["cluster.ranks=4", SPLIT], "cache.host_memory_gib: 0, but a prefill group"),
        (
            ["cluster.ranks=4", "cluster.nodes=2", "cluster.ray_address=auto", MEMORY, SPLIT],
            "cluster.nodes: 2, but prefill and decode groups",
        ),
        (["pool=[{role: prefil, ranks: 1}]"], "pool.0.role"),
        (["pool=[{role: prefill}]"], "pool.0.ranks: is missing"),
        (["pool=[{rank: 2}]"], "pool.0.rank: unknown key .value 2.; did you mean pool.0.ranks"),
        (
            ["cluster.ranks=4", "experts.redundant_slots=3", SPLIT],
            r"at most 0 with 1 rank\(s\) \(cluster.ranks, pool\)",
        ),
    ],
)
def test_problems_name_their_key(yaml_path: Path, settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(yaml_path, settings)


def test_ranks_divide_over_the_nodes_of_their_group(yaml_path: Path) -> None:
    settings = ["cluster.ranks=6", "cluster.nodes=2", "cluster.ray_address=auto"]
    with pytest.raises(ConfigError, match=r"pool.1.nodes: 3 ranks do not divide evenly"):
        load_config(yaml_path, [*settings, "pool=[{ranks: 3}, {ranks: 3, nodes: 2}]"])


def test_groups_of_two_nodes_may_differ(yaml_path: Path) -> None:
    nodes = ["cluster.nodes=2", "cluster.ray_address=auto", "cache.transfer=nixl"]
    config = load_config(yaml_path, ["cluster.ranks=3", *nodes, MEMORY, SPLIT_OF_THREE])
    prefill, decode = group_specs(config, num_gpus=0)
    assert (prefill.ranks.num_ranks, decode.ranks.num_ranks) == (1, 2)
    assert prefill.ranks.num_nodes == decode.ranks.num_nodes == 1
    of_a_full_node = load_config(yaml_path, ["cluster.ranks=2"])
    assert decode.ranks.threads == resolve_threads(of_a_full_node)


def test_each_group_has_ranks_and_experts_of_its_own(yaml_path: Path) -> None:
    config = load_config(yaml_path, ["cluster.ranks=4", SPLIT, MEMORY])
    prefill, decode = group_specs(config, num_gpus=0)
    assert (prefill.name, decode.name) == ("phalanx-0", "phalanx-1")
    assert (prefill.role, decode.role) == ("prefill", "decode")
    assert (prefill.ranks.num_ranks, decode.ranks.num_ranks) == (1, 3)
    assert prefill.ranks.threads == decode.ranks.threads, "the groups share the cores"
    assert decode.config.cluster.ranks == 3 and not decode.config.pool
    assert group_sizes(config) == [1, 3]


def test_without_a_pool_one_group_has_all_ranks(yaml_path: Path) -> None:
    config = load_config(yaml_path, ["cluster.ranks=2"])
    (spec,) = group_specs(config, num_gpus=0)
    assert (spec.name, spec.role, spec.config) == ("phalanx", "generate", config)
    assert group_sizes(config) == [2]
    (report,) = check_groups(config, num_api_keys=1)
    assert report.group is None and len(report.ranks) == 2


def test_the_report_has_a_part_for_each_group(yaml_path: Path) -> None:
    config = load_config(yaml_path, ["cluster.ranks=4", SPLIT, MEMORY])
    prefill, decode = check_groups(config, num_api_keys=1)
    assert prefill.group == "phalanx-0 (prefill)"
    assert decode.group == "phalanx-1 (decode)"
    assert (len(prefill.ranks), len(decode.ranks)) == (1, 3)
    assert prefill.ranks[0].weight_bytes > decode.ranks[0].weight_bytes, "1 of 1, 1 of 3 experts"
