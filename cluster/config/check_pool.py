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
    if "prefill" in roles:
        yield from check_hand_overs(config, model)


def check_hand_overs(config: PhalanxConfig, model: ModelConfig | None) -> Iterator[Problem]:
    """Yield the settings with which a prefill group could hand nothing over."""
    if model is not None and model.pooling is not None:
        yield Problem(
            "pool",
            "the roles prefill and decode are for models that generate; expected the role generate",
            ("model.path", "model.task"),
        )
    if config.cluster.nodes > 1 and config.cache.transfer == "off":
        yield Problem(
            "cluster.nodes",
            f"{config.cluster.nodes}, but prefill and decode groups of pool hand KV over in the memory of one node; "
            "expected 1, cache.transfer: nixl, or groups of the role generate",
            ("pool", "cache.transfer"),
        )
    if not config.cache.host_memory_gib:
        yield Problem(
            "cache.host_memory_gib",
            "0, but a prefill group hands the KV of prompts over in host memory; expected at least room for the "
            "prompts that are on their way",
            ("pool",),
        )
