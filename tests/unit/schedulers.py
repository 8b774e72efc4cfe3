"""Schedulers over caches without tensors, and what tests read of the groups of a cache."""

from typing import Any

import numpy as np

from workers.config import SchedulerConfig
from workers.kv_cache.block_groups import FullGroup
from workers.kv_cache.manager import KVCacheManager
from workers.kv_cache.state_group import StateGroup
from workers.kv_cache.state_snapshots import StateSnapshots
from workers.scheduler.scheduler import Scheduler
from workers.step.sequence import InputBatch, Sequence


def make_scheduler(
    config: SchedulerConfig | None = None,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_model_len: int = 64,
    cache: KVCacheManager | None = None,
    **kinds: Any,
) -> Scheduler:
    """A scheduler over `cache`, or over a new one with these `kinds` of layers (see KVCacheManager)."""
    config = config or SchedulerConfig()
    sizes = {"num_blocks": num_blocks, "block_size": block_size, "max_model_len": max_model_len}
    return Scheduler(config, cache or KVCacheManager(config, **sizes, **kinds), max_model_len)


def group_of(cache: KVCacheManager, kind: type[Any]) -> Any:
    """The group of this kind; None: the cache has none."""
    return next((group for group in cache.groups if type(group) is kind), None)


def snapshots_of(cache: KVCacheManager) -> StateSnapshots | None:
    """The snapshots of states, if layers have states."""
    group = group_of(cache, StateGroup)
    return group and group.snapshots


def blocks_of(scheduler: Scheduler, seq: Any, kind: type[Any] = FullGroup) -> list[int]:
    """The blocks that a sequence holds for layers of this kind."""
    group = group_of(scheduler.cache, kind)
    return group.held[seq].ids if group is not None and seq in group.held else []


def append_token(table: InputBatch, seq: Sequence, token_id: int) -> None:
    """Append a token to `seq`, as a commit does."""
    seq.token_ids.append(token_id)
    table.committed([seq], [1], [token_id], np.array([1]))
