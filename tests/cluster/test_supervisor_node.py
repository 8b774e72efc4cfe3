"""Three hosts, of which the one with `phalanx serve` and its supervisor is lost, while Ray's head goes on."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import hosts
from tests.cluster.hosts import Bed, Host, wait_for
from tests.cluster.launched import (
    Server,
    rank_processes,
    ray_command,
    share_token,
)

REASON = hosts.unavailable()
pytestmark = [
    pytest.mark.exhaustive,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.timeout(1200),
]

START_S = 300.0
ENDED_S = 150.0
"""Time in which ranks without a supervisor must end: Ray misses a node after about 30 s, and ranks ask for 60 s."""
NUM_TOKENS = 300


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    with hosts.bed(tmp_path, 3) as made:
        head, *others = made.hosts
        share_token(head, others)
        ray_command(head, "start", "--head", "--port=6379", f"--node-ip-address={head.address}")
        for host in others:
            join = ("start", f"--address={head.address}:6379")
            ray_command(host, *join, f"--node-ip-address={host.address}")
        yield made


def server_on(host: Host, ranks: int) -> Server:
    """Start a server of the demo with one rank on each of so many hosts."""
    server = Server(
        host,
        *("cluster.ray_address=auto", f"cluster.nodes={ranks}", f"cluster.ranks={ranks}"),
        *("serve.model_name=demo", "overlap.mode=off"),
    )
    server.wait_ready(START_S)
    return server


def test_ranks_end_with_the_host_of_their_supervisor(bed: Bed) -> None:
    """They free their places, which another server takes."""
    head, serving, other = bed.hosts
    server_on(serving, 3)
    assert all(map(rank_processes, bed.hosts)), "one rank a host"
    bed.lose(serving)
    lost = time.monotonic()
    wait_for(
        lambda: not rank_processes(head) and not rank_processes(other), ENDED_S, "the ranks end"
    )
    print(f"\nthe ranks have ended {time.monotonic() - lost:.1f} s after their supervisor's host")
    server = server_on(head, 2)
    stream = server.stream(NUM_TOKENS, 60)
    assert stream.wait(150)[-1].get("done"), stream.events()[-2:]
    server.stop()
