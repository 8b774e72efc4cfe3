"""What a restarted supervisor makes of the ranks that it finds."""

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from cluster.supervisor import recovery
from cluster.supervisor.heartbeat import Heartbeats
from kernels.routing.expert_map import STANDBY
from tests.unit.ray_fakes import fake_group, rank_config
from workers.rank.rank_info import Membership, RankInfo


def member(rank: int, epoch: int, *, fence: int = 0, serves: bool = True) -> Any:
    info = RankInfo(rank, {}, 8, 16, 64) if serves else None
    return f"actor {rank} of {epoch}", Membership(rank, epoch, fence, info, (f"s{rank}",))


def test_recovery_takes_ranks_of_one_epoch_only():
    two = rank_config(2)
    whole = recovery.recover([member(1, 3), member(0, 3), member(1, 2)], two)
    assert whole.seats == {0: "actor 0 of 3", 1: "actor 1 of 3"} and not whole.reason
    assert [info.rank for info in whole.infos] == [0, 1] and whole.epoch == 3
    assert whole.streams == {"s0", "s1"}
    fenced = recovery.recover([member(0, 3), member(1, -1, fence=4, serves=False)], two)
    assert fenced.epoch == 4 and fenced.reason.endswith("rank 0, 1 did not serve")
    late = recovery.recover([member(1, -1, fence=4, serves=False), member(0, 3), member(1, 3)], two)
    assert late.seats == {0: "actor 0 of 3", 1: "actor 1 of -1"}, "the actor with the newest fence"
    split = recovery.recover([member(0, 3), member(1, 2)], two)
    assert split.reason.endswith("rank 1 did not serve") and not split.streams
    absent = recovery.recover([member(1, 3), member(2, 3)], two)
    assert absent.reason.endswith("rank 0 did not serve") and absent.seats == {1: "actor 1 of 3"}
    assert recovery.recover([], two).seats == {}


def test_recovery_after_a_change_of_the_number_of_ranks():
    def member_of(rank: int, num_ranks: int, epoch: int) -> Any:
        info = RankInfo(rank, {}, 8, 16, 64)
        return f"{rank} of {num_ranks}", Membership(
            rank, epoch, 0, info, (), rank_config(num_ranks)
        )

    standby = ("standby", Membership(STANDBY, -1, 0, None, (), rank_config(2)))
    ranks = [member_of(rank, 3, 1) for rank in range(3)]
    found = recovery.recover([*ranks, standby, member_of(1, 2, 0)], rank_config(2))
    assert found.config.num_ranks == 3 and not found.reason
    assert found.seats == {rank: f"{rank} of 3" for rank in range(3)}


@pytest.mark.parametrize(
    ("fails", "hangs", "reason"),
    [
        ({"describe": ActorDiedError()}, set(), "rank 1: its process died"),
        ({}, {"describe", "pulse"}, "rank 1: no sign of life"),
    ],
)
def test_a_rank_that_is_lost_as_it_is_taken_over_is_no_error(fails, hangs, reason):
    """It gave its membership and then died, or was stopped: the supervisor neither fails nor waits for ever."""

    async def scenario() -> None:
        first, ranks, launcher = fake_group()
        await first.start()
        for rank in ranks:
            rank.epoch = 0
        ranks[1].fail, ranks[1].hang = fails, hangs
        successor, _, _ = fake_group(hang_timeout_s=60.0)
        successor._roster._launcher, launcher.group = launcher, successor
        short = Heartbeats(2, 0.02, cpu_counts=True)
        successor._formation._new_heartbeats = lambda: short
        await successor.recover(None, 0)
        assert successor.health[:2] == ("rebuilding", 0)
        assert reason in successor.health.error

    asyncio.run(scenario())
