"""Spare processes for the ranks of all groups: one on a node, started again after a group has taken it."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from cluster.supervisor import placement, spares
from cluster.supervisor.launcher import RankLauncher, rank_launchers
from cluster.supervisor.spare_imports import VARIABLE
from tests.unit.ray_fakes import rank_config

RESERVED = {"runtime_env": {"env_vars": {VARIABLE: "1"}}}


@pytest.fixture
def started(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[list[tuple[str, dict[str, str]]]]:
    """Node and variables of each actor that starts a process; no actor is left."""
    found: list[tuple[str, dict[str, str]]] = []
    living: list[int] = []

    class FakeActorClass:
        def options(self, *, scheduling_strategy: str, runtime_env: Any, num_cpus: int) -> Any:
            found.append((scheduling_strategy, runtime_env["env_vars"]))
            return self

        def remote(self) -> int:
            living.append(len(found))
            return len(found)

    monkeypatch.setattr(spares, "NodeAffinitySchedulingStrategy", lambda node, soft: node)
    monkeypatch.setattr(ray, "remote", lambda _: FakeActorClass())
    monkeypatch.setattr(ray, "kill", living.remove)
    monkeypatch.setattr(spares, "SPARE_S", 0.0)
    monkeypatch.setattr("cluster.supervisor.launcher.SPARE_DELAY_S", 0.0)
    yield found
    assert not living


def test_the_groups_of_a_server_have_one_spare_process_on_a_node(
    monkeypatch: pytest.MonkeyPatch, started: list[Any]
) -> None:
    """A second one would be the first one, which would end: Ray starts no process where one waits."""
    monkeypatch.setattr(placement, "node_of", lambda group, bundle: {"NodeID": "n"})
    monkeypatch.setattr(RankLauncher, "_place", lambda self, bundle: (None, bundle))
    one, two = rank_launchers({"one": rank_config(), "two": rank_config()}, joined=False)

    async def scenario() -> None:
        await one.start_spares()
        await two.start_spares()
        assert started == [("n", {VARIABLE: "1"})]
        assert two._spares.take("n", {}) == RESERVED
        assert one._spares.take("n", {}) == {}, "the other group has taken it"
        await one.start_spares()
        assert len(started) == 2 and one._spares.take("n", {}) == RESERVED

    asyncio.run(scenario())


def test_processes_of_other_nodes_and_of_other_variables_wait_apart(started: list[Any]) -> None:
    subject = spares.Spares(joined=False)

    async def scenario() -> None:
        await subject.start(["n", "m"], {})
        await subject.start(["n"], {"A": "1"})
        assert started == [
            ("n", {VARIABLE: "1"}),
            ("m", {VARIABLE: "1"}),
            ("n", {"A": "1", VARIABLE: "1"}),
        ]
        assert subject.take(None, {}) == {} and subject.take("o", {}) == {}
        assert subject.take("n", {"A": "2"}) == {"runtime_env": {"env_vars": {"A": "2"}}}
        assert subject.may_wait
        assert [subject.take(node, {}) for node in ("n", "m", "m")] == [RESERVED, RESERVED, {}]
        assert subject.take("n", {"A": "1"}) == {
            "runtime_env": {"env_vars": {"A": "1", VARIABLE: "1"}}
        }
        assert not subject.may_wait

    asyncio.run(scenario())


def test_a_process_of_an_earlier_supervisor_is_taken(started: list[Any]) -> None:
    subject = spares.Spares(joined=False)
    assert subject.expect(["n"], {}) == ["n"] and subject.expect(["n"], {}) == []
    asyncio.run(subject.start(["n"], {}))
    assert not started and subject.take("n", {}) == RESERVED
