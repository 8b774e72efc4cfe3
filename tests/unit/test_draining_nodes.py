"""Groups with ranks on nodes that Ray drains, over fake ranks, the server then, and how a launcher finds places."""

import asyncio
import math
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from cluster.supervisor import group, launcher, lost_nodes, placement, relocation, supervisor
from cluster.supervisor.launcher import RankLauncher
from cluster.supervisor.placement import PlacementError
from kernels.routing.expert_map import STANDBY
from tests.unit.ray_fakes import rank_config, until
from tests.unit.test_rebuild import Scene, run
from tests.unit.test_supervisor import end, serving


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "STOP_TIMEOUT_S", 0.02)
    monkeypatch.setattr(relocation, "GROW_S", 0.01)
    monkeypatch.setattr(lost_nodes, "POLL_S", 0.001)
    monkeypatch.setattr(lost_nodes, "CAPACITY_WAIT_S", 0.02)


def test_ranks_move_to_a_node_with_room_after_their_successors_have_loaded() -> None:
    async def scenario() -> None:
        now = Scene(num_nodes=3)
        await now.serving(0)
        before = now.ranks
        now.launcher.drained[1], now.launcher.num_free_nodes = math.inf, 1
        now.launcher.make = lambda rank: rank.hang.add("prepare")
        moving = asyncio.create_task(now.group.leave_draining_nodes())
        await until(lambda: bool(now.launcher.standbys))
        assert now.group.health[:3] == ("serving", 0, "")
        (successor,) = now.launcher.standbys
        successor.hang.clear()
        moving.cancel()
        await asyncio.wait([moving])
        now.launcher.make = lambda rank: None
        assert await now.group.leave_draining_nodes() is None, "it goes on where it was interrupted"
        await now.serving(1)
        assert now.ranks[0] is before[0] and now.ranks[2] is before[2]
        assert now.ranks[1] is now.launcher.standbys[-1] and now.ranks[1].rank == STANDBY
        assert now.ranks[1].node_id == "node 1, moved" and now.launcher.all[1].dead
        assert await now.group.leave_draining_nodes() is None and now.group.health.epoch == 1
        await now.close()

    run(scenario())


def test_ranks_without_another_place_stay_until_their_node_ends() -> None:
    async def scenario() -> None:
        now = Scene(num_nodes=3)
        await now.serving(0)
        now.launcher.drained |= {0: 40.0, 2: 30.0}
        assert await now.group.leave_draining_nodes() == 30.0
        before = now.ranks
        now.kill(1)
        await now.serving(1)
        assert now.ranks[0] is before[0] and now.ranks[2] is before[2], "a rebuild keeps them"
        await now.close()

    run(scenario())


def test_a_rebuild_moves_ranks_too() -> None:
    async def scenario() -> None:
        now = Scene(num_nodes=3)
        await now.serving(0)
        now.launcher.drained[2], now.launcher.num_free_nodes = 5.0, 1
        now.kill(1)
        await now.serving(1)
        assert [rank.node_id for rank in now.ranks] == ["node 0", "node 1", "node 2, moved"]
        await now.close()

    run(scenario())


def test_a_group_that_may_shrink_leaves_a_draining_node_and_grows_back() -> None:
    async def scenario() -> None:
        now = Scene(num_nodes=3, shrink=True)
        await now.serving(0)
        before = now.ranks
        now.launcher.drained[1] = 60.0
        assert await now.group.leave_draining_nodes() is None
        await now.serving(1)
        assert now.ranks == [before[0], before[2]] and now.launcher.all[1].dead
        assert not now.launcher.standbys and not now.launcher.replaced
        assert await now.group.leave_draining_nodes() is None and now.group.health.epoch == 1
        now.launcher.num_free_nodes = 1
        await until(lambda: len(now.group.members.infos) == 3 and now.group.health.alive)
        assert now.ranks[1].node_id == "node 1, moved"
        now.launcher.drained |= dict.fromkeys(range(3), 7.0)
        assert await now.group.leave_draining_nodes() == 7.0, "no rank would be left"
        await now.close()

    run(scenario())


def test_the_server_drains_before_a_node_without_a_successor_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "NODES_S", 0.01)
    monkeypatch.setattr(supervisor, "set_up_logging", lambda *_: None)

    async def scenario() -> None:
        subject = await serving()
        subject.launcher.drained[0] = 3.0
        assert await subject.drain_requested() == 3.0
        assert subject._pool.groups[0].health.state == "draining"
        assert "no other node has room" in caplog.text
        await end(subject)

    run(scenario())


class FakePlace:
    """A placement group of one bundle on the node of an address."""

    def __init__(self, address: str, ready: bool = True):
        self.address, self.ready, self.removed = address, ready, False

    def wait(self, timeout_s: float) -> bool:
        return self.ready


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Nodes `a` and `b` have the bundles of the placement group; `free` is a third one, or None."""
    state: dict[str, Any] = {"free": "c", "lost": set(), "ready": True, "made": []}

    def node_of(place: Any, bundle: int) -> dict[str, Any] | None:
        address = place.address[bundle]
        return None if address in state["lost"] else node(address)

    def create_on(config: Any, address: str, name: str) -> FakePlace:
        assert name == f"app:1:on:{address}"
        state["made"].append(FakePlace(address, state["ready"]))
        return state["made"][-1]

    def other_node(config: Any, taken: set[str]) -> str | None:
        assert state["free"] not in taken
        return state["free"]

    monkeypatch.setattr(placement, "node_of", node_of)
    monkeypatch.setattr(placement, "create_on", create_on)
    monkeypatch.setattr(placement, "other_node", other_node)
    monkeypatch.setattr(placement, "find", lambda name: None)
    monkeypatch.setattr(placement, "answers", lambda node: True)
    monkeypatch.setattr(placement, "draining_nodes", lambda: {"id-b": 9.0, "id-x": 1.0})
    monkeypatch.setattr(
        launcher, "remove_placement_group", lambda place: setattr(place, "removed", True)
    )
    monkeypatch.setattr(launcher.ray, "kill", lambda handle: None)
    return state


def node(address: str) -> dict[str, Any]:
    return {"NodeID": f"id-{address}", "NodeManagerAddress": address}


def two_nodes() -> RankLauncher:
    """A launcher with the processes `one` and `two` on the nodes `a` and `b`."""
    subject = RankLauncher(rank_config(2, num_nodes=2), name="app:1", joined=True)
    first: Any = FakePlace("ab")
    subject._placement_group = first
    subject._bundles = {"one": 0, "two": 1}
    subject._places = {"one": first, "two": first}
    return subject


def test_a_bundle_moves_to_a_node_with_room(cluster: dict[str, Any]) -> None:
    async def scenario() -> None:
        subject = two_nodes()
        assert await subject.draining() == {1: 9.0}
        assert await subject.move(1)
        assert await subject.draining() == {}
        assert subject.in_place("one") and not subject.in_place("two")
        assert subject._has_free_place(1) and not subject._has_free_place(0)
        (place,) = cluster["made"]
        subject._bundles["three"], subject._places["three"] = 1, place
        assert subject.in_place("three") and not subject._has_free_place(1)
        subject.end("two", None)
        assert not subject._has_free_place(1) and not subject._group.removed
        cluster["lost"].add("c")  # Ray has found another node for the first place
        assert await subject.answers(1) and place.removed
        assert not subject.in_place("three") and subject._has_free_place(1)
        subject.kill()

    run(scenario())


@pytest.mark.parametrize(("free", "ready"), [(None, True), ("c", False)])
def test_a_bundle_without_another_node_stays(
    cluster: dict[str, Any], free: str | None, ready: bool
) -> None:
    async def scenario() -> None:
        subject = two_nodes()
        cluster["free"], cluster["ready"] = free, ready
        assert not await subject.move(1)
        assert subject.in_place("two") and all(place.removed for place in cluster["made"])

    run(scenario())


def test_a_second_move_gives_the_place_of_the_first_back(cluster: dict[str, Any]) -> None:
    async def scenario() -> None:
        subject = two_nodes()
        assert await subject.move(1)
        (first,) = cluster["made"]
        subject._bundles["three"], subject._places["three"] = 1, first
        cluster["free"] = "d"
        assert await subject.move(1)
        subject.end("two", None)
        assert not first.removed and not subject.in_place("three")
        subject.end("three", None)
        assert first.removed and not cluster["made"][1].removed
        subject.kill()
        assert cluster["made"][1].removed

    run(scenario())


@pytest.mark.parametrize("how", ["kill", "cancel"])
@pytest.mark.parametrize("what", ["move", "start"])
def test_a_place_that_ray_reserves_too_late_is_given_back(
    monkeypatch: pytest.MonkeyPatch, cluster: dict[str, Any], what: str, how: str
) -> None:
    """A group that ended meanwhile, as one that drains beside other groups, kept the place with a process in it."""
    made: list[FakePlace] = []

    async def scenario() -> None:
        subject, loop = two_nodes(), asyncio.get_running_loop()
        move, start = subject.move(1), subject.start(STANDBY, rank_config(2, num_nodes=2), 0)
        task = asyncio.create_task({"move": move, "start": start}[what])
        {"move": start, "start": move}[what].close()

        def wait(place: FakePlace, timeout_s: float) -> bool:
            made.append(place)
            loop.call_soon_threadsafe(subject.kill if how == "kill" else task.cancel)
            loop.call_soon_threadsafe(went_on.set)
            return went_on.wait(60)

        went_on = threading.Event()
        monkeypatch.setattr(FakePlace, "wait", wait)
        await asyncio.wait([task])
        if how == "cancel":
            assert task.cancelled()
        elif what == "move":
            assert task.result() is False
        else:
            with pytest.raises(PlacementError):
                task.result()
        assert made[0].removed and not subject._beside and not subject._moved

    monkeypatch.setattr(placement, "create_beside", lambda *_, **__: FakePlace("a"))
    monkeypatch.setattr(launcher.ray, "remote", lambda kind: pytest.fail("it has started"))
    run(scenario())


def test_the_node_of_a_move_has_room_and_is_not_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [entry(name) for name in "abcd"]
    free = {entry["NodeID"]: entry["Resources"] for entry in nodes}
    free["id-b"] = {"CPU": 0.0}
    ends = {"id-a": 0, "id-c": 99_000}
    state = SimpleNamespace(
        available_resources_per_node=lambda: free, get_draining_nodes=lambda: ends
    )
    monkeypatch.setattr(placement, "nodes", lambda: nodes)
    monkeypatch.setattr(ray._private.state, "state", state)
    monkeypatch.setattr(ray._private.state, "available_resources_per_node", lambda: free)
    monkeypatch.setattr(time, "time", lambda: 90.0)
    config = rank_config(2, num_nodes=2)
    assert placement.draining_nodes() == {"id-a": math.inf, "id-c": 9.0}
    assert [room.lack for room in placement.capacities(config)] == [
        "draining",
        "1 CPU(s) taken",
        "draining",
        "",
    ]
    assert placement.other_node(config, {"a", "b"}) == "d"
    assert placement.other_node(config, {"a", "d"}) is None


def entry(address: str) -> dict[str, Any]:
    """A node as Ray lists it."""
    alive = {"Alive": True, "NodeManagerHostname": address, "Resources": {"CPU": 1.0}}
    return {**node(address), **alive}
