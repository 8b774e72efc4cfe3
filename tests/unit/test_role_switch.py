"""The role of a group changes while it serves: where new requests go, what becomes of the open ones, and refusals."""

import asyncio
import pickle
from types import SimpleNamespace

import pytest

from cluster.config import check_pool
from cluster.errors import BadRequestError
from cluster.supervisor import operations
from tests.unit.client_scene import (
    OfFakes,
    Scene,
    end_tasks,
    run,
    scene,
    second_ingress,
    use_two_roles,
)
from tests.unit.ray_fakes import until
from tests.unit.test_prefill_groups import holder, seen

P, D = 0, 1  # of the groups p and d, as they begin: prefill and decode


@pytest.fixture(autouse=True)
def roles(monkeypatch: pytest.MonkeyPatch) -> None:
    use_two_roles(monkeypatch)
    monkeypatch.setattr(operations, "configured_model", lambda _: SimpleNamespace(pooling=None))
    monkeypatch.setattr(operations, "check_hand_overs", lambda *_: ())


async def exchange(now: Scene) -> None:
    """Let each group take the role of the other one."""
    await now.client.switch_role("decode", "p")
    await now.client.switch_role("prefill", "d")


async def open_in_both(now: Scene) -> "tuple[asyncio.Task[None], asyncio.Task[None]]":
    """The requests x, whose prompt the group p computes, and y, which the group d answers behind its first token."""
    answered = now.ask("y")
    rank, _ = await holder(now, P, "y")
    await rank.emit("y", 0, 1, finish=True)
    rank, _ = await holder(now, D, "y~2")
    await rank.emit("y~2", 1, 1)
    await until(lambda: now.answers["y"] == [100, 101])
    prompt = now.ask("x")
    await holder(now, P, "x")
    return prompt, answered


def test_groups_exchange_their_roles_and_open_requests_go_on() -> None:
    async def scenario() -> None:
        async with scene() as now:
            places = seen(now)
            prompt, answered = await open_in_both(now)
            await exchange(now)
            new = now.ask("z")
            rank, begun = await holder(now, D, "z")
            assert begun.hands_over
            await rank.emit("z", 0, 1, finish=True)
            rank, _ = await holder(now, P, "z~2")
            await rank.emit("z~2", 1, 1, finish=True)
            rank, _ = await holder(now, P, "x")
            await rank.emit("x", 0, 1, finish=True)
            rank, rest = await holder(now, P, "x~2")
            assert rest.emitted_token_ids == [100]
            await rank.emit("x~2", 1, 1, finish=True)
            rank, _ = await holder(now, D, "y~2")
            await rank.emit("y~2", 2, 1, finish=True)
            await asyncio.gather(prompt, answered, new)
            assert now.answers == {"x": [100, 101], "y": [100, 101, 102], "z": [100, 101]}
            assert places == ["prefill"] * 3
            assert now.outstanding == now.outstanding_prefill == (0, 0, 0, 0)

    run(scenario())


def test_the_other_group_goes_on_with_an_answer_of_a_group_that_became_a_prefill_group() -> None:
    """When ranks of this group fail, the other group goes on with its prompts too."""

    async def scenario() -> None:
        async with scene() as now:
            prompt, answered = await open_in_both(now)
            await exchange(now)
            new = now.ask("z")
            await holder(now, D, "z")
            now.hold_rebuild(D)
            await now.kill(1, D)
            rank, again = await holder(now, P, "z~2")
            assert again.emitted_token_ids == [] and not again.hands_over
            await rank.emit("z~2", 0, 1, finish=True)
            await new
            rank, rest = await holder(now, P, "y~3")
            assert rest.emitted_token_ids == [100, 101]
            await rank.emit("y~3", 2, 1, finish=True)
            rank, _ = await holder(now, P, "x")
            await rank.emit("x", 0, 1, finish=True)
            rank, _ = await holder(now, P, "x~2")
            await rank.emit("x~2", 1, 1, finish=True)
            await asyncio.gather(prompt, answered)
            assert now.answers == {"x": [100, 101], "y": [100, 101, 102], "z": [100]}

    run(scenario())


def test_a_prompt_that_a_group_computes_for_others_leaves_it_when_it_rebuilds_in_another_role() -> (
    None
):
    async def scenario() -> None:
        async with scene() as now:
            places = seen(now)
            asked = now.ask("x")
            await holder(now, P, "x")
            await now.client.switch_role("generate", "p")
            now.hold_rebuild(P)
            await now.kill(1, P)
            rank, whole = await holder(now, D, "x~2")
            assert whole.emitted_token_ids == []
            await rank.emit("x~2", 0, 1, finish=True)
            await asked
            assert places == ["decode after a failed prefill"]

    run(scenario())


def test_the_last_group_that_answers_cannot_become_a_prefill_group() -> None:
    async def scenario() -> None:
        async with scene() as now:
            with pytest.raises(BadRequestError, match="no other group answers than 'd'; a group"):
                await now.client.switch_role("prefill", "d")
            await now.client.switch_role("decode", "p")
            begins = now.hold_rebuild(P)
            await now.kill(1, P)
            await until(lambda: now.client._groups[P].health.state == "rebuilding")
            with pytest.raises(BadRequestError, match="no other group answers than 'd'"):
                await now.client.switch_role("prefill", "d")
            begins.set()
            await until(lambda: now.client._groups[P].health.state == "serving")
            await now.client.switch_role("prefill", "d")
            with pytest.raises(BadRequestError, match="no other group answers than 'p'"):
                await now.client.switch_role("prefill", "p")
            assert [group.role for group in now.client._groups] == ["decode", "prefill"]

    run(scenario())


def test_other_switches_that_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with scene() as now:
            with pytest.raises(BadRequestError, match="name one of the groups 'p', 'd'"):
                await now.client.switch_role("decode")
            with pytest.raises(BadRequestError, match="there is no group 'x'"):
                await now.client.switch_role("decode", "x")
            monkeypatch.setattr(operations, "check_hand_overs", check_pool.check_hand_overs)
            with pytest.raises(BadRequestError, match=r"group 'p'.*\n  cache.host_memory_gib: 0,"):
                await now.client.switch_role("prefill", "p")
            await now.supervisor.drain(1.0, "p")
            await until(lambda: now.client._groups[P].health.ended)
            with pytest.raises(BadRequestError, match="group 'p' is stopped"):
                await now.client.switch_role("decode", "p")

    run(scenario())


def test_every_ingress_follows_and_the_next_process_of_the_supervisor_too() -> None:
    async def scenario() -> None:
        async with scene() as now, second_ingress(now) as other:
            await exchange(now)
            await until(lambda: [it.role for it in other.client._groups] == ["decode", "prefill"])
            first, healths = now.supervisor, await now.supervisor.healths()
            await end_tasks(first)
            successor = OfFakes(now.client._config)
            successor.launchers = first.launchers
            for group, launcher in zip(successor._pool.groups, first.launchers, strict=True):
                group._roster._launcher = launcher  # type: ignore[assignment]
                launcher.group = group
            await successor.recover(pickle.loads(pickle.dumps(first._state)))
            assert await successor.healths() == healths
            now.supervisor = successor
            now.handle.target = successor
            async with second_ingress(now) as late:
                assert [it.role for it in late.client._groups] == ["decode", "prefill"]
            status, _ = await now.client.groups()
            assert (status["name"], status["role"]) == ("p", "decode")

    run(scenario())
