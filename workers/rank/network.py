"""The address and the interface by which a rank reaches the ranks of other hosts. Imports no torch.

gloo and NCCL otherwise resolve the host name or take the first interface. A host name that resolves to nothing, or to
127.0.1.1 as on Debian, binds gloo to the loopback interface, which other hosts cannot reach.
"""

import array
import fcntl
import ipaddress
import socket
import struct
from collections.abc import MutableMapping
from pathlib import Path

_SIOCGIFCONF = 0x8912
_ENTRY_BYTES = 40  # of struct ifreq on 64-bit Linux: a name of 16 bytes, then a sockaddr_in
_MAX_ENTRIES = 256
IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def interface_of(address: str) -> str | None:
    """Return the network interface that owns an IPv4 or IPv6 address of this host; None if there is none."""
    try:
        wanted = ipaddress.ip_address(address.split("%")[0])
    except ValueError:
        return None
    found = _ipv4_interfaces() if wanted.version == 4 else _ipv6_interfaces()
    name = found.get(str(wanted))
    if name is None and wanted.is_loopback:
        return found.get("127.0.0.1")  # which owns 127.0.0.0/8
    return name


def address_of_host(network: str | None, peer: str) -> str:
    """Return the address of this host in `network`, where there is one, otherwise that towards the host `peer`."""
    return address_on(network) if network else address_towards(peer)


def address_on(network: str) -> str:
    """Return this host's address in `network`: 10.1.0.0/16, fd00::/8, or an interface with its name.

    An interface with addresses of both kinds gives an IPv4 address. Raises ValueError with this host's addresses.
    """
    found = {**_ipv4_interfaces(), **_ipv6_interfaces()}
    try:
        wanted = ipaddress.ip_network(network)
        addresses = [address for address in found if ipaddress.ip_address(address) in wanted]
    except ValueError:
        addresses = [address for address, interface in found.items() if interface == network]
    # An address that begins with fe80 is one of its interface alone.
    addresses = [x for x in addresses if not ipaddress.ip_address(x).is_link_local]
    if not addresses:
        there = ", ".join(f"{address} on {interface}" for address, interface in found.items())
        raise ValueError(
            f"cluster.network: {socket.gethostname()} has no address in {network}, only {there}"
        )
    return addresses[0]


def address_towards(host: str) -> str:
    """Return the IPv4 or IPv6 address of this host from which it reaches `host`. Sends nothing."""
    family, kind, _, _, peer = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(peer)
        address: str = probe.getsockname()[0]
    return address


def bind_to_address(environment: MutableMapping[str, str], address: str) -> None:
    """Let gloo, NCCL and NVSHMEM use the interface of `address`, before they start. Settings of the user stay."""
    interface = interface_of(address)
    if interface is None:
        return
    environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    environment.setdefault(
        "NCCL_SOCKET_IFNAME", f"={interface}"
    )  # without "=" it would be a prefix
    environment.setdefault("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", interface)


def _ipv4_interfaces() -> dict[str, str]:
    buffer = array.array("B", bytes(_ENTRY_BYTES * _MAX_ENTRIES))
    start, length = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("iL", length, start)
        filled = struct.unpack("iL", fcntl.ioctl(any_socket.fileno(), _SIOCGIFCONF, asked))[0]
    entries = bytes(buffer[:filled])
    found: dict[str, str] = {}
    for at in range(0, filled, _ENTRY_BYTES):
        name = entries[at : at + 16].split(b"\0")[0].decode().split(":")[0]  # eth0:1 is a label
        found[socket.inet_ntoa(entries[at + 20 : at + 24])] = name
    return found


def _ipv6_interfaces() -> dict[str, str]:
    if not IPV6_ADDRESSES.is_file():
        return {}
    rows = [line.split() for line in IPV6_ADDRESSES.read_text().splitlines()]
    return {str(ipaddress.IPv6Address(bytes.fromhex(row[0]))): row[5] for row in rows}
