"""Spare processes: Ray starts them before a later rank needs one, for the ranks of all groups of a server.

At most one waits on a node for equal variables. Ray would give the process that waits there to the actor that is to
start another one, and it would end with this actor. Knows nothing of ranks and groups.
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.supervisor import spare_imports

SPARE_S = 0.2
"""Seconds until Ray has begun to start a process for an actor, which takes longer to start."""

Key = tuple[str, frozenset[tuple[str, str]]]
"""Node, and variables of its processes."""


class _Spare:
    """An actor that is ended before it starts."""


class Spares:
    """Those of one server.

    joined: whether Ray is a running cluster that `phalanx serve` joined
    """

    def __init__(self, *, joined: bool):
        self._joined = joined
        self._waiting: set[Key] = set()

    @property
    def may_wait(self) -> bool:
        """Whether a process may wait."""
        return bool(self._waiting)

    def expect(self, node_ids: Iterable[str], variables: Mapping[str, str]) -> list[str]:
        """Note that a process waits on each node, or will soon. Returns the nodes where none did."""
        new = {node_id: _key(node_id, variables) for node_id in node_ids}
        found = [node_id for node_id, key in new.items() if key not in self._waiting]
        self._waiting.update(new.values())
        return found

    def take(self, node_id: str | None, variables: Mapping[str, str]) -> dict[str, Any]:
        """Ray options with the variables of a process, which is the one that waits on the node, if there is one."""
        key = None if node_id is None else _key(node_id, variables)
        spare = key in self._waiting
        self._waiting -= {key}
        return self._options(variables, spare=spare)

    async def start(self, node_ids: Iterable[str], variables: Mapping[str, str]) -> None:
        """Let Ray start a process on each node where none waits.

        Ray starts a process for an actor, and keeps the process for the next actor with the same variables when this
        one ends first, if the node has a free CPU. In a local Ray the process also imports the modules of a rank.
        """
        actor_class: Any = ray.remote(_Spare)
        actors = []
        for node_id in self.expect(node_ids, variables):
            here = NodeAffinitySchedulingStrategy(node_id, soft=False)
            options = self._options(variables, spare=True) | {"scheduling_strategy": here}
            actors.append(actor_class.options(num_cpus=0, **options).remote())
        try:
            await asyncio.sleep(SPARE_S)
        finally:
            for actor in actors:
                ray.kill(actor)

    def _options(self, variables: Mapping[str, str], *, spare: bool) -> dict[str, Any]:
        """A variable is a second start of Python for a new process, so a process that is no spare one has none."""
        reserved = {spare_imports.VARIABLE: "1"} if spare and not self._joined else {}
        merged = {**variables, **reserved}
        return {"runtime_env": {"env_vars": merged}} if merged else {}


def _key(node_id: str, variables: Mapping[str, str]) -> Key:
    return node_id, frozenset(variables.items())
