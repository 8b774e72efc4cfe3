"""A tiny checkpoint and a shared server of two ranks."""

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
    """It also stops as told: at SIGINT with nothing to do, within ten seconds, and leaves nothing."""
    with running(tmp_path_factory.mktemp("server"), checkpoint) as server:
        yield server
        seconds, left = server.stop()
    assert seconds < 10 and not left, (seconds, left)
    assert server.process.returncode == 0, server.log.read_text()
