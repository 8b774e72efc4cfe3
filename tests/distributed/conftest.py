"""Fixtures of the distributed tests."""

from tests.distributed.rank_pool import rank_pool

__all__ = ["rank_pool"]
