"""Groups that change their ranks, over fake ranks: standbys, fewer ranks, other numbers, new processes, lost disks."""

import asyncio
import errno
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from cluster.supervisor import group, lost_nodes, relocation, roster
from cluster.supervisor.failures import failure_message
from cluster.supervisor.placement import PlacementError
from kernels.host.shm import PeerLeftError
from kernels.routing.expert_map import STANDBY
from tests.unit.ray_fakes import FakeRank, rank_config, until
from tests.unit.test_rebuild import Scene, run
from workers.hub import HubError
from workers.weights.checkpoint_copy import CopyError
from workers.weights.checkpoint_files import CheckpointError


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "STOP_TIMEOUT_S", 0.02)
    monkeypatch.setattr(relocation, "GROW_S", 0.01)
    monkeypatch.setattr(group, "FILES_RETRY_S", 0.01)
    monkeypatch.setattr(lost_nodes, "POLL_S", 0.001)
    monkeypatch.setattr(lost_nodes, "CAPACITY_WAIT_S", 0.02)
    monkeypatch.setattr(roster, "RESTOCK_S", 0.01)


def seats(now: Scene) -> list[tuple[int, int]]:
    """(rank, number of ranks) by which each process joined the present epoch."""
    joins = [process.calls["join_group"][-1] for process in now.ranks]
    assert all(join[0].epoch == now.group.health.epoch for join in joins)
    return [(rank, config.num_ranks) for _, _, _, rank, config in joins]


async def ready(now: Scene, count: int) -> None:
    """Wait until `count` standbys have loaded."""

    def num_ready() -> int:
        return sum(s.ready.done() and not s.ended for s in now.group._roster._standbys)

    await until(lambda: num_ready() == count)


def test_a_standby_takes_the_place_of_a_dead_rank_and_another_one_starts():
    async def scenario() -> None:
        now = Scene(standby_ranks=1)
        await now.serving(0)
        await ready(now, 1)
        (standby,) = now.launcher.standbys
        assert standby.rank == STANDBY and not standby.calls["join_group"]
        now.kill(1)
        await now.serving(1)
        assert now.ranks[1] is standby and now.launcher.replaced == []
        assert seats(now) == [(0, 3), (1, 3), (2, 3)]
        await ready(now, 1)
        assert len(now.launcher.standbys) == 2
        await now.close()

    run(scenario())


def test_a_standby_that_ends_is_replaced(caplog):
    async def scenario() -> None:
        now = Scene(standby_ranks=2)
        await now.serving(0)
        await ready(now, 2)
        now.launcher.standbys[0].died = True
        await until(lambda: len(now.launcher.standbys) == 3)
        await ready(now, 2)
        now.kill(0)
        now.kill(2)
        await now.serving(1)
        assert {now.ranks[0], now.ranks[2]} == set(now.launcher.standbys[1:3])
        await now.close()

    run(scenario())
    assert "a standby rank failed: its process died" in caplog.text


def test_without_a_standby_that_has_loaded_one_that_loads_is_taken():
    async def scenario() -> None:
        now = Scene(standby_ranks=1)
        now.launcher.make = lambda rank: rank.hang.add("prepare")
        await now.serving(0)
        await until(lambda: bool(now.launcher.standbys))
        now.kill(2)
        await now.serving(1)
        assert now.ranks[2] is now.launcher.standbys[0] and now.launcher.replaced == []
        await now.close()

    run(scenario())


def test_without_room_for_a_standby_the_group_serves(caplog):
    async def scenario() -> None:
        now = Scene(standby_ranks=1)
        now.launcher.full = True
        await now.serving(0)
        await until(lambda: "no standby rank (cluster.standby_ranks): no free CPU" in caplog.text)
        now.launcher.full = False
        now.kill(1)
        await now.serving(1)
        assert now.launcher.replaced == [1]
        await ready(now, 1)
        await now.close()

    run(scenario())


def test_more_ranks_start_before_the_pause():
    async def scenario() -> None:
        now = Scene()
        await now.serving(0)
        before = now.ranks
        now.launcher.make = lambda rank: rank.hang.add("prepare")
        change = asyncio.create_task(now.group.change(rank_config(5), "scale to 5 ranks"))
        await until(lambda: bool(now.launcher.standbys))
        assert now.group.health[:3] == ("serving", 0, "")
        for number in range(2):
            await until(lambda number=number: len(now.launcher.standbys) > number)
        for standby in now.launcher.standbys:
            assert not standby.calls["join_group"]
        with pytest.raises(ValueError, match="another change is under way: scale to 5 ranks"):
            await now.group.change(rank_config(4), "scale to 4 ranks")
        change.cancel()
        await asyncio.wait([change])
        assert now.launcher.num_ended == 2, "processes of a change that was given up"
        now.launcher.make = lambda rank: None
        await now.group.change(rank_config(5), "scale to 5 ranks")
        await now.serving(1)
        assert now.ranks[:3] == before and now.ranks[3:] == now.launcher.standbys[2:]
        assert seats(now) == [(rank, 5) for rank in range(5)]
        assert len(now.group.members.infos) == 5
        await now.close()

    run(scenario())


def test_fewer_ranks_and_a_death_afterwards():
    async def scenario() -> None:
        now = Scene()
        await now.serving(0)
        before = now.ranks
        await now.group.change(rank_config(2), "scale to 2 ranks")
        await now.serving(1)
        assert now.ranks == before[:2] and before[2].died
        assert seats(now) == [(0, 2), (1, 2)]
        now.kill(0)
        await now.serving(2)
        assert seats(now) == [(0, 2), (1, 2)] and now.launcher.replaced == [0]
        await now.close()

    run(scenario())


def test_a_change_without_room_leaves_the_group_as_it_is():
    async def scenario() -> None:
        now = Scene()
        await now.serving(0)
        now.launcher.full = True
        with pytest.raises(PlacementError, match="no free CPU"):
            await now.group.change(rank_config(4), "scale to 4 ranks")
        assert now.group.health[:3] == ("serving", 0, "")
        await now.close()

    run(scenario())


@pytest.mark.parametrize("room", [True, False])
def test_new_processes_for_all_ranks(room, caplog):
    """Other settings of a process need a new one: started beside the old ones where there is room."""

    async def scenario() -> None:
        now = Scene(standby_ranks=1)
        await now.serving(0)
        await ready(now, 1)
        before = now.ranks
        other = rank_config(3)
        other = other.model_copy(
            update={"cache": other.cache.model_copy(update={"block_size": 32})}
        )
        start = now.launcher.start

        async def start_rank(rank: int, config: Any, bundle: int) -> Any:
            now.launcher.full = rank == STANDBY and not room and now.group.health.epoch == 0
            return await start(rank, config, bundle)

        now.launcher.start = start_rank
        await now.group.change(other, "restart", anew=True)
        await now.serving(1)
        assert all(process.died for process in before)
        assert now.launcher.replaced == ([] if room else [0, 1, 2])
        assert all(process.calls["join_group"][0][4] == other for process in now.ranks)
        now.kill(1)
        await now.serving(2)
        assert now.ranks[1].calls["join_group"][0][4] == other
        await now.close()

    run(scenario())
    assert ("the ranks end before the new ones start" in caplog.text) != room


def test_a_change_that_fails_is_taken_back():
    async def scenario() -> None:
        now = Scene()
        await now.serving(0)

        def fails(rank: FakeRank) -> None:
            rank.fail["run_stage"] = ValueError("the KV cache has no room")

        now.launcher.make = fails
        with pytest.raises(ValueError, match="the KV cache has no room"):
            await now.group.change(rank_config(4), "scale to 4 ranks")
        await now.serving(2)
        assert seats(now) == [(0, 3), (1, 3), (2, 3)] and now.launcher.replaced == []
        await now.close()

    run(scenario())


def test_a_rank_dies_while_a_change_is_prepared():
    async def scenario() -> None:
        now = Scene()
        await now.serving(0)
        now.launcher.make = lambda rank: rank.hang.add("prepare")
        change = asyncio.create_task(now.group.change(rank_config(4), "scale to 4 ranks"))
        await until(lambda: bool(now.launcher.standbys))
        now.launcher.make = lambda rank: None
        now.kill(1)
        await change
        await now.serving(2)
        assert seats(now) == [(0, 4), (1, 4), (2, 4), (3, 4)]
        await now.close()

    run(scenario())


def test_a_group_shrinks_without_a_replacement_that_starts_and_grows_back():
    async def scenario() -> None:
        now = Scene(shrink=True)
        await now.serving(0)
        before = now.ranks

        def broken(rank: FakeRank) -> None:
            rank.fail["describe"] = ActorDiedError()

        now.launcher.make = broken
        now.kill(1)
        await now.serving(1)
        assert now.ranks == [before[0], before[2]]
        assert seats(now) == [(0, 2), (1, 2)]
        now.kill(0)
        await now.serving(2)
        assert now.ranks == [before[2]] and seats(now) == [(0, 1)]
        now.launcher.make = lambda rank: None
        await until(lambda: len(now.group.members.infos) == 3 and now.group.health.alive)
        assert seats(now) == [(0, 3), (1, 3), (2, 3)] and before[2] in now.ranks
        await now.close()

    run(scenario())


def test_of_equally_many_ranks_those_on_fewer_nodes_stay():
    async def scenario() -> None:
        now = Scene(4, num_nodes=2, shrink=True)
        await now.serving(0)
        before = now.ranks

        def broken(rank: FakeRank) -> None:
            rank.fail["describe"] = ActorDiedError()

        now.launcher.make = broken
        now.kill(3)
        await now.serving(1)
        assert now.ranks == before[:2], "two ranks of one node, not one rank of each node"
        await now.close()

    run(scenario())


def test_a_replacement_that_fails_in_a_stage_is_left_out():
    async def scenario() -> None:
        now = Scene(shrink=True)
        await now.serving(0)

        def broken(rank: FakeRank) -> None:
            rank.fail["join_group"] = RuntimeError("CUDA error: an illegal memory access")

        now.launcher.make = broken
        now.kill(2)
        await now.serving(2)
        assert seats(now) == [(0, 2), (1, 2)] and now.launcher.replaced == [2]
        await now.close()

    run(scenario())


def test_a_group_without_ranks_fails_though_it_may_shrink():
    async def scenario() -> None:
        now = Scene(shrink=True, rebuild_attempts=2)
        await now.serving(0)

        def broken(rank: FakeRank) -> None:
            rank.fail["describe"] = ActorDiedError()

        now.launcher.make = broken
        for rank in range(3):
            now.launcher.handles[rank].dead = True
        now.ranks[0].ended.set_exception(ActorDiedError())
        await now.task
        assert "no rank is left, and no node has room for one" in now.group.health.error

    run(scenario())


@pytest.mark.parametrize(
    "gone",
    [
        CheckpointError("/models/a/model.safetensors cannot be read"),
        HubError("https://huggingface.co cannot be reached"),
        CopyError("model.safetensors cannot be copied from 10.0.0.1 in 3 attempts"),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EMFILE, "Too many open files"),
    ],
    ids=["folder", "Hub", "copy", "space", "descriptors"],
)
def test_files_and_space_for_them_are_waited_for(gone):
    """The attempts do not count, and the reason stands in the state."""

    async def scenario() -> None:
        now = Scene(rebuild_attempts=1)
        await now.serving(0)
        now.launcher.make = lambda rank: rank.fail.update(run_stage=gone)
        now.kill(1)
        await until(lambda: now.group.health.epoch > 4)
        state, _, error = now.group.health[:3]
        assert state == "rebuilding" and error.count(failure_message(gone)) == 1
        assert error.startswith("rank 1: its process died; rebuild failed at stage 'weights'")
        assert now.launcher.replaced == [1], "the process that waits is kept"
        now.ranks[1].fail.clear()
        await until(lambda: now.group.health.state == "serving")
        await now.close()

    run(scenario())


@pytest.mark.parametrize("error", [PeerLeftError("rank 1 left"), TimeoutError("rank 1 is late")])
def test_lost_peers_are_counted_though_their_errors_are_those_of_files(error):
    """Otherwise ranks that end in each rebuild are tried for `start_timeout_s`."""

    async def scenario() -> None:
        now = Scene(rebuild_attempts=1)
        await now.serving(0)
        now.launcher.make = lambda rank: rank.fail.update(run_stage=error)
        now.kill(1)
        await now.task
        assert "after 1 rebuilds in a row" in now.group.health.error

    run(scenario())


def test_a_checkpoint_that_stays_away_fails_the_group():
    async def scenario() -> None:
        now = Scene(rebuild_attempts=1)
        await now.serving(0)
        gone = CheckpointError("/models/a/model.safetensors cannot be read")
        now.launcher.make = lambda rank: rank.fail.update(run_stage=gone)
        now.group._formation.start_timeout_s = 0.3
        now.kill(1)
        await now.task
        assert now.group.health.state == "failed" and str(gone) in now.group.health.error

    run(scenario())
