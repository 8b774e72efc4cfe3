"""The connections of a rank to the other ranks of its epoch. Knows nothing of models, caches or the engine."""

import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from kernels.host.links import HostNetwork
from kernels.host.shm import SharedMemoryGroup, shared_memory_unavailable
from workers.rank import process_group
from workers.rank.device_memory import memory_for
from workers.rank.network import address_of_host
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous
from workers.step.step_sync import compare_settings


@dataclass
class Peers:
    """What connects a rank with its peers.

    warm            every rank has compiled its kernels in an earlier epoch
    shared_memory   of the ranks of this host, for votes and the all-to-all; None where it is unavailable
    network         to the ranks of other hosts; None without peers
    """

    warm: bool
    shared_memory: SharedMemoryGroup | None = None
    network: HostNetwork | None = None

    def gather(self, value: Any) -> Sequence[Any]:
        """Return the value of every rank as JSON carries it, in rank order. Collective."""
        return [value] if self.network is None else process_group.gather_json(value)


def meet(
    process: RankProcess,
    rendezvous: Rendezvous,
    timeout_s: float,
    left: threading.Event,
    closing: ExitStack,
) -> Peers:
    """Join the process group; compare settings; take the KV blocks that peers of earlier epochs have measured.

    What is opened is closed by `closing`. Raises ValueError if the settings of two ranks differ.
    """
    if process.dims.alone:
        return Peers(process.warm)
    with memory_for("the ranks' group"):
        closing.callback(process_group.leave)
        process_group.join(rendezvous, process.rank, process.dims, process.device, timeout_s, left)
    sizes = process.caches.num_blocks, process.caches.num_snapshots
    found = process_group.gather_json((process.settings(), process.warm, sizes))
    settings, warm, of_ranks = zip(*found, strict=True)
    compare_settings(settings)
    process.caches.take_sizes(*max(of_ranks))
    shared = _share_memory(process, rendezvous, left)
    if shared is not None:
        closing.callback(shared.close)
    network = HostNetwork(
        address=address_of_host(process.config.network, rendezvous.host),
        timeout_s=process.config.vote_timeout_s,
        hang_timeout_s=process.config.hang_timeout_s,
        left=left,
    )
    return Peers(all(warm), shared, network)


def _share_memory(
    process: RankProcess, rendezvous: Rendezvous, left: threading.Event
) -> SharedMemoryGroup | None:
    if shared_memory_unavailable():
        return None
    dims = process.dims
    node = dims.node(process.rank)
    return SharedMemoryGroup(
        f"{rendezvous.name}-{node}",
        dims.local_rank(process.rank),
        dims.ranks_per_node,
        first_rank=dims.ranks_of_node(node).start,
        slot_bytes=process.selection.all2all_class.shared_memory_slots(process.shape),
        timeout_s=process.config.vote_timeout_s,
        left=left,
    )
