"""What a supervisor keeps in Ray's GCS for its next process: its groups' epochs, and configurations after changes."""

import asyncio
import pickle
from dataclasses import dataclass, field

from ray.experimental import internal_kv

from cluster.config.phalanx_config import PhalanxConfig

NAMESPACE = b"phalanx"


@dataclass
class GroupState:
    """What is kept of one group.

    epoch   the last one that began; -1 before the first
    config  after changes in service; None without any
    """

    epoch: int = -1
    config: PhalanxConfig | None = None


@dataclass
class PoolState:
    """What is kept of all groups, by name."""

    groups: dict[str, GroupState] = field(default_factory=dict)

    def of(self, name: str) -> GroupState:
        """The state of a group, made at the first call."""
        return self.groups.setdefault(name, GroupState())


class SavedState:
    """The PoolState of one supervisor, of all its processes. `owner`: the id of its actor."""

    def __init__(self, owner: str):
        self._key = f"state:{owner}".encode()

    async def load(self) -> PoolState:
        """Return what was saved last."""
        data = await asyncio.to_thread(internal_kv._internal_kv_get, self._key, namespace=NAMESPACE)
        state: PoolState = PoolState() if data is None else pickle.loads(data)
        return state

    async def save(self, state: PoolState) -> None:
        """Keep `state` until `delete`."""
        data = pickle.dumps(state)
        put = internal_kv._internal_kv_put
        await asyncio.to_thread(put, self._key, data, namespace=NAMESPACE)

    async def delete(self) -> None:
        """Forget it, because the server ends."""
        await asyncio.to_thread(internal_kv._internal_kv_del, self._key, namespace=NAMESPACE)
