"""The end of a change of a group that ends itself, over fake ranks."""

import asyncio
from typing import Any

import pytest

from cluster.supervisor import group
from cluster.supervisor.change import ChangeError
from tests.unit.ray_fakes import rank_config, until
from tests.unit.test_rebuild import Scene, run


@pytest.fixture(autouse=True)
def short_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "STOP_TIMEOUT_S", 0.02)  # the fakes' loops do not end by a stop


@pytest.mark.parametrize("full", [False, True])
def test_a_change_names_the_end_of_the_group_as_its_reason(full):
    """The launcher finds no room once the group has ended, and standbys end with it."""

    async def scenario() -> None:
        now = Scene()
        await now.serving(0)
        started = asyncio.Event()
        start = now.launcher.start

        async def start_rank(rank: int, config: Any, bundle: int) -> Any:
            started.set()
            if full:
                await until(lambda: now.launcher.killed > 0)
                now.launcher.full = True
            return await start(rank, config, bundle)

        now.launcher.start = start_rank
        now.launcher.make = lambda rank: rank.hang.add("prepare")
        change = asyncio.create_task(now.group.change(rank_config(4), "scale to 4 ranks"))
        await started.wait()
        await now.close()
        with pytest.raises(ChangeError, match="the server is stopping"):
            await change

    run(scenario())
