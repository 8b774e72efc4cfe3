"""A tiny checkpoint and a shared server of two ranks."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.server import Server, running
from workers.weights.checkpoint import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("serve") / "tiny"
    make_checkpoint(path, num_layers=2, hidden_size=64, num_experts=6, head_dim=32, vocab_size=384)
    return path


@pytest.fixture(scope="package")
def server(tmp_path_factory, checkpoint) -> Iterator[Server]:
    """It also stops at SIGTERM with nothing to do: within ten seconds, without a process or a warning left."""
    with running(tmp_path_factory.mktemp("server"), checkpoint) as server:
        assert len(server.ranks()) == 2
        before = server.log.read_text()
        yield server
        served = server.log.read_text()
        seconds, left = server.stop(signal.SIGTERM)
    output = server.log.read_text()
    assert seconds < 10 and not left, (seconds, left)
    assert server.process.returncode == 0, output
    start_and_stop = before + output[len(served) :]
    assert "ERROR" not in start_and_stop and "WARNING" not in start_and_stop, output
