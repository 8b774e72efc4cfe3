"""What a configuration wants of the groups of the model pool. Plain data."""

from dataclasses import dataclass

from cluster.config.phalanx_config import PhalanxConfig, Role
from cluster.config.resolve import resolve_device, resolve_rank_config, resolve_threads
from workers.config import RankConfig


@dataclass(frozen=True)
class GroupSpec:
    """One group.

    name    unique among the groups of the Ray cluster, and by which an operator's call names the group
    role    at the start
    model   by which a request names the model
    config  the configuration of a server with this group alone, which a change in service starts from
    ranks   settings of the group's ranks
    """

    name: str
    role: Role
    model: str
    config: PhalanxConfig
    ranks: RankConfig


def group_sizes(config: PhalanxConfig) -> list[int]:
    """The ranks of each group at the start."""
    return [group.ranks for group in config.pool] or [config.cluster.ranks]


def group_specs(config: PhalanxConfig, *, num_gpus: int | None = None) -> list[GroupSpec]:
    """The groups of a configuration: those of its pool, or one.

    num_gpus: GPUs of all nodes; None = count this machine's. Raises ConfigError as `resolve_rank_config` does.
    """
    name, model = config.serve.app_name, config.serve.model_name or ""
    if not config.pool:
        ranks = resolve_rank_config(config, num_gpus=num_gpus)
        return [GroupSpec(name, "generate", model, config, ranks)]
    # The groups share the machines, so both are decided for all ranks together.
    shared = {
        "device": resolve_device(config, num_gpus),
        "threads_per_rank": resolve_threads(config),
    }
    specs = []
    for number, group in enumerate(config.pool):
        own = shared | {"ranks": group.ranks, "nodes": group.nodes}
        cluster = config.cluster.model_copy(update=own)
        of_group = config.model_copy(update={"cluster": cluster, "pool": []})
        ranks = resolve_rank_config(of_group, num_gpus=num_gpus)
        specs.append(GroupSpec(f"{name}-{number}", group.role, model, of_group, ranks))
    return specs
