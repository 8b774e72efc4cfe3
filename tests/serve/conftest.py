"""A tiny checkpoint, and a server of two ranks and two ingress replicas that most files here share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints.writer import make_checkpoint
from tests.serve.open_streams import check_drain
from tests.serve.server import JOINING, Server, running

BLOCKS = 1024  # of the shared server


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("serve") / "tiny"
    make_checkpoint(path, num_layers=2, hidden_size=64, num_experts=6, head_dim=32, vocab_size=384)
    return path


@pytest.fixture(scope="package")
def server(tmp_path_factory, checkpoint) -> Iterator[Server]:
    """It also stops at SIGTERM with open streams, which finish."""
    sections = {
        "model": {"max_model_len": 2048},
        "cache": {"num_blocks": BLOCKS},
        "cluster": {"hang_timeout_s": 60},  # the test of the drain stops the ranks for a while
        "serve": {
            "replicas": 2,
            "log_format": "json",
            "access_log": True,
            "drain_timeout_s": 90,
        },
    }
    with running(tmp_path_factory.mktemp("server"), checkpoint, **sections) as server:
        assert len(server.ranks()) == 2
        yield server
        check_drain(server)


@pytest.fixture(scope="package")
def ray_address(server) -> Iterator[str]:
    """Of the shared server's Ray, for commands that join it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in JOINING.items():
            patch.setenv(name, value)
        yield server.ray_address()
