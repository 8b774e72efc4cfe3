"""The LoRA adapters of one group: calls to its ranks, and what ranks of the next epoch load."""

import asyncio
from collections.abc import Collection, Sequence

from cluster.supervisor.failures import of_rank
from cluster.supervisor.formation import Formation
from cluster.supervisor.roster import Roster
from workers.lora_config import LoadedAdapter
from workers.rank.rank_info import RankInfo


class GroupAdapters:
    """All methods run in the event loop of the supervisor. A failed call is no failure of the rank."""

    def __init__(self, roster: Roster, formation: Formation):
        self._roster, self._formation = roster, formation

    def hold(self, adapters: Sequence[LoadedAdapter]) -> None:
        """Let the ranks of later epochs load these adapters before they serve."""
        self._formation.adapters = tuple(adapters)

    async def stage(self, adapter: LoadedAdapter) -> list[str]:
        """Let every rank read an adapter beside its steps; return the digests of its files."""
        calls = [rank.stage_adapter.remote(adapter) for rank in self._roster.ranks]
        limit_s = self._formation.start_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                digests = await asyncio.gather(*(of_rank(*pair) for pair in enumerate(calls)))
        except TimeoutError:
            raise ValueError(
                f"not read after {limit_s:g} s; cluster.start_timeout_s allows more"
            ) from None
        return list(digests)

    def drop(self, adapters: Collection[int]) -> None:
        """Let the ranks free adapters. A rank that cannot be reached does so as it joins the next epoch."""
        for rank in self._roster.ranks:
            for adapter in adapters:
                rank.drop_adapter.remote(adapter)

    def check(self, infos: Sequence[RankInfo]) -> None:
        """Raise ValueError for adapters of the configuration that the ranks cannot read."""
        names = {adapter.id: adapter.name for adapter in self._formation.adapters}
        errors = {
            adapter: error for info in infos for adapter, error in info.adapter_errors.items()
        }
        if errors:
            reasons = "; ".join(f"{names[adapter]}: {error}" for adapter, error in errors.items())
            raise ValueError(f"lora.adapters: {reasons}")
