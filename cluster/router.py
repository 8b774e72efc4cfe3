"""Which rank gets the next request. Pure policy: local counts only, no Ray, no clock, no I/O.

A rank's load is the number of tokens handed to it and not yet released. The count is this
ingress's own and exact, so a burst cannot pile up on one rank while a broadcast is on its way.
"""


class Router:
    """Least outstanding tokens, ties in round-robin order."""

    def __init__(self, num_ranks: int) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks: needs at least 1, got {num_ranks}")
        self._outstanding = [0] * num_ranks
        self._next = 0  # where the search starts, so equal ranks take turns

    @property
    def outstanding(self) -> tuple[int, ...]:
        """Outstanding tokens by rank."""
        return tuple(self._outstanding)

    def pick(self, num_tokens: int, pinned: int | None = None) -> int:
        """Choose a rank for work of `num_tokens` (prompt plus expected output), or take `pinned`, and count it."""
        assert num_tokens >= 0, f"num_tokens = {num_tokens}"
        num_ranks = len(self._outstanding)
        rank = pinned
        if rank is None:
            order = ((self._next + i) % num_ranks for i in range(num_ranks))
            rank = min(order, key=self._outstanding.__getitem__)  # the first of equals
            self._next = (rank + 1) % num_ranks
        self._outstanding[rank] += num_tokens
        return rank

    def release(self, rank: int, num_tokens: int) -> None:
        """Take back tokens of `rank`: all of a request when it ends, or some as they are done."""
        left = self._outstanding[rank] - num_tokens
        assert num_tokens >= 0 and left >= 0, (
            f"rank {rank} has {self._outstanding[rank]} outstanding tokens, release of {num_tokens}"
        )
        self._outstanding[rank] = left
