"""One rank of `phalanx check --run`: joins a group, builds the all-to-alls and checks them. Loads no model.

Knows nothing of Ray; `cluster.commands.check_exchange` starts one in each rank's place.
"""

import os
from collections.abc import Sequence
from dataclasses import replace

import torch

from kernels.block_fp8 import BLOCK
from kernels.host.cuda_environment import check_multicast_off, share_compiled_kernels
from kernels.host.links import HostNetwork
from kernels.host.shm import SharedMemoryGroup, shared_memory_unavailable
from kernels.interface.backend import BackendShape
from kernels.interface.context import BackendContext
from kernels.interface.registry import backend_class
from kernels.routing.expert_map import ContiguousMap
from workers.config import RankConfig
from workers.rank import process_group
from workers.rank.exchange_check import Measured, check
from workers.rank.network import address_of_host, address_on, bind_to_address
from workers.rank.rank_info import Rendezvous

JOIN_S = 60.0


class ExchangeProbe:
    """One rank, on the node that has `address` in the Ray cluster."""

    def __init__(self, rank: int, config: RankConfig, address: str):
        if config.device == "cuda":
            check_multicast_off(os.environ)
            share_compiled_kernels(os.environ, config.kernels.cache)
        self._rank, self._config = rank, config
        self._address = address_on(config.network) if config.network else address
        bind_to_address(os.environ, self._address)

    def host_rendezvous(self) -> tuple[str, int]:
        """Open the group's rendezvous store, and return its host and port. Called on rank 0 only."""
        self._store = process_group.host_store(self._address)
        return self._store.host, self._store.port

    def join(self, rendezvous: Rendezvous, gpus: Sequence[int | str]) -> None:
        """Join the group. Collective. `gpus`: those visible to this process, its own first."""
        self._rendezvous, dims = rendezvous, self._config.dims
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        self._device = torch.device(self._config.device)
        if self._device.type == "cuda":
            self._device = torch.device("cuda", 0)
            torch.cuda.set_device(self._device)
        else:
            torch.set_num_threads(self._config.threads)
        process_group.join(rendezvous, self._rank, dims, self._device, JOIN_S)

    def refusal(self, name: str) -> str | None:
        """Return why this machine cannot run the all-to-all `name`, or None."""
        reason: str | None = backend_class("all2all", name).unavailable(self._device)
        return reason

    def run(self, name: str, shape: BackendShape, *, fp8: bool) -> list[Measured]:
        """Build the all-to-all, check it, and close it. Collective. fp8: rows travel in FP8."""
        backend, config = backend_class("all2all", name), self._config
        dims, shared = config.dims, None
        shape = replace(shape, fp8_rows=fp8 and backend.fp8_rows)
        if (slots := backend.shared_memory_slots(shape)) and not shared_memory_unavailable():
            node = dims.node(self._rank)
            shared = SharedMemoryGroup(
                f"{self._rendezvous.name}-{name}-{fp8}-{node}",
                dims.local_rank(self._rank),
                dims.ranks_per_node,
                first_rank=dims.ranks_of_node(node).start,
                slot_bytes=slots,
                timeout_s=config.vote_timeout_s,
            )
        context = BackendContext(
            shape=shape,
            device=self._device,
            rank=self._rank,
            group=torch.distributed.group.WORLD,
            shared_memory=shared,
            network=HostNetwork(
                address=address_of_host(config.network, self._rendezvous.host),
                timeout_s=config.vote_timeout_s,
                hang_timeout_s=config.hang_timeout_s,
            ),
            gather=process_group.gather_json,
            expert_map=ContiguousMap(shape.num_experts, shape.num_ranks),
            block_size=config.cache.block_size,
            masked_fp8=fp8,
        )
        place = context.expert_map, self._rank, self._device
        all2all = backend.build(context)
        try:
            with torch.inference_mode():
                return check(all2all, shape, *place, fp8=fp8)
        finally:
            all2all.close()
            if shared is not None:
                shared.close()

    def leave(self) -> None:
        """Leave the group."""
        process_group.leave()


def formats(name: str, shape: BackendShape) -> list[bool]:
    """Return the formats of rows that `name` is checked with: False for the model's dtype, True for FP8."""
    backend = backend_class("all2all", name)
    may_fp8 = shape.dtype == torch.bfloat16 and shape.hidden_size % BLOCK == 0
    return (
        [False, True] if may_fp8 and (backend.fp8_rows or "masked" in backend.layouts) else [False]
    )
