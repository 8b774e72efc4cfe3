"""Engines over two hosts: network namespaces with IPv6 addresses, and a cable that is pulled."""

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.bench import namespaces
from scripts.bench.hosts import CONFIG, Layout
from tests.checkpoints.writer import make_checkpoint

pytestmark = pytest.mark.skipif(
    bool(namespaces.unavailable()), reason=f"no network namespaces: {namespaces.unavailable()}"
)

# Only a host that does not answer may end the wait: a slow rank would have five minutes.
LIMITS = ("cluster.hang_timeout_s=3", "cluster.vote_timeout_s=300")
LOAD = {"requests": 8, "concurrency": 4, "input_len": 12, "output_len": 8}

RESOLVER = "nameserver fd00:78::53\noptions timeout:2 attempts:1\n"


class HostsWithSilentNameServer(namespaces.TwoHosts):
    """Hosts with IPv6 addresses; a look-up of a name or an address takes 2 s and fails."""

    def __init__(self, folder: Path):
        self._resolver = folder / "resolv.conf"
        self._resolver.write_text(RESOLVER)
        super().__init__(version=6)
        for host in range(2):
            entry = ["fd00:78::53", "lladdr", namespaces.NOBODY, "dev", f"side{host}"]
            self.run(host, "ip", "neighbour", "replace", *entry, "nud", "permanent")

    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        script = f'mount --bind {self._resolver} /etc/resolv.conf && exec "$@"'
        command = ["unshare", "--mount", "sh", "-c", script, "sh", *arguments]
        return super().command(host, command)


def test_two_hosts_serve_until_the_cable_is_pulled_in_the_middle_of_a_load(tmp_path: Path) -> None:
    config = tmp_path / "hosts.yaml"
    config.write_text(CONFIG % make_checkpoint(tmp_path / "model"))
    errors = tmp_path / "errors"
    with HostsWithSilentNameServer(tmp_path) as hosts, errors.open("w") as stderr:
        layout = Layout("two hosts", 2, 2, LIMITS, stderr)
        try:
            layout.start(hosts, config, LOAD)
            assert layout.all2all == "hierarchical"
            assert all(rate > 0 for rate in layout.run("load"))
            started = errors.read_text()
            assert "Exception raised" not in started and "Traceback" not in started, started
            layout.send("load 1000000")
            time.sleep(1)
            hosts.cut()
            pulled = time.monotonic()
            for process in layout.processes:
                assert process.wait(120) != 0
            print(f"noticed after {time.monotonic() - pulled:.1f} s")
        finally:
            layout.stop()
    assert errors.read_text().count("has not answered for 3 s (cluster.hang_timeout_s)") == 2
