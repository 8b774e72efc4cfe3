"""gloo binds to the interface of the node's address, whatever the host name resolves to."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from workers.rank import network
from workers.rank.network import address_on, address_towards, bind_to_address, interface_of

ROOT = Path(__file__).parents[2]
# One rank of two, in a network namespace of its own; argv: rank, own address, whether to bind.
RANK = """
import os, socket, sys
from workers.rank.network import bind_to_address
rank, address, bind = int(sys.argv[1]), sys.argv[2], sys.argv[3] == "bind"
if bind:
    bind_to_address(os.environ, address)
import torch
from workers.parallel import ParallelDims
from workers.rank import process_group
from workers.rank.rank_info import Rendezvous
if rank == 0:
    store = torch.distributed.TCPStore("10.77.0.1", 29777, is_master=True, wait_for_workers=False)
meet = Rendezvous("10.77.0.1", 29777, "hosts", secret=b"hosts")
process_group.join(meet, rank, ParallelDims(num_ranks=2, num_nodes=2), torch.device("cpu"), 60)
line = f"found {process_group.gather_json(rank)}\\n"
os.write(1, line.encode())  # one write: both ranks share the pipe
torch.distributed.barrier()
process_group.leave()
"""


def test_the_interface_of_an_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("127.0.1.1") == "lo"
    assert interface_of("192.0.2.77") is None and interface_of("no address") is None
    table = tmp_path / "if_inet6"
    table.write_text(
        "00000000000000000000000000000001 01 80 10 80       lo\n"
        "fe80000000000000004200fffe110002 02 40 20 80     eth7\n"
    )
    monkeypatch.setattr(network, "IPV6_ADDRESSES", table)
    assert interface_of("fe80::42:ff:fe11:2%eth7") == "eth7" and interface_of("::1") == "lo"


def test_the_address_in_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    of_host = {"127.0.0.1": "lo", "10.1.2.3": "eth0", "192.168.0.5": "eth1"}
    ipv6 = {"::1": "lo", "fe80::1": "eth0", "fd00::5": "eth0", "fe80::2": "eth2"}
    monkeypatch.setattr(network, "_ipv4_interfaces", lambda: of_host)
    monkeypatch.setattr(network, "_ipv6_interfaces", lambda: ipv6)
    assert address_on("10.0.0.0/8") == "10.1.2.3" and address_on("fd00::/8") == "fd00::5"
    assert address_on("eth0") == "10.1.2.3" and address_on("eth1") == "192.168.0.5"
    for missing in ("172.16.0.0/12", "eth2", "ib0"):
        with pytest.raises(
            ValueError, match=rf"has no address in {missing}, only .*10\.1\.2\.3 on"
        ):
            address_on(missing)


def test_the_address_towards_a_host() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1" and address_towards("::1") == "::1"


def test_settings_of_the_user_stay() -> None:
    environment = {"GLOO_SOCKET_IFNAME": "mine"}
    bind_to_address(environment, "127.0.0.1")
    assert environment == {
        "GLOO_SOCKET_IFNAME": "mine",
        "NCCL_SOCKET_IFNAME": "=lo",
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo",
    }
    unknown: dict[str, str] = {}
    bind_to_address(unknown, "192.0.2.77")
    assert unknown == {}


HOSTS = """
set -e
mount --make-rprivate /
printf '127.0.0.1 localhost\\n127.0.1.1 two-hosts\\n' > "$1/hosts"
mount --bind "$1/hosts" /etc/hosts
hostname two-hosts
unshare --net sh -c 'echo $$ > "'"$1"'/other"; exec sleep 60' &
while [ ! -s "$1/other" ]; do sleep 0.05; done
other=$(cat "$1/other")
ip link set dev lo up
ip link add name side0 type veth peer name side1
ip link set dev side1 netns "$other"
ip address add 10.77.0.1/24 dev side0
ip link set dev side0 up
nsenter --net="/proc/$other/ns/net" sh -c 'ip link set dev lo up
ip address add 10.77.0.2/24 dev side1; ip link set dev side1 up'
nsenter --net="/proc/$other/ns/net" "$2" -c "$3" 1 10.77.0.2 "$4" &
"$2" -c "$3" 0 10.77.0.1 "$4"
result=$?
wait $!
kill "$other"
exit $result
"""


def two_hosts(folder: Path, bind: str) -> "subprocess.CompletedProcess[str]":
    """Two ranks in two network namespaces, joined by a pair of virtual interfaces; the host name is 127.0.1.1."""
    names = {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
    environment = {key: value for key, value in os.environ.items() if key not in names}
    command = ["unshare", "--net", "--uts", "--mount", "sh", "-c", HOSTS, "sh"]
    arguments = [str(folder), sys.executable, RANK, bind]
    return subprocess.run(
        [*command, *arguments],
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )


def namespaces_unavailable() -> str | None:
    script = "ip link add name p0 type veth peer name p1 && mount --make-rprivate / && hostname x"
    try:
        command = ["unshare", "--net", "--uts", "--mount", "sh", "-c", script]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except OSError as error:
        return str(error)
    return None if ended.returncode == 0 else ended.stderr.strip()


@pytest.mark.skipif(bool(namespaces_unavailable()), reason="no network namespaces here")
def test_two_hosts_form_a_group_where_the_host_name_is_loopback(tmp_path: Path) -> None:
    (tmp_path / "bound").mkdir()
    started = time.monotonic()
    bound = two_hosts(tmp_path / "bound", "bind")
    print(f"two hosts: {time.monotonic() - started:.1f} s with the start of Python")
    assert bound.returncode == 0 and bound.stdout.count("found [0, 1]") == 2, bound.stderr
