"""Number of KV blocks that a request may hold. Pure arithmetic."""

from dataclasses import dataclass


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
