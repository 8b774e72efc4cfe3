"""Groups over several nodes that lose a node or its network, over fake ranks."""

import asyncio
import socket
from typing import Any

import pytest

from cluster.supervisor import group, lost_nodes, placement, relocation
from tests.unit.ray_fakes import until
from tests.unit.test_rebuild import HANG_TIMEOUT_S, Scene, run


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "STOP_TIMEOUT_S", 0.02)
    monkeypatch.setattr(relocation, "GROW_S", 0.01)
    monkeypatch.setattr(lost_nodes, "POLL_S", 0.001)
    monkeypatch.setattr(lost_nodes, "CAPACITY_WAIT_S", 0.02)


def cut(now: Scene, rank: int) -> None:
    now.launcher.cut.add(rank)
    now.ranks[rank].hang |= {"pulse", "leave_epoch"}


def mend(now: Scene, rank: int) -> None:
    now.launcher.all[rank].target.hang.clear()
    now.launcher.cut.discard(rank)


def test_a_rank_behind_a_cut_network_keeps_its_process(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        now = Scene(num_nodes=3)
        await now.serving(0)
        before = now.ranks
        cut(now, 1)
        await until(lambda: "the node of rank 1 does not answer; waiting 5 s" in caplog.text)
        assert now.group.health.state == "rebuilding" and now.launcher.num_ended == 0
        mend(now, 1)
        await now.serving(1)
        assert now.ranks == before and now.launcher.num_ended == 0
        assert [rank.calls["leave_epoch"] for rank in before] == [[(1,)]] * 3
        await now.close()

    run(scenario())


def test_a_call_may_reach_a_rank_as_late_as_its_network_was_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wait_for_nodes = lost_nodes.wait_for_nodes

    async def waits_long(*arguments: Any) -> float:
        return 60 + await wait_for_nodes(*arguments)

    monkeypatch.setattr(lost_nodes, "wait_for_nodes", waits_long)

    async def scenario() -> None:
        now = Scene(num_nodes=3)
        await now.serving(0)
        before = now.ranks
        leave, arrives = before[1].leave_epoch, asyncio.Event()

        async def leave_late(fence: int) -> None:
            await arrives.wait()
            await leave(fence)

        cut(now, 1)
        before[1].leave_epoch = leave_late  # type: ignore[method-assign]
        await until(lambda: now.group.health.state == "rebuilding")
        mend(now, 1)
        await asyncio.sleep(3 * HANG_TIMEOUT_S)
        arrives.set()
        await now.serving(1)
        assert now.ranks == before and now.launcher.num_ended == 0
        await now.close()

    run(scenario())


def test_a_rank_of_a_lost_node_starts_on_the_node_that_ray_finds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        now = Scene(num_nodes=3)
        await now.serving(0)
        now.launcher.lost.add(2)
        now.kill(2)
        await until(lambda: "the node of rank 2 does not answer" in caplog.text)
        assert now.launcher.replaced == []
        now.launcher.lost.clear()
        await now.serving(1)
        assert now.launcher.replaced == [2]
        await now.close()

    run(scenario())


def test_a_group_fails_at_once_when_no_node_comes_back() -> None:
    async def scenario() -> None:
        now = Scene(num_nodes=3)
        await now.serving(0)
        now.group._formation.start_timeout_s = 0.1  # the start itself may take longer
        now.launcher.lost |= {1, 2}
        now.kill(2)
        now.ranks[1].hang |= {"leave_epoch"}
        await now.task
        error = now.group.health.error
        assert error.count("ranks 1, 2 did not answer for 0.1 s") == 1, "one attempt"
        assert error.startswith("rank 2: its process died; rebuild failed at stage 'replacement'")
        assert "cluster.shrink" in error and now.launcher.killed

    run(scenario())


def test_a_group_that_may_shrink_leaves_a_silent_node_out_until_it_answers() -> None:
    async def scenario() -> None:
        now = Scene(num_nodes=3, shrink=True)
        await now.serving(0)
        before = now.ranks
        cut(now, 1)
        await now.serving(1)
        assert now.ranks == [before[0], before[2]] and now.launcher.replaced == []
        assert now.launcher.all[1].dead, "its process is not used again"
        mend(now, 1)
        await until(lambda: len(now.group.members.infos) == 3 and now.group.health.alive)
        assert now.ranks[0] is before[0] and now.ranks[2] is before[2]
        await now.close()

    run(scenario())


def test_a_node_answers_where_its_raylet_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = {
            "NodeManagerAddress": "127.0.0.1",
            "NodeManagerPort": server.getsockname()[1],
        }
        assert placement.answers(node)
    assert not placement.answers(node)
