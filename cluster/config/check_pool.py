"""Checks of the section `pool`: the groups, their ranks and roles. They yield problems, none raises."""

from collections.abc import Iterator

from cluster.config.errors import Problem
from cluster.config.phalanx_config import PhalanxConfig
from workers.specs.model import ModelConfig


def check_pool(config: PhalanxConfig, model: ModelConfig | None) -> Iterator[Problem]:
    """Yield problems of groups that do not fit each other, the cluster or the model."""
    if not config.pool:
        return
    total, nodes = sum(group.ranks for group in config.pool), config.cluster.nodes
    if total != config.cluster.ranks:
        yield Problem(
            "cluster.ranks",
            f"{config.cluster.ranks} rank(s), but the groups of pool have {total}; expected their sum",
            ("pool",),
        )
    for number, group in enumerate(config.pool):
        if group.nodes > nodes:
            yield Problem(
                f"pool.{number}.nodes",
                f"{group.nodes} nodes of {nodes} (cluster.nodes)",
                ("cluster.nodes",),
            )
        elif group.ranks % group.nodes:
            yield Problem(
                f"pool.{number}.nodes",
                f"{group.ranks} ranks do not divide evenly over {group.nodes} nodes",
            )
    yield from _check_roles(config, model)


def _check_roles(config: PhalanxConfig, model: ModelConfig | None) -> Iterator[Problem]:
    roles = [group.role for group in config.pool]
    if "prefill" in roles and "decode" not in roles:
        yield Problem(
            "pool", "a group has the role prefill and none decode; expected both or neither"
        )
    if "decode" in roles and "prefill" not in roles:
        yield Problem(
            "pool",
            "a group has the role decode and none prefill; expected a prefill group, or the role generate",
        )
    if "prefill" not in roles:
        return
    if model is not None and model.pooling is not None:
        yield Problem(
            "pool",
            "the roles prefill and decode are for models that generate; expected the role generate",
            ("model.path", "model.task"),
        )
    if not config.cache.prefix_caching:
        yield Problem(
            "cache.prefix_caching",
            "false, but the roles prefill and decode of pool hand the KV of prompts over by their prefixes",
            ("pool",),
        )
