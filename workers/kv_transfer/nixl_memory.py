"""A node's memory registered with NIXL, and reads from the registered memory of other nodes. Imports no torch.

UCX carries the bytes, over TCP or over InfiniBand. Nothing but the end of the process ends a read that does not end by
itself, so all this belongs into a process of its own. Knows nothing of contents.
"""

import threading
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np

DISTRIBUTION, VERSION = "nixl-cu12", "1.5.1"  # of the extra `nixl`


class NixlStartError(ConnectionError):
    """NIXL cannot use this host's network, as while the cable of its interface is out."""


class ReadFailedError(ConnectionError):
    """A read has failed or was not begun. Bytes may still arrive."""


class Registered(NamedTuple):
    """The registered memory of a process, for the processes of other nodes.

    name   of its agent, unique
    metadata  for `NixlMemory.read`
    base   address of the first byte
    """

    name: str
    metadata: bytes
    base: int


class Run(NamedTuple):
    """Bytes side by side on both nodes, by their offsets in the memories."""

    here: int
    there: int
    length: int


def installed_nixl() -> str | None:
    """Return the version of NIXL that is installed; None where there is none."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return None


def nixl_unfit(found: str | None) -> str | None:
    """Return why NIXL cannot be used where version `found` is installed, and what to do; None where it can."""
    if found == VERSION:
        return None
    state = "is not installed" if found is None else f"{found} is installed, {VERSION} is needed"
    return f"{DISTRIBUTION} {state}; the extra nixl installs it: `pip install 'phalanx[nixl]'`"


def nixl_unavailable() -> str | None:
    """Return why this machine cannot use NIXL, and what to do; None where it can."""
    return nixl_unfit(installed_nixl())


class NixlMemory:
    """`memory`, registered under a unique `name`. Threads may read at once. Raises NixlStartError."""

    def __init__(self, name: str, memory: memoryview):
        from nixl_cu12._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t

        # NIXL's own thread would poll all the time: an idle process took 10 % of a core.
        config = nixl_agent_config(
            enable_prog_thread=False,
            backends=["UCX"],
            sync_mode=nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        try:
            self._agent: Any = nixl_agent(name, config)
        except Exception as error:  # of NIXL's own classes, which derive from Exception
            raise NixlStartError(f"NIXL does not start on this host: {error!r}") from error
        bytes_N = np.frombuffer(memory, dtype=np.uint8)
        base = bytes_N.ctypes.data
        place = [(base, len(bytes_N), 0, "")]
        self._agent.register_memory(self._agent.get_reg_descs(place, "DRAM"))
        self.registered = Registered(name, self._agent.get_agent_metadata(), base)
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def progress(self) -> None:
        """Answer reads of other nodes: over TCP they need this process."""
        self._agent.get_new_notifs()

    def begin_read(self, source: Registered, runs: Sequence[Run]) -> Any:
        """Begin to copy from the memory of `source`; return what `has_ended` takes. Raises ReadFailedError."""
        here = [(self.registered.base + run.here, run.length, 0) for run in runs]
        there = [(source.base + run.there, run.length, 0) for run in runs]
        agent = self._agent
        try:
            with self._lock:
                if source.name not in self._known:
                    agent.add_remote_agent(source.metadata)
                    self._known.add(source.name)
            into, out_of = agent.get_xfer_descs(here, "DRAM"), agent.get_xfer_descs(there, "DRAM")
            handle = agent.initialize_xfer("READ", into, out_of, source.name)
            agent.transfer(handle)
        except Exception as error:  # of NIXL's own classes, which derive from Exception
            raise ReadFailedError(repr(error)) from error
        return handle

    def has_ended(self, handle: Any) -> bool:
        """Return whether all bytes of a read are here. Raises ReadFailedError."""
        try:
            state = self._agent.check_xfer_state(handle)
            if state == "DONE":
                self._agent.release_xfer_handle(handle)
        except Exception as error:
            raise ReadFailedError(repr(error)) from error
        if state == "ERR":
            raise ReadFailedError("NIXL reports an error")
        return bool(state == "DONE")
