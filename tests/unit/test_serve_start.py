"""`phalanx serve` itself: it reserves the port, Serve's errors keep their cause, and signals end its drain."""

import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.commands import serve as serve_command
from cluster.commands import start
from cluster.commands.serve import _deploy_failure, _drain, _hold_port
from cluster.commands.start import ServerError
from cluster.commands.stop_signals import StopSignals
from cluster.config.phalanx_config import PhalanxConfig
from cluster.ingress.http_server import _listen
from tests.serve.server import free_port


def config_of(port: int, **cluster: object) -> PhalanxConfig:
    values = {"model": {"path": "unused"}, "serve": {"port": port}, "cluster": cluster}
    return PhalanxConfig.model_validate(values)


def bind(port: int, *options: int) -> socket.socket:
    taken = socket.socket()
    for option in options:
        taken.setsockopt(socket.SOL_SOCKET, option, 1)
    taken.bind(("127.0.0.1", port))
    return taken


def leave_closed_connection(port: int, *options: int) -> None:
    """Leave a connection of `port` in TIME_WAIT, as a server that has just ended."""
    with bind(port, *options) as listener:
        listener.listen()
        with socket.create_connection(("127.0.0.1", port)):
            listener.accept()[0].close()


@pytest.mark.parametrize("before", ["nothing", "our connections", "foreign connections"])
def test_a_held_port_is_for_the_ingress_alone(before: str) -> None:
    port = free_port()
    if before == "our connections":
        leave_closed_connection(port, socket.SO_REUSEADDR, socket.SO_REUSEPORT)
    elif before == "foreign connections":
        leave_closed_connection(port, socket.SO_REUSEADDR)
    held = _hold_port(config_of(port))
    assert held is not None
    with held:
        with pytest.raises(OSError, match="in use"):
            bind(port)
        if before != "foreign connections":  # that bind allows other binds with SO_REUSEADDR
            with pytest.raises(ServerError, match=f"127.0.0.1:{port}.*serve.port"):
                _hold_port(config_of(port))
        with closing(_listen("127.0.0.1", port)) as listener:
            listener.listen()
            listener.setblocking(True)
            for _ in range(20):  # none goes to the socket that holds the port
                with socket.create_connection(("127.0.0.1", port), timeout=5):
                    listener.accept()[0].close()
            with pytest.raises(ServerError, match=f"127.0.0.1:{port}.*serve.port"):
                _hold_port(config_of(port))
    bind(port, socket.SO_REUSEADDR).close()


def test_a_port_is_not_held_beside_a_joined_ray() -> None:
    port = free_port()
    assert _hold_port(config_of(port, ray_address="auto")) is None
    with bind(port) as taken:
        taken.listen()
        with pytest.raises(ServerError, match="in use"):
            _hold_port(config_of(port, ray_address="auto"))
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            _listen("127.0.0.1", port)


def application(message: str, *deployments: str) -> SimpleNamespace:
    found = {str(i): SimpleNamespace(message=text) for i, text in enumerate(deployments)}
    return SimpleNamespace(message=message, deployments=found)


def test_a_failed_deploy_shows_the_error_of_the_replica(caplog: pytest.LogCaptureFixture) -> None:
    trace = 'Error:\nTraceback (most recent call last):\n  File "x.py", line 1\nOSError: in use\n'
    hidden = "Failed to update the deployments ['Ingress']."
    with caplog.at_level(logging.ERROR):
        assert _deploy_failure(application(hidden, "", trace)) == "OSError: in use"
    assert 'File "x.py", line 1' in caplog.text
    assert _deploy_failure(application(hidden, "")) == hidden


class OpenRequests:
    """The ranks of a server whose requests end at the `polls`-th poll; at the second one, signals arrive."""

    draining = False

    def __init__(self, polls: int, *signals: signal.Signals):
        self._left, self._signals = polls, signals
        self.polls = 0
        self.timeouts: list[float] = []
        self.supervisor = SimpleNamespace(
            drain=SimpleNamespace(remote=self.timeouts.append),
            is_drained=SimpleNamespace(remote=self._is_drained),
        )

    def stage(self, name: str) -> Any:
        return nullcontext()

    def _is_drained(self) -> bool:
        self.polls += 1
        if self.polls == 2:
            for number in self._signals:
                os.kill(os.getpid(), number)
        return self.polls >= self._left


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Iterator[StopSignals]:
    monkeypatch.setattr(serve_command, "ray_get", lambda result: result)
    monkeypatch.setattr(serve_command, "POLL_S", 0.001)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    stop = StopSignals()
    stop.install()
    yield stop
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("first", "second", "timeout_s", "polls"),
    [
        (signal.SIGTERM, [], 30.0, 9),
        (signal.SIGTERM, [signal.SIGTERM], 30.0, 2),
        (signal.SIGTERM, [signal.SIGINT], 30.0, 2),
        (signal.SIGINT, [], 0.0, 9),
    ],
)
def test_a_drain_ends_with_the_requests_or_at_a_second_signal(
    stop: StopSignals,
    first: signal.Signals,
    second: list[signal.Signals],
    timeout_s: float,
    polls: int,
) -> None:
    """After SIGINT the groups end the requests at once."""
    os.kill(os.getpid(), first)
    config = PhalanxConfig.model_validate(
        {"model": {"path": "unused"}, "serve": {"drain_timeout_s": 30}}
    )
    ranks: Any = OpenRequests(9, *second)
    _drain(config, stop, ranks)
    assert (ranks.timeouts, ranks.polls) == ([timeout_s], polls)


SLOW = Exception("The current node timed out during startup.")


@pytest.mark.parametrize(
    ("errors", "address", "stopped", "starts", "message"),
    [
        ([SLOW], None, False, 2, ""),
        ([SLOW, SLOW], None, False, 2, "cannot start a local Ray: The current node timed out"),
        ([SLOW], None, True, 1, "cannot start a local Ray: The current node timed out"),
        ([ValueError("too small")], None, False, 1, "cannot start a local Ray: too small"),
        ([SLOW], "auto", False, 1, "cannot join Ray at auto: The current node timed out"),
    ],
)
def test_a_local_ray_that_is_late_is_ended_and_started_once_more(
    monkeypatch: pytest.MonkeyPatch,
    errors: list[Exception],
    address: str | None,
    stopped: bool,
    starts: int,
    message: str,
) -> None:
    """Ray gives its own processes 30 s, which a busy machine exceeds, and leaves them running."""
    done: list[str] = []
    left = iter(errors)

    def init(*_: object, **__: object) -> None:
        done.append("start")
        if (error := next(left, None)) is not None:
            raise error

    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray.init", init)
    monkeypatch.setattr("ray.shutdown", lambda: None)
    monkeypatch.setattr(start.reaper, "start", lambda: None)
    monkeypatch.setattr(start.reaper, "end_session", lambda: done.append("end"))
    monkeypatch.setattr(start, "show_logs", lambda log_format: None)
    config = config_of(1, **({} if address is None else {"ray_address": address}))
    with pytest.raises(ServerError, match=message) if message else nullcontext():
        start.start_ray(config, lambda: stopped)
    cleaned = [] if address else ["end"]
    failed = ["start", *cleaned] * len(errors)
    assert done == (failed if message else [*failed, "start"]) and done.count("start") == starts
