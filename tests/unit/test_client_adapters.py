"""Adapters that come and go while a server serves: all ranks or none, requests that are open, rebuilds, restarts."""

import asyncio
from pathlib import Path

import pytest

from cluster.errors import BadRequestError, EngineDeadError, NotFoundError
from cluster.supervisor import group
from cluster.supervisor.adapters import ServerAdapters
from cluster.supervisor.saved_state import AdapterState
from tests.unit.client_scene import OfFakes, Scene, run, scene, use_fakes
from tests.unit.ray_fakes import until
from workers.lora_config import AdapterError, LoadedAdapter, LoraConfig

LORA = {"max_loras": 2, "max_cpu_loras": 2}


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    use_fakes(monkeypatch)
    monkeypatch.setattr(OfFakes, "group_options", {"rebuild_attempts": 1})


def seats(now: Scene) -> list[tuple[str, ...]]:
    """Names of the adapters that each rank got with the last epoch."""
    return [
        tuple(it.name for it in rank.calls["join_group"][-1][-1].adapters) for rank in now.ranks
    ]


def test_a_loaded_adapter_takes_requests_and_keeps_its_id_over_a_rebuild(tmp_path: Path) -> None:
    async def check() -> None:
        async with scene(lora=LORA) as now:
            with pytest.raises(NotFoundError, match="'fr' was unloaded"):
                await now.ask("early", adapter="fr")
            await now.client.load_adapter("fr", str(tmp_path))
            assert now.client.adapters == {"fr": str(tmp_path)}
            task = now.ask("r", adapter="fr")
            await until(lambda: any("r" in rank.requests for rank in now.ranks))
            (rank,) = [rank for rank in now.ranks if "r" in rank.requests]
            adapter = rank.requests["r"].adapter
            assert adapter == rank.calls["stage_adapter"][0][0].id > 0
            await rank.emit("r", 0, 2)
            await until(lambda: len(now.answers["r"]) == 2)
            await now.kill(rank.rank)
            await until(lambda: any("r~2" in rank.requests for rank in now.ranks))
            assert seats(now) == [("fr",), ("fr",)]
            (rank,) = [rank for rank in now.ranks if "r~2" in rank.requests]
            assert rank.requests["r~2"].adapter == adapter
            assert rank.requests["r~2"].emitted_token_ids == [100, 101]
            await rank.emit("r~2", 2, 1, finish=True)
            await task

    run(check())


@pytest.mark.parametrize("fault", ["an error", "other files"])
def test_a_rank_that_cannot_load_leaves_none_loaded(tmp_path: Path, fault: str) -> None:
    async def check() -> None:
        async with scene(lora=LORA) as now:
            message = "no place for x"
            if fault == "an error":
                now.ranks[1].fail["stage_adapter"] = AdapterError(message)
            else:
                now.ranks[1].digest, message = "other", "the ranks read different files"
            with pytest.raises(BadRequestError, match=message):
                await now.client.load_adapter("fr", str(tmp_path))
            (adapter,) = now.ranks[0].calls["stage_adapter"][0]
            await until(lambda: (adapter.id,) in now.ranks[0].calls["drop_adapter"])
            assert now.client.adapters == {}
            now.ranks[1].fail, now.ranks[1].digest = {}, now.ranks[0].digest
            await now.client.load_adapter("fr", str(tmp_path))
            assert set(now.client.adapters) == {"fr"}
            assert now.client.health() == (True, "")

    run(check())


def test_names_and_numbers_are_limited(tmp_path: Path) -> None:
    async def check() -> None:
        async with scene(lora=LORA) as now:
            load = now.client.load_adapter
            await load("a", str(tmp_path))
            for name in ("a", "tiny"):
                with pytest.raises(BadRequestError, match=f"the name '{name}' is in use"):
                    await load(name, str(tmp_path))
            with pytest.raises(BadRequestError, match="neither an absolute path nor a name"):
                await load("b", "some/folder/deep")
            await load("b", str(tmp_path))
            with pytest.raises(
                BadRequestError, match=r"2 adapters are loaded, which is lora\.max_cpu"
            ):
                await load("c", str(tmp_path))
            with pytest.raises(NotFoundError, match="no adapter 'x'; the adapters are 'a', 'b'"):
                await now.client.unload_adapter("x")

    run(check())


@pytest.mark.parametrize("change", ["load_adapter", "unload_adapter"])
def test_a_supervisor_that_dies_during_a_change_of_adapters(tmp_path: Path, change: str) -> None:
    async def check() -> None:
        async with scene(lora=LORA) as now:
            if change == "unload_adapter":
                await now.client.load_adapter("a", str(tmp_path))
            made = getattr(now.supervisor, change)

            async def last(*args: str) -> None:
                await made(*args)
                now.handle.dead = True

            setattr(now.supervisor, change, last)
            args = [str(tmp_path)] if change == "load_adapter" else []
            with pytest.raises(EngineDeadError, match="the supervisor does not answer"):
                await getattr(now.client, change)("a", *args)

    run(check())


def test_a_server_without_slots_takes_no_adapters(tmp_path: Path) -> None:
    async def check() -> None:
        async with scene() as now:
            with pytest.raises(BadRequestError, match=r"lora\.max_loras above 0"):
                await now.client.load_adapter("a", str(tmp_path))

    run(check())


def test_an_adapter_is_dropped_when_its_last_request_has_ended(tmp_path: Path) -> None:
    async def check() -> None:
        async with scene(lora=LORA) as now:
            await now.client.load_adapter("a", str(tmp_path))
            task = now.ask("r", adapter="a")
            await until(lambda: any("r" in rank.requests for rank in now.ranks))
            (adapter,) = now.ranks[0].calls["stage_adapter"][0]
            await now.client.unload_adapter("a")
            assert now.client.adapters == {}
            with pytest.raises(NotFoundError):
                await now.ask("late", adapter="a")
            # The name is free at once; the ranks hold the adapter of the open request too.
            await now.client.load_adapter("a", str(tmp_path))
            await asyncio.sleep(0.1)
            assert not now.ranks[0].calls["drop_adapter"]
            (rank,) = [rank for rank in now.ranks if "r" in rank.requests]
            await rank.emit("r", 0, 1, finish=True)
            await task
            await until(lambda: now.ranks[0].calls["drop_adapter"] == [(adapter.id,)])
            assert [it.name for it in now.supervisor._adapters.state.held] == ["a"]
            other = now.ranks[0].calls["stage_adapter"][1][0]
            assert other.id != adapter.id

    run(check())


def test_a_restarted_supervisor_goes_on_with_the_adapters() -> None:
    held = tuple(LoadedAdapter(id=n, name=f"a{n}", path="/x") for n in (1, 2))

    async def nothing() -> None:
        pass

    def made(state: AdapterState, ingresses: set[str]) -> ServerAdapters:
        subject = ServerAdapters(
            LoraConfig(max_loras=1), "m", [], ingresses=lambda: ingresses, keep=nothing
        )
        subject.begin(())
        subject.recover(state)
        return subject

    async def check() -> None:
        subject = made(AdapterState(held, {1}), {"i", "k"})
        assert [it.name for it in subject.listed] == ["a2"]
        await subject.report("i", {2})
        assert len(subject.state.held) == 2, "another ingress may have requests"
        await subject.report("k", {1, 2})
        await subject.report("i", {2})
        assert len(subject.state.held) == 2
        await subject.report("k", {2})
        assert [it.name for it in subject.state.held] == ["a2"] and not subject.state.retired
        alone = made(AdapterState(held, {1}), set())
        await alone.drop_unused()
        assert alone.state.retired == {1}, "its ingress may come back with requests"

    run(check())


def test_the_adapters_of_the_configuration_are_held_from_the_start() -> None:
    async def nothing() -> None:
        pass

    subject = ServerAdapters(LoraConfig(max_loras=1), "m", [], ingresses=set, keep=nothing)
    adapters = (LoadedAdapter(id=1, name="a", path="/x"),)
    subject.begin(adapters)
    assert subject.listed == adapters and subject.state.held == adapters


def test_no_call_waits_for_adapters_of_a_supervisor_that_has_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group, "STOP_TIMEOUT_S", 0.02)  # the fakes' loops do not end by a stop

    async def check() -> None:
        async with scene(lora=LORA) as now:
            call = asyncio.ensure_future(now.supervisor.changed_adapters(()))
            await asyncio.sleep(0)
            assert not call.done()
            await now.supervisor.stop()
            assert await asyncio.wait_for(call, 10) == ()

    run(check())
