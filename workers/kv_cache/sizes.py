"""Numbers of KV blocks and snapshots of states that given bytes hold. Pure arithmetic."""

from workers.config import FEW_SNAPSHOTS, CacheConfig
from workers.kv_cache.demand import KVDemand


def sizes_that_fit(
    free: int,
    cache: CacheConfig,
    demand: KVDemand,
    max_model_len: int,
    *,
    block_bytes: int,
    slot_bytes: int,
    num_rows: int,
) -> tuple[int, int]:
    """Return KV blocks and snapshots of states in `free` bytes.

    The states of `num_rows` sequences and of configured snapshots lie beside them. Where no layer has blocks, there are
    as many as all sequences count.
    """
    longest, snapshots = demand.blocks(max_model_len), cache.num_snapshots
    if not block_bytes:
        return longest * num_rows, FEW_SNAPSHOTS if snapshots is None else snapshots
    if snapshots is not None or not slot_bytes:
        return free // block_bytes, snapshots or 0
    return split_memory(
        free,
        block_bytes=block_bytes,
        slot_bytes=slot_bytes,
        num_rows=num_rows,
        usual=demand.blocks(min(cache.expected_tokens, max_model_len)),
        longest=longest,
    )


def split_memory(
    free: int, *, block_bytes: int, slot_bytes: int, num_rows: int, usual: int, longest: int
) -> tuple[int, int]:
    """Return the number of KV blocks and of snapshots of states that `free` bytes hold.

    The states of `num_rows` running sequences have memory of their own. The free bytes are divided so that as many
    usual requests as possible have their KV blocks and one state each, in the form of a snapshot if they no longer run.

    usual, longest   KV blocks of a usual request, and of the longest request; the snapshots leave at least `longest`
    """
    requests = (free + num_rows * slot_bytes) // (slot_bytes + usual * block_bytes)
    most = (free - longest * block_bytes) // slot_bytes
    snapshots = max(0, min(max(FEW_SNAPSHOTS, requests - num_rows), most))
    return (free - snapshots * slot_bytes) // block_bytes, snapshots
