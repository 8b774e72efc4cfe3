"""The start of `phalanx serve`: the port is reserved before Ray starts, and Serve's errors keep their cause."""

import logging
import socket
from contextlib import closing
from types import SimpleNamespace

import pytest

from cluster.commands.serve import _deploy_failure, _hold_port
from cluster.commands.start import ServerError
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
