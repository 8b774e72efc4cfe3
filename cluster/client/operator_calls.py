"""The calls of operators to the supervisor, by an ingress: groups and adapters. Knows nothing of requests."""

from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from ray.exceptions import RayError

from cluster.client.adapters import ListedAdapters
from cluster.config.phalanx_config import PhalanxConfig, Role
from cluster.errors import BadRequestError, EngineDeadError, NotFoundError
from cluster.supervisor.adapters import UnknownAdapterError
from cluster.supervisor.failures import failure_message
from cluster.supervisor.status import GroupHealth

_Result = TypeVar("_Result")


class OperatorCalls:
    """Base of EngineClient, which sets the attributes."""

    _supervisor: Any
    _config: PhalanxConfig
    _ingress_id: str
    _stopping: bool
    _adapters: ListedAdapters

    def _report_adapters(self) -> None: ...
    def _follow(self, healths: Sequence[GroupHealth]) -> None: ...

    async def drain(self, timeout_s: float | None, group: str | None = None) -> None:
        """Drain a group, or all ingresses without one; returns at once."""
        limit_s = self._config.serve.drain_timeout_s if timeout_s is None else timeout_s
        await self._change(self._supervisor.drain.remote(limit_s, group))

    async def scale(self, num_ranks: int, group: str | None = None) -> None:
        """Go on with another number of ranks. The name of the group may be left out where there is one group."""
        await self._change(self._supervisor.scale.remote(num_ranks, group))

    async def restart(self, settings: list[str], group: str | None = None) -> None:
        """Replace the processes of a group's ranks, with these settings changed; of all groups without a name."""
        await self._change(self._supervisor.restart.remote(settings, group))

    async def switch_role(self, role: Role, group: str | None = None) -> None:
        """Let a group have another part of requests; returns when new requests of this ingress go by it."""
        await self._change(self._supervisor.switch_role.remote(role, group))
        self._follow(await self._change(self._supervisor.healths.remote()))

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter into all ranks; returns when requests may name it."""
        await self._change(self._supervisor.load_adapter.remote(name, path))
        self._adapters.follow(await self._change(self._supervisor.changed_adapters.remote(None)))

    async def unload_adapter(self, name: str) -> None:
        """Take no more requests for an adapter; open ones end."""
        await self._change(self._supervisor.unload_adapter.remote(name))
        self._adapters.follow(await self._change(self._supervisor.changed_adapters.remote(None)))
        self._report_adapters()

    async def _change(self, call: Awaitable[_Result]) -> _Result:
        try:
            return await call
        except UnknownAdapterError as error:
            raise NotFoundError(failure_message(error), param="lora_name") from error
        except ValueError as error:  # an error of the supervisor too is one of these
            raise BadRequestError(failure_message(error)) from error
        except RayError as error:
            raise EngineDeadError(f"the supervisor does not answer: {error}") from error

    async def drain_requested(self) -> float:
        """Return once the server is to stop: the seconds that requests get to finish."""
        timeout_s: float = await self._supervisor.drain_requested.remote()
        self._stopping = True
        return timeout_s

    async def report_drained(self) -> None:
        """Report to the supervisor that this ingress has no open request."""
        await self._supervisor.drained.remote(self._ingress_id)
