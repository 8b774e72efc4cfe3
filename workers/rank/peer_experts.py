"""The experts' weights of the other ranks of this host, mapped to be copied from.

A rank reads a peer's weights of a layer while a move of this layer is staged. No rank overwrites them before all ranks
have voted that they have staged the layer, and no rank begins before all have in place what a move before has brought.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from kernels.host.shared_gpu_tensors import GpuMappings
from kernels.host.shared_tensors import open_shared
from workers.parallel import ParallelDims
from workers.rank.expert_transfers import Transfer, transfers
from workers.specs.expert_layout import ExpertLayout

logger = logging.getLogger(__name__)

Handles = dict[str, list[dict[str, Any]]]  # JSON: by number of the layer
Source = Callable[[int, torch.Tensor], None]
"""Copies the weights of a slot of a peer into a tensor."""


class PeerExperts:
    """The peers of `rank` with weights that could be mapped. `copied` counts the experts that were copied."""

    def __init__(
        self,
        rank: int,
        weights: dict[int, dict[int, list[Source]]],
        hosts: Sequence[int] = (),
        unmap: Callable[[], None] = lambda: None,
    ):
        """weights   by rank and layer, one for each tensor with a first axis of the rank's slots
        hosts     of each rank
        """
        self._rank, self._weights, self._hosts, self._unmap = rank, weights, hosts, unmap
        self.copied = 0

    @classmethod
    def meet(
        cls,
        rank: int,
        dims: ParallelDims,
        device: torch.device,
        own: Handles,
        gather: Callable[[Any], Sequence[Any]],
    ) -> "PeerExperts":
        """Exchange the handles of all ranks, and map those of this host. Collective."""
        found = gather(own)
        mappings = GpuMappings(device)
        open_one = _open_cpu if device.type == "cpu" else partial(_open_gpu, mappings)
        weights: dict[int, dict[int, list[Source]]] = {}
        for peer in dims.peers(rank):
            if dims.node(peer) != dims.node(rank) or not found[peer]:
                continue
            try:
                weights[peer] = {
                    int(layer): [open_one(handle) for handle in handles]
                    for layer, handles in found[peer].items()
                }
            except OSError as error:
                logger.warning("experts of rank %d come from the checkpoint: %s", peer, error)
        hosts = [dims.node(peer) for peer in range(dims.num_ranks)]
        return cls(rank, weights, hosts, mappings.close)

    def transfers(
        self, layer: int, slots: tuple[int, ...], layout: ExpertLayout
    ) -> Iterator[Transfer]:
        """Yield what this rank reads from mapped peers for a new map of a layer, in its order."""
        if self._weights:
            before = layout.layers[layer].slots
            for transfer in transfers(before, slots, layout.starts, self._hosts):
                if transfer.target == self._rank and transfer.source in self._weights:
                    yield transfer

    def copy(self, layer: int, transfer: Transfer, target: Sequence[torch.Tensor]) -> None:
        """Copy the weights of an expert, on the current stream of a GPU.

        target   views of one slot, as many as the layer's tensors
        """
        sources = self._weights[transfer.source][layer]
        for copy_slot, new in zip(sources, target, strict=True):
            copy_slot(transfer.place, new)
        self.copied += 1

    def close(self) -> None:
        """Unmap the weights of the peers."""
        self._weights = {}
        self._unmap()


def _open_cpu(handle: dict[str, Any]) -> Source:
    tensor = open_shared(handle)

    def copy_slot(slot: int, target: torch.Tensor) -> None:
        target.copy_(tensor[slot])

    return copy_slot


def _open_gpu(mappings: GpuMappings, handle: dict[str, Any]) -> Source:
    return mappings.open(handle).copy_slot
