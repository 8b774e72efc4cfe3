"""What a supervisor keeps in Ray's GCS for its next process: epochs, configurations and roles after changes, drains."""

import asyncio
import pickle
from dataclasses import dataclass, field

from ray.experimental import internal_kv

from cluster.config.phalanx_config import PhalanxConfig, Role
from workers.lora_config import LoadedAdapter

NAMESPACE = b"phalanx"


@dataclass
class GroupState:
    """What is kept of one group.

    epoch   the last one that began; -1 before the first
    config  after changes in service; None without any
    role    after a change in service; None without one
    drain_s limit of the drain of this group alone that has begun; None without one
    """

    epoch: int = -1
    config: PhalanxConfig | None = None
    role: Role | None = None
    drain_s: float | None = None


@dataclass
class AdapterState:
    """What is kept of the LoRA adapters.

    held      those that the ranks hold
    retired   ids of those among them that take no new requests
    """

    held: tuple[LoadedAdapter, ...] = ()
    retired: set[int] = field(default_factory=set)


@dataclass
class PoolState:
    """What is kept of the server.

    adapters    the LoRA adapters; None before they are known
    groups      of each group, by name
    drain_s     limit of the drain of the server that has begun; None without one
    ingresses   the ingresses that had a lease as the drain began
    drained     the ingresses that have finished their requests since then
    """

    groups: dict[str, GroupState] = field(default_factory=dict)
    drain_s: float | None = None
    ingresses: set[str] = field(default_factory=set)
    drained: set[str] = field(default_factory=set)
    adapters: AdapterState | None = None

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
