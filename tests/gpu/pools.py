"""Processes of ranks on GPUs that are kept from case to case, with torch, CUDA and compiled kernels in them."""

from typing import Any

from tests.distributed.rank_pool import RankError, RankPool


class Pools:
    """A RankPool of its own for each number of ranks.

    torch numbers a process's meetings over symmetric memory, and ranks whose numbers differ never meet
    (pytorch/pytorch#196082). So those that ran without the others must not meet them later.
    """

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def run(self, fn: Any, num_ranks: int, *args: Any, **options: Any) -> list[Any]:
        """As RankPool.run. Who failed may have left its GPU waiting for another one, so all are replaced then."""
        pool = self._pools.setdefault(num_ranks, RankPool(num_ranks))
        try:
            return pool.run(fn, num_ranks, *args, **options)
        except RankError:
            pool.close()
            raise

    def close(self) -> None:
        """End all processes."""
        for pool in self._pools.values():
            pool.close()
