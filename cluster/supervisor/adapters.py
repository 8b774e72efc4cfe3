"""The LoRA adapters of a server: loaded into all ranks or none, listed for the ingresses, dropped after their last use.

Ids of adapters are random, so that no id is given twice: ranks that live on may have cached tokens of adapters that a
restarted supervisor does not list. All groups hold the same adapters; a rank that joins an epoch loads those of its
group before it serves. An adapter that is unloaded takes no new requests; the ranks hold it until no ingress has a
request for it, so that open requests end, also after a rebuild.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence

from cluster.config.resolve import adapter_revision
from cluster.supervisor.failures import failure_message
from cluster.supervisor.group import Group
from cluster.supervisor.saved_state import AdapterState
from workers import hub
from workers.lora_config import AdapterError, LoadedAdapter, LoraConfig

logger = logging.getLogger(__name__)

FIRST_ID = 1 << 32
"""Of adapters that are loaded in service; those of the configuration count from 1."""


class UnknownAdapterError(AdapterError):
    """There is no adapter of this name."""


class ServerAdapters:
    """All methods run in the event loop of the supervisor.

    lora         limits, and `max_loras` 0 if the server takes no adapters
    model_name   which no adapter may have
    ingresses    returns the ids of the ingresses that have a lease
    keep         saves the state
    """

    def __init__(
        self,
        lora: LoraConfig,
        model_name: str,
        groups: Sequence[Group],
        *,
        ingresses: Callable[[], Collection[str]],
        keep: Callable[[], Awaitable[None]],
    ):
        self._lora, self._model_name, self._groups = lora, model_name, groups
        self._ingresses, self._keep = ingresses, keep
        self.state = AdapterState()
        self._unused: dict[int, set[str]] = {}  # ingresses without requests, of retired adapters
        self._changing = asyncio.Lock()
        self._changed = asyncio.Event()
        self._ended = False

    @property
    def listed(self) -> tuple[LoadedAdapter, ...]:
        """The adapters that take requests."""
        return tuple(it for it in self.state.held if it.id not in self.state.retired)

    def begin(self, adapters: Iterable[LoadedAdapter]) -> None:
        """Hold the adapters of the configuration."""
        self._hold(tuple(adapters))

    def recover(self, state: AdapterState) -> None:
        """Continue with what an earlier process of the supervisor has kept."""
        self.state = state
        self._unused = {adapter: set() for adapter in state.retired}
        self._hold(state.held)

    async def changed(self, seen: Sequence[LoadedAdapter]) -> tuple[LoadedAdapter, ...]:
        """Return the listed adapters as soon as they differ from `seen`, or the supervisor ends."""
        while self.listed == tuple(seen) and not self._ended:
            await self._changed.wait()
        return self.listed

    def end(self) -> None:
        """Let all calls of `changed` return: Ray reports calls on the console that a killed actor leaves open."""
        self._ended = True
        self._notify()

    async def load(self, name: str, path: str) -> LoadedAdapter:
        """Load an adapter into all ranks, or into none. Raises AdapterError."""
        async with self._changing:
            self._check(name)
            revision = await self._revision(path)
            number = FIRST_ID + secrets.randbits(48)
            adapter = LoadedAdapter(id=number, name=name, path=path, revision=revision)
            groups = [group for group in self._groups if not group.health.ended]
            before = [group.health for group in groups]
            try:
                await self._stage(adapter, groups)
                if [group.health for group in groups] != before:
                    raise AdapterError("the ranks were rebuilt meanwhile; load the adapter again")
            except BaseException:
                for group in groups:
                    group.adapters.drop([adapter.id])
                raise
            self._hold((*self.state.held, adapter))
            await self._keep()
            logger.info("loaded adapter %s from %s", name, path)
            return adapter

    async def unload(self, name: str) -> None:
        """List an adapter no longer; open requests for it end. Raises UnknownAdapterError."""
        async with self._changing:
            found = [it for it in self.listed if it.name == name]
            if not found:
                raise UnknownAdapterError(f"there is no adapter {name!r}{self._names()}")
            (adapter,) = found
            self.state.retired.add(adapter.id)
            self._unused[adapter.id] = set()
            self._notify()
            await self._keep()
            logger.info("unloaded adapter %s", name)

    async def report(self, ingress_id: str, used: Collection[int]) -> None:
        """Note the adapters that an ingress lists or has open requests for."""
        for adapter, ingresses in self._unused.items():
            if adapter in used:
                ingresses.discard(ingress_id)
            else:
                ingresses.add(ingress_id)
        await self.drop_unused()

    async def drop_unused(self) -> None:
        """Drop the adapters that were unloaded and that no living ingress uses."""
        living = set(self._ingresses())
        if not living:  # they come back, with their open requests, or the server ends
            return
        gone = [it for it, ingresses in self._unused.items() if ingresses >= living]
        if not gone:
            return
        for adapter in gone:
            del self._unused[adapter]
            self.state.retired.discard(adapter)
        self._hold(tuple(it for it in self.state.held if it.id not in gone))
        for group in self._groups:
            group.adapters.drop(gone)
        await self._keep()

    def _check(self, name: str) -> None:
        if not self._lora.max_loras:
            raise AdapterError(
                "this server takes no adapters; start it with lora.max_loras above 0"
            )
        if name == self._model_name or any(it.name == name for it in self.listed):
            raise AdapterError(
                f"the name {name!r} is in use; unload the adapter of this name first"
            )
        limit = self._lora.max_cpu_loras
        if len(self.state.held) >= limit:
            open_ones = len(self.state.retired)
            waits = f", {open_ones} of them unloaded with open requests" if open_ones else ""
            raise AdapterError(
                f"{len(self.state.held)} adapters are loaded{waits}, which is lora.max_cpu_loras; "
                "unload one first"
            )

    async def _revision(self, path: str) -> str | None:
        if not os.path.isabs(path) and not hub.is_name(path):
            raise AdapterError(
                f"{path!r} is neither an absolute path nor a name on the Hub (OWNER/NAME)"
            )
        try:
            return await asyncio.to_thread(adapter_revision, path)
        except hub.HubError as error:
            raise AdapterError(error.reason) from error

    async def _stage(self, adapter: LoadedAdapter, groups: Sequence[Group]) -> None:
        waiting = [group.health for group in groups if not group.health.alive]
        if waiting or not groups:
            state = waiting[0].state if waiting else "failed"
            raise AdapterError(f"the ranks are {state}; load the adapter while they serve")
        try:
            of_groups = await asyncio.gather(*(group.adapters.stage(adapter) for group in groups))
        except Exception as error:
            raise AdapterError(failure_message(error)) from error
        if len({digest for digests in of_groups for digest in digests}) > 1:
            raise AdapterError(f"the ranks read different files in {adapter.path}")

    def _hold(self, adapters: tuple[LoadedAdapter, ...]) -> None:
        self.state.held = adapters
        for group in self._groups:
            group.adapters.hold(adapters)
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _names(self) -> str:
        names = ", ".join(sorted(repr(it.name) for it in self.listed))
        return f"; the adapters are {names}" if names else "; none is loaded"
