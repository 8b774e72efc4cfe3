"""Ranks of the exchanges `symm` and `copy_engine` whose memory lies in one process."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.all2all import symm
from kernels.all2all.payload import RowFormat
from kernels.all2all.peer_memory import HEADER_BYTES
from kernels.all2all.symm import SymmAllToAll
from kernels.block_fp8 import Fp8Rows
from kernels.routing.device_routing import DeviceRouting, route_on_device
from kernels.routing.expert_map import ContiguousMap
from kernels.routing.permute import Permutation


class Memory:
    """As PeerMemory, of ordinary memory; `group.memories` has that of all ranks once they are built."""

    def __init__(self, group: SimpleNamespace, device: torch.device, num_bytes: int):
        self._all = group.memories
        # Bytes that make NaN: what nobody wrote must not count.
        new: dict[str, Any] = {"dtype": torch.uint8, "device": device}
        self.local = torch.full((HEADER_BYTES + num_bytes,), 255, **new)
        self.local[:HEADER_BYTES] = 0
        self._all.append(self.local)

    def of(self, rank: int) -> torch.Tensor:
        return self._all[rank]

    @property
    def bases_r(self) -> torch.Tensor:
        addresses = [memory.data_ptr() for memory in self._all]
        return torch.tensor(addresses, device=self.local.device)


class DeviceOrder(Permutation):
    """Routes as on a GPU."""

    def route(
        self, topk_idx_NK: torch.Tensor, rows: tuple[torch.Tensor, Fp8Rows] | None = None
    ) -> DeviceRouting:
        experts = {"num_experts": self._num_experts}
        return route_on_device(topk_idx_NK, self.experts, **experts, rows=rows)


def build_ranks(
    num_ranks: int,
    num_experts: int,
    row_format: RowFormat,
    max_tokens: int,
    *,
    kind: type[SymmAllToAll] = SymmAllToAll,
    device: str = "cpu",
    num_sms: int = 3,
) -> list[Any]:
    """All ranks, on a device of `num_sms` SMs."""
    expert_map, memories = ContiguousMap(num_experts, num_ranks), []
    where, ranks = torch.device(device), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symm, "PeerMemory", Memory)
        properties = SimpleNamespace(multi_processor_count=num_sms)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        for rank in range(num_ranks):
            group: Any = SimpleNamespace(
                rank=partial(int, rank), size=partial(int, num_ranks), memories=memories
            )
            experts = expert_map.slots_of(rank)
            order = DeviceOrder(experts, num_experts=num_experts, device=where)
            ranks.append(kind(group, expert_map, order, row_format, where, max_tokens))
    return ranks
