"""The hosts of the test bed are apart, and nothing of them is left; test_scenario.py runs a cluster on them."""

from pathlib import Path

import pytest

from tests.cluster import hosts
from tests.cluster.hosts import wait_for
from tests.cluster.launched import is_public

REASON = hosts.unavailable(ssh=True)


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
def test_hosts_are_apart_and_a_cable_can_be_pulled(tmp_path: Path) -> None:
    with hosts.bed(tmp_path, 2, {"COLOUR": "deep blue"}) as bed:
        one, other = bed.hosts
        ssh = ("ssh", "-i", bed.key, "-o", "StrictHostKeyChecking=no")
        command = "hostname; echo $COLOUR; ls -A /dev/shm; ls ~/.ssh 2>&1"
        answer = one.run(*ssh, f"root@{other.address}", command)
        assert "host2\ndeep blue\nls: cannot access" in answer.stdout, answer.stdout
        one.run("touch", "/dev/shm/mine", "/tmp/mine", "mine")
        for folder in ("/dev/shm", "/tmp", str(hosts.HOME)):
            assert "mine" in one.run("ls", folder).stdout.split()
            assert "mine" not in other.run("ls", folder).stdout.split()
        bed.pull_cable(other)
        soon = ("-o", "ConnectTimeout=2")
        assert one.run(*ssh, *soon, f"root@{other.address}", "true").returncode != 0
        bed.plug_cable(other)
        assert one.run(*ssh, f"root@{other.address}", "true").returncode == 0
        bed.lose(other)
        wait_for(lambda: not Path(f"/proc/{other.pid}").exists(), 60, "the host is gone")
        mine = [one.pid, other.pid]
    assert not any(Path(f"/proc/{pid}").exists() for pid in mine), "no process is left"
    assert str(tmp_path) not in Path("/proc/mounts").read_text(), "no mount is left"


def test_is_public() -> None:
    assert is_public("0.0.0.0:80") and is_public("*:80") and is_public("[::]:80")
    assert not is_public("127.0.0.1:80") and not is_public("[::1]:80")
