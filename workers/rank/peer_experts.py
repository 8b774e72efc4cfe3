"""The experts' weights of the other ranks of this host, mapped to be copied from; on CPUs alone.

A rank reads a peer's weights of a layer while a move of this layer is staged. No rank overwrites them before all ranks
have voted that they have staged the layer.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels.host.shared_tensors import Handle, open_shared
from workers.parallel import ParallelDims
from workers.specs.expert_layout import ExpertLayout

logger = logging.getLogger(__name__)

Handles = dict[str, list[Handle]]  # JSON: by number of the layer


class PeerExperts:
    """The peers of `rank` with weights that could be mapped. `copied` counts the experts that were copied."""

    def __init__(self, rank: int, weights: dict[int, dict[int, list[torch.Tensor]]]):
        """weights   by rank and layer: tensors with a first axis of the rank's slots"""
        self._rank, self._weights = rank, weights
        self.copied = 0

    @classmethod
    def meet(
        cls, rank: int, dims: ParallelDims, own: Handles, gather: Callable[[Any], Sequence[Any]]
    ) -> "PeerExperts":
        """Exchange the handles of all ranks, and map those of this host. Collective."""
        found = gather(own)
        weights: dict[int, dict[int, list[torch.Tensor]]] = {}
        for peer in dims.peers(rank):
            if dims.node(peer) != dims.node(rank) or not found[peer]:
                continue
            try:
                weights[peer] = {
                    int(layer): [open_shared(handle) for handle in handles]
                    for layer, handles in found[peer].items()
                }
            except OSError as error:
                logger.warning("experts of rank %d come from the checkpoint: %s", peer, error)
        return cls(rank, weights)

    def copy(
        self, layer: int, expert: int, layout: ExpertLayout, target: Sequence[torch.Tensor]
    ) -> bool:
        """Copy the weights of an expert from a peer that holds it in `layout`; return False if none does.

        target   views of one slot, as many as the layer's tensors
        """
        slots = layout.layers[layer].slots
        places = [slot for slot, held in enumerate(slots) if held == expert]
        holders = [(self._owner(layout, slot), slot) for slot in places]
        known = [(peer, slot) for peer, slot in holders if peer in self._weights]
        if not known:
            return False
        peer, slot = known[(self._rank + expert) % len(known)]
        place = slot - layout.starts[peer]
        for new, source in zip(target, self._weights[peer][layer], strict=True):
            new.copy_(source[place])
        self.copied += 1
        return True

    def _owner(self, layout: ExpertLayout, slot: int) -> int:
        return next(rank for rank, end in enumerate(layout.starts[1:]) if slot < end)

    def close(self) -> None:
        """Unmap the weights of the peers."""
        self._weights = {}
