"""What a configuration wants of the groups of the model pool. Plain data."""

from dataclasses import dataclass
from typing import Literal

from cluster.config.phalanx_config import PhalanxConfig
from workers.config import RankConfig

Role = Literal["generate"]
"""The part of a request that a group computes: all of it."""


@dataclass(frozen=True)
class GroupSpec:
    """One group.

    name   unique among the groups of the Ray cluster, and by which an operator's call names the group
    model  by which a request names the model
    ranks  settings of the group's ranks
    """

    name: str
    role: Role
    model: str
    ranks: RankConfig


def group_specs(config: PhalanxConfig, ranks: RankConfig) -> list[GroupSpec]:
    """The groups of a configuration: one.

    ranks: the resolved settings of `config`
    """
    name = config.serve.app_name
    return [GroupSpec(name, "generate", config.serve.model_name or "", ranks)]
