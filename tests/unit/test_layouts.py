"""Which ranks a group keeps when nodes or processes are lost: equally many on each node that is left."""

import asyncio

import pytest

from cluster.supervisor import lost_nodes
from cluster.supervisor.placement import PlacementError, resized
from cluster.supervisor.roster import Roster
from kernels.interface.config import KernelsConfig
from tests.unit.ray_fakes import FakeHandle, FakeLauncher, FakeRank, rank_config
from workers.config import RankConfig


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_nodes, "POLL_S", 0.001)
    monkeypatch.setattr(lost_nodes, "CAPACITY_WAIT_S", 0.01)


def unexpected(error: BaseException) -> None:
    """No task of a roster may end by an error here."""
    raise error


class Launcher(FakeLauncher):
    """New processes answer on the nodes in `works`."""

    works: tuple[int, ...] = ()

    async def start(self, rank: int, config: RankConfig, bundle: int) -> FakeHandle:
        handle = await super().start(rank, config, bundle)
        handle.dead = bundle not in self.works
        return handle


def on_nodes(num_ranks: int, num_nodes: int) -> RankConfig:
    return rank_config(num_ranks).model_copy(update={"num_nodes": num_nodes})


@pytest.mark.parametrize(
    ("num_nodes", "dead", "lost", "works", "expected"),
    [
        (3, {2, 3}, {1}, (), [0, 1, 4, 5]),  # a node of three
        (3, {2}, set(), (1,), [0, 1, 6, 3, 4, 5]),  # its process alone, and another starts
        (3, {2}, set(), (), [0, 1, 4, 5]),  # no other starts: two nodes of two, not three of one
        (3, {0, 2, 4}, set(), (), [1, 3, 5]),
        (2, {0, 1}, set(), (), [3, 4, 5]),  # one node of three, not two of one
        (1, {0, 1, 2, 4}, {0}, (), [3, 5]),
    ],
)
def test_the_largest_layout(num_nodes, dead, lost, works, expected):
    """Ranks 0 to 5 at first; a new process has number 6."""

    async def scenario() -> None:
        ranks = [FakeRank(rank) for rank in range(6)]
        launcher = Launcher(ranks)
        launcher.lost, launcher.works = set(lost), works
        subject = Roster(
            launcher, on_nodes(6, num_nodes), lambda facts: (), unexpected, shrink=True
        )
        await subject.launch(1.0)
        await subject.renew([rank not in dead for rank in range(6)], subject.wanted)
        found = [launcher.all.index(handle) for handle in subject.ranks]
        assert found == expected
        assert subject.config.num_ranks == len(expected)
        assert subject.shrunk == (len(expected) < 6)
        ended = {number for number, handle in enumerate(launcher.all) if handle.target.died}
        assert ended.isdisjoint(expected) and dead <= ended
        assert len(launcher.all) - len(ended) == len(expected), "a process is left over"

    asyncio.run(scenario())


def test_all_are_lost():
    async def scenario() -> None:
        launcher = Launcher([FakeRank(rank) for rank in range(2)])
        launcher.lost = {0}
        subject = Roster(launcher, rank_config(2), lambda facts: (), unexpected, shrink=True)
        await subject.launch(1.0)
        with pytest.raises(PlacementError, match="no rank is left"):
            await subject.renew([False, False], subject.wanted)

    asyncio.run(scenario())


def test_one_rank_has_no_all_to_all():
    config = rank_config(4).model_copy(update={"kernels": KernelsConfig(all2all="shm")})
    assert resized(config, num_ranks=2, num_nodes=1).kernels.all2all == "shm"
    one = resized(config, num_ranks=1, num_nodes=1)
    assert one.kernels.all2all == "auto" and one.differs_for_process(config) == []
