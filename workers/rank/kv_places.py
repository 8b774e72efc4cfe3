"""The places to which a rank's KV moves from its device, for the life of the process: connectors and their bindings.

Knows nothing of requests.
"""

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from kernels.host.processes import start_ticks
from workers.config import RankConfig
from workers.kv_cache.caches import CacheMemory
from workers.kv_cache.transfers import BlockTransfers
from workers.kv_transfer.connector import KVConnector
from workers.kv_transfer.contents import CacheContents, compatibility_of
from workers.kv_transfer.host_tier import LEAST_UNIT, STATE_UNIT, HostTier
from workers.kv_transfer.keeper import KeeperConfig
from workers.kv_transfer.nixl_fetcher import NixlFetcher
from workers.rank.network import address_of_host, interface_of
from workers.rank.rank_info import Rendezvous

READY_S = 5.0
"""Time that an epoch with open requests waits for the host tier, so that these are not computed again."""
GIB = 2**30
INFINIBAND, INTERFACES = Path("/sys/class/infiniband"), Path("/sys/class/net")  # UCX looks there


class KVPlaces:
    """The connectors of a rank process. They stay over epochs; each epoch binds them to its caches."""

    def __init__(self) -> None:
        self._host: HostTier | None = None
        self._fetcher: NixlFetcher | None = None

    def connect(self, config: RankConfig, caches: CacheMemory, rendezvous: Rendezvous) -> None:
        """Connect to the node's keeper, early in an epoch: the keeper then finds a rank while this one loads weights.

        Raises ValueError where KV is to be fetched from other nodes and NIXL is not installed.
        """
        cache, store = config.cache, rendezvous.store
        if self._host is not None or not cache.host_memory_gib or not store:
            return
        owner = os.getppid(), start_ticks(os.getppid())
        keeper = KeeperConfig(
            name=keeper_name(store, owner),
            num_bytes=int(cache.host_memory_gib * GIB),
            owner=owner,
            row_bytes=max(LEAST_UNIT, caches.block_bytes or STATE_UNIT),
            disk_path=cache.disk_path,
            disk_bytes=0 if cache.disk_path is None else int(cache.disk_gib * GIB),
            disk_salt=_dates(config.model.folder),
        )
        if cache.transfer == "nixl":
            here = address_of_host(config.network, rendezvous.host)
            self._fetcher = NixlFetcher(keeper, here, ucx_environment(here))
        self._host = HostTier(
            keeper,
            caches.device,
            row_bytes=max(caches.block_bytes, caches.slot_bytes),
            window_blocks=caches.window_blocks,
        )

    def begin(
        self, config: RankConfig, caches: CacheMemory, wake: Callable[[], None], *, wait: bool
    ) -> None:
        """Move KV of these caches until their manager is closed.

        wake   called from any thread when the step loop has something to enter
        wait   for the host tier and the fetcher, for a short time
        """
        connectors: list[KVConnector] = [] if self._host is None else [self._host]
        if not connectors or not config.cache.prefix_caching:
            return
        for connector in connectors:
            connector.on_ended = wake
        if self._fetcher is not None:
            self._fetcher.on_ended = wake
        blocks, states = caches.rows()
        form = compatibility_of({**caches.form, **_model_facts(config)})
        contents = CacheContents(blocks, states, form, caches.device)
        for rows in (blocks, states):
            rows.warm_up()
        caches.manager.transfers = BlockTransfers(
            caches.manager.groups,
            config.cache.block_size,
            caches.num_blocks,
            connectors,
            contents,
            fetcher=self._fetcher,
        )
        if wait:
            self.wait_ready(READY_S)

    def wait_ready(self, timeout_s: float) -> bool:
        """Wait until contents can be found in the host tier, and fetched from other nodes; return whether they can."""
        until = time.monotonic() + timeout_s
        if self._host is not None and not self._host.wait_ready(timeout_s):
            return False
        left = max(0.0, until - time.monotonic())
        return self._fetcher is None or self._fetcher.wait_ready(left)

    def close(self) -> None:
        """Leave the keeper, and release the memory."""
        if self._fetcher is not None:
            self._fetcher.close()
            self._fetcher = None
        if self._host is not None:
            self._host.close()
            self._host = None


def keeper_name(store: str, owner: tuple[int, int]) -> str:
    """Return the name of the keeper of a server's ranks on this node.

    Servers of one machine that have a Ray of their own each may have equal `store`s, but not one process that starts
    ranks: with one keeper, each server would empty the memory of the other.
    """
    return hashlib.blake2b(repr((store, *owner)).encode(), digest_size=16).hexdigest()


def ucx_environment(address: str) -> dict[str, str]:
    """Return variables that let UCX use the interface of `address`, on a host without InfiniBand.

    UCX otherwise takes any interface, such as the bridge of a container runtime, which has one address on all nodes.
    """
    interface = interface_of(address)
    if interface is None or not (INTERFACES / interface).exists() or any(INFINIBAND.glob("*")):
        return {}
    return {"UCX_NET_DEVICES": interface}


def _model_facts(config: RankConfig) -> dict[str, object]:
    """Return what KV depends on in the configuration and the files of the checkpoint; equal on all nodes."""
    model, folder = config.model, config.model.folder
    sizes = {path.name: path.stat().st_size for path in _weight_files(folder)}
    speculation = config.speculation
    return {
        "config": hashlib.blake2b((folder / "config.json").read_bytes()).hexdigest(),
        "weights": model.weights if model.weights == "dummy" else sizes,
        "routing": model.routing.model_dump(),
        "cache": (config.cache.block_size, config.cache.dtype, config.cache.state_dtype),
        "draft": (speculation.method, speculation.draft_model),
    }


def _dates(folder: Path) -> str:
    """Return the times of the weights' files: files of KV outlive servers, and a checkpoint may change in its place."""
    return repr([(path.name, path.stat().st_mtime_ns) for path in _weight_files(folder)])


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))
