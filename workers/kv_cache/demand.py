"""KV blocks that a request may hold, and KV blocks and snapshots of states that given bytes hold. Pure arithmetic."""

from dataclasses import dataclass

from workers.config import FEW_SNAPSHOTS, CacheConfig


@dataclass(frozen=True)
class KVDemand:
    """Demand for blocks of `block_size` tokens.

    window       largest window of a layer; None: all layers read all tokens
    step_tokens  most tokens of a step: while it runs, layers with a window hold its tokens and the window before them
    """

    block_size: int
    window: int | None = None
    step_tokens: int = 0

    def blocks(self, num_tokens: int) -> int:
        """Return the most blocks that a request holds until it has `num_tokens` tokens."""
        whole = self._ceil(num_tokens)
        return whole + min(whole, self.window_blocks)

    def tokens(self, num_blocks: int) -> int:
        """Return the tokens of the longest request that `num_blocks` blocks serve."""
        half = num_blocks // 2 if self.window is not None else 0
        return max(half, num_blocks - self.window_blocks) * self.block_size

    @property
    def window_blocks(self) -> int:
        """Most blocks of a request for layers with a window."""
        if self.window is None:
            return 0
        return self._ceil(self.window - 1 + self.step_tokens) + 1

    def _ceil(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


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

    The states of `num_rows` sequences and of configured snapshots have memory of their own. Other free bytes are
    divided so that as many usual requests as possible have their KV blocks and one state each, in the form of a
    snapshot if they no longer run; the longest request fits. Where no layer has blocks, there are as many as all
    sequences count.
    """
    longest, snapshots = demand.blocks(max_model_len), cache.num_snapshots
    if not block_bytes:
        return longest * num_rows, FEW_SNAPSHOTS if snapshots is None else snapshots
    if snapshots is None and slot_bytes:
        usual = demand.blocks(min(cache.expected_tokens, max_model_len))
        requests = (free + num_rows * slot_bytes) // (slot_bytes + usual * block_bytes)
        most = (free - longest * block_bytes) // slot_bytes
        snapshots = max(0, min(max(FEW_SNAPSHOTS, requests - num_rows), most))
        free -= snapshots * slot_bytes
    return free // block_bytes, snapshots or 0
