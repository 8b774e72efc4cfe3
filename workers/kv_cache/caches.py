"""Sizes, bytes and tensors of the caches of a rank process, for all its epochs. Knows nothing of requests."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from kernels.backends.select import Selection
from kernels.interface.backend import BackendShape
from kernels.interface.kv_layout import KVGroup, kv_block_bytes
from kernels.linear_attention.base import LinearStates
from workers.config import RankConfig
from workers.kv_cache.demand import KVDemand
from workers.kv_cache.manager import KVCacheManager
from workers.kv_cache.state_snapshots import StateSnapshots
from workers.kv_transfer.contents import Rows, block_pieces, state_pieces


class CacheMemory:
    """The caches of a rank process, in the layouts of its backends.

    device          of the caches
    demand          the KV blocks that a request needs
    block_bytes     bytes of one KV block of all layers
    slot_bytes      bytes of the states of one sequence; 0 without linear attention
    draft_bytes     bytes that one sequence takes beside its states, for drafts that a step verifies
    num_blocks      KV blocks of every rank, 0 until the first epoch has sized the cache
    num_snapshots   states of prefixes of every rank; 0 until then, if they are measured
    kv_caches       one tensor a layer with KV blocks, allocated once
    draft_caches    those of a draft model's layers, with the same numbers of blocks
    states          the pools of states, one a layer of linear attention, allocated once
    manager         the memory of sequences with its contents: the prefix cache of all epochs
    """

    def __init__(
        self,
        config: RankConfig,
        selection: Selection,
        shape: BackendShape,
        window: int | None,
        device: torch.device,
        draft_groups: Sequence[KVGroup] = (),
    ):
        """draft_groups: layers of a draft model, over all tokens."""
        self._window, self.device, self._draft_groups = window, device, draft_groups
        self.configure(config, selection, shape)
        self.num_blocks, self.num_snapshots = 0, config.cache.num_snapshots or 0
        self.kv_caches: list[torch.Tensor] = []
        self.draft_caches: list[torch.Tensor] = []
        self.states: list[LinearStates] = []
        self.manager = self.new_manager(0)

    def configure(self, config: RankConfig, selection: Selection, shape: BackendShape) -> None:
        """Use the layouts of these backends from now on."""
        size, dtype = config.cache.block_size, shape.dtype
        self._config, self._specs, self._dtype = config, shape.linear_specs, dtype
        self._linear = selection.linear_attention_class
        self._kv_groups = selection.attention_class.kv_groups(shape.attention_specs)
        self.demand = KVDemand(size, self._window, config.scheduler.max_num_batched_tokens)
        groups = (*self._kv_groups, *self._draft_groups)
        self.block_bytes = kv_block_bytes(groups, size, dtype.itemsize)
        self.slot_bytes = self.draft_bytes = 0
        if self._linear is not None:
            self.slot_bytes = self._linear.slot_bytes(self._specs, dtype)
            self.draft_bytes = self._linear.draft_bytes(self._specs, dtype)

    def take_sizes(self, num_blocks: int, num_snapshots: int) -> None:
        """Use these numbers of KV blocks and snapshots; other numbers of snapshots take new pools of states."""
        if num_snapshots != self.num_snapshots:
            self.states = []
        self.num_blocks, self.num_snapshots = num_blocks, num_snapshots

    def new_kv_caches(self, num_blocks: int) -> list[torch.Tensor]:
        """Return new KV caches, one a layer."""
        size = self._config.cache.block_size
        return allocate_kv_caches(self._kv_groups, num_blocks, size, self._dtype, self.device)

    def new_draft_caches(self, num_blocks: int) -> list[torch.Tensor]:
        """Return new KV caches of the draft model, one a layer; none without one."""
        size = self._config.cache.block_size
        return allocate_kv_caches(self._draft_groups, num_blocks, size, self._dtype, self.device)

    def state_pools(self) -> list[LinearStates]:
        """Return the pools of states, allocated at the first call; none for a model without linear attention."""
        if self._linear is not None and not self.states:
            place = self._num_slots, self._dtype, self.device
            self.states = self._linear.allocate(self._specs, *place, num_rows=self._num_rows)
        return self.states

    def allocate(self) -> None:
        """Allocate the KV caches of `num_blocks` blocks, without contents."""
        self.kv_caches = self.new_kv_caches(self.num_blocks)
        self.draft_caches = self.new_draft_caches(self.num_blocks)
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """Take a manager of a cache without contents."""
        self.manager = self.new_manager(self.num_blocks)

    def new_manager(self, num_blocks: int) -> KVCacheManager:
        """Return a manager of `num_blocks` KV blocks without contents, and without snapshots of states."""
        config, snapshots = self._config, None
        if self.slot_bytes:  # behind the slots of padding and of rows
            snapshots = StateSnapshots(
                self._num_rows, self.num_snapshots, slot_bytes=self.slot_bytes
            )
        return KVCacheManager(
            config.scheduler,
            num_blocks=num_blocks,
            block_size=config.cache.block_size,
            max_model_len=int(config.model.max_model_len),
            prefix_caching=config.cache.prefix_caching,
            window=self._window,
            snapshots=snapshots,
        )

    def rows(self) -> tuple[Rows, Rows]:
        """Return the contents of blocks and of slots of states as rows, once all caches are allocated."""
        size, value_bytes = self._config.cache.block_size, self._dtype.itemsize
        place = self.num_blocks, size, value_bytes
        blocks = [
            *block_pieces(self._kv_groups, self.kv_caches, *place),
            *block_pieces(self._draft_groups, self.draft_caches, *place),
        ]
        return Rows(blocks), Rows(state_pieces(self.states))

    @property
    def form(self) -> dict[str, str]:
        """What the contents of blocks and states depend on beside model and precision, for comparisons."""
        groups = (*self._kv_groups, *self._draft_groups)
        return {"groups": repr(groups), "states": repr(self._specs), "dtype": str(self._dtype)}

    @property
    def window_blocks(self) -> int:
        """Blocks that a window behind a whole number of blocks touches; 0: no layer has one."""
        if self._window is None:
            return 0
        return -(-(self._window - 1) // self._config.cache.block_size)

    def free(self) -> None:
        """Release all tensors."""
        self.kv_caches, self.draft_caches, self.states = [], [], []

    @property
    def state_bytes(self) -> int:
        """Bytes of all pools of states."""
        return self._num_slots * self.slot_bytes + self._num_rows * self.draft_bytes

    @property
    def _num_rows(self) -> int:
        """The slots of padding and of running sequences, the first ones of each pool of states."""
        return 1 + self._config.scheduler.max_num_seqs

    @property
    def _num_slots(self) -> int:
        """The slots of each pool of states: of padding, running sequences and snapshots."""
        return self._num_rows + self.num_snapshots


def allocate_kv_caches(
    groups: Sequence[KVGroup],
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[torch.Tensor]:
    """Return a zeroed tensor for each layer, in the shape of its layout; `groups` hold every layer once.

    Layers that share a cache get the same tensor.
    """
    caches: dict[int, torch.Tensor] = {}
    for group in groups:
        for layers in group.caches:
            of_layout = torch.uint8 if group.layout.in_bytes else dtype
            shared = _zeros(group.layout.shape(num_blocks, block_size), of_layout, device)
            caches |= dict.fromkeys(layers, shared)
    return [caches[layer] for layer in range(len(caches))]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # numpy's zeros take memory when they are first written; torch's take all of it at once.
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
