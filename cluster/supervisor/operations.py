"""Changes of groups that operators request in service: the number of ranks, settings of the ranks, roles.

What a change makes of a group is kept for the next process of the supervisor. Knows nothing of ingresses.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection

from cluster.config.changes import RESTART, SCALE, changed_config
from cluster.config.check_pool import check_hand_overs
from cluster.config.errors import ConfigError
from cluster.config.phalanx_config import PhalanxConfig, Role
from cluster.config.resolve import check_num_ranks, resolve_rank_config
from cluster.supervisor.group import Group
from cluster.supervisor.placement import num_gpus
from cluster.supervisor.pool import ModelPool
from cluster.supervisor.saved_state import PoolState
from workers.config import RankConfig
from workers.models.registry import configured_model


class Operations:
    """The changes of one server's groups.

    config  of the server's start
    state   gets the changes that were made; the owner may replace it
    keep    saves the state
    """

    def __init__(
        self,
        config: PhalanxConfig,
        pool: ModelPool,
        state: PoolState,
        keep: Callable[[], Awaitable[None]],
    ):
        self.state = state
        self._config, self._pool, self._keep = config, pool, keep

    async def scale(self, num_ranks: int, name: str | None) -> None:
        """Bring a group to another number of ranks. Raises ValueError if that is impossible."""
        settings = [f"cluster.ranks={num_ranks}"]
        reason = f"scaling to {num_ranks} ranks"
        await self._change(self._pool.only(name), settings, SCALE, reason, anew=False)

    async def restart(self, settings: list[str], name: str | None) -> None:
        """Replace the processes of a group's ranks, with these settings (as in --set).

        Without a name all groups restart, one after another. Raises ValueError if that is impossible.
        """
        what = f" with {', '.join(settings)}" if settings else ""
        for group in self._pool.named(name):
            await self._change(group, settings, RESTART, f"restarting the ranks{what}", anew=True)

    async def switch_role(self, role: Role, name: str | None) -> None:
        """Let a group have another part of new requests; its open requests go on.

        Raises ValueError if the group has ended or no other group would answer, and ConfigError for settings with
        which no prompt can be handed over.
        """
        group = self._pool.only(name)
        if role == "prefill":
            model = await asyncio.to_thread(configured_model, self._config.model)
            if problems := list(check_hand_overs(self._config, model)):
                raise ConfigError.of(f"group {group.spec.name!r} cannot have this role", problems)
        self._pool.switch_role(group, role)
        self.state.of(group.spec.name).role = role
        await self._keep()

    async def _change(
        self,
        group: Group,
        settings: list[str],
        allowed: Collection[str],
        reason: str,
        *,
        anew: bool,
    ) -> None:
        kept = self.state.of(group.spec.name)
        present = group.spec.config if kept.config is None else kept.config
        config = await asyncio.to_thread(changed_config, present, settings, allowed)
        check_num_ranks(config)
        ranks, device = resolve_on_cluster(config), group.spec.ranks.device
        if ranks.device != device:
            raise ValueError(f"the ranks would run on {ranks.device} instead of {device}")
        await group.change(ranks, reason, anew=anew)
        kept.config = config
        await self._keep()


def resolve_on_cluster(config: PhalanxConfig) -> RankConfig:
    """The settings of a group's ranks. The supervisor holds no GPU, so it sees none: Ray counts the cluster's."""
    return resolve_rank_config(config, num_gpus=num_gpus())
