"""Work in processes: results, errors, limits, cancellation, a template that dies; and the turns of callers."""

import asyncio
import errno
import operator
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import psutil
import pytest

from cluster.api.work import forked
from cluster.api.work.processes import WorkEndedError, WorkLimitError, WorkProcesses
from cluster.api.work.turns import Turns

# operator.pow(40, ENDLESS): minutes in one call that holds the interpreter lock.
ENDLESS = 10**9


_OTHERS: list[int] = []  # processes that earlier tests have left


def run(scenario: Callable[[WorkProcesses], Awaitable[Any]], number: str = "40") -> Any:
    async def bounded() -> Any:
        _OTHERS[:] = [process.pid for process in psutil.Process().children()]
        processes = WorkProcesses(partial(int, number))
        try:
            async with asyncio.timeout(60):
                return await scenario(processes)
        finally:
            processes.close()

    return asyncio.run(bounded())


def templates() -> list[psutil.Process]:
    children = (child for child in psutil.Process().children() if child.pid not in _OTHERS)
    return [child for child in children if "cluster.api.work.forked" in command_of(child)]


def command_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:  # a child of another test, which ends now
        return ""


async def until(condition: Callable[[], bool]) -> None:
    # A template loads for many seconds where others share the cores.
    async with asyncio.timeout(120):
        while not condition():
            await asyncio.sleep(0.01)


def test_results_and_errors_of_users_come_back():
    async def scenario(processes: WorkProcesses) -> None:
        assert await processes.run(operator.add, 2, cpu_s=9) == 42
        large = bytes(4_000_000)
        assert await processes.run(operator.mul, large[:100_000], cpu_s=9) == large
        with pytest.raises(ValueError, match="negative shift count"):
            await processes.run(operator.lshift, -1, cpu_s=9)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            await processes.run(operator.truediv, 0, cpu_s=9)
        many = [processes.run(operator.add, i, cpu_s=9) for i in range(20)]
        assert await asyncio.gather(*many) == list(range(40, 60))
        assert len(templates()) == 1

    run(scenario)


def test_work_ends_at_its_limit_of_processor_time():
    async def scenario(processes: WorkProcesses) -> None:
        with pytest.raises(WorkLimitError, match=r"0\.2 s"):
            await processes.run(operator.pow, ENDLESS, cpu_s=0.2)
        assert await processes.run(operator.add, 2, cpu_s=9) == 42

    run(scenario)


def test_cancelled_work_ends_at_once():
    async def scenario(processes: WorkProcesses) -> None:
        task = asyncio.create_task(processes.run(operator.pow, ENDLESS, cpu_s=600))
        await until(lambda: any(template.children() for template in templates()))
        await asyncio.sleep(0.1)  # also within the endless call
        (template,) = templates()
        task.cancel()
        await until(lambda: not template.children())

    run(scenario)


def test_a_template_that_died_is_replaced():
    async def scenario(processes: WorkProcesses) -> None:
        await processes.run(operator.add, 2, cpu_s=9)
        (template,) = templates()
        template.kill()
        await until(lambda: template.status() == psutil.STATUS_ZOMBIE)
        assert await processes.run(operator.add, 2, cpu_s=9) == 42

    run(scenario)


def test_a_setup_that_fails_ends_the_work():
    """That loading took longer than the work may is no fault of the work."""

    async def scenario(processes: WorkProcesses) -> None:
        with pytest.raises(WorkEndedError):
            await processes.run(operator.add, 2, cpu_s=0.001)

    run(scenario, number="none")


def test_a_machine_without_room_for_a_process_ends_the_work_alone(monkeypatch, capfd):
    """The template would load for many seconds again, where the machine has the least to spare."""

    def full() -> int:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(forked.os, "fork", full)
    control, connection = socket.socketpair()
    with control, connection:
        forked._begin(None, control, connection)
    assert "Resource temporarily unavailable" in capfd.readouterr().err


def test_callers_take_turns():
    async def scenario() -> list[str]:
        turns, order = Turns(1), []

        async def work(caller: str, name: str) -> None:
            async with turns.place(caller):
                order.append(name)
                await asyncio.sleep(0)

        names = [("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("a", "a4"), ("c", "c1")]
        tasks = [asyncio.create_task(work(*each)) for each in names]
        await asyncio.sleep(0)
        tasks[2].cancel()  # one that waits
        await asyncio.gather(*tasks, return_exceptions=True)
        async with turns.place("d"):  # no place was lost
            pass
        return order

    assert asyncio.run(scenario()) == ["a1", "a2", "b1", "c1", "a4"]
