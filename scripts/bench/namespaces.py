"""Two hosts on one machine: network namespaces joined by a pair of virtual interfaces. Needs root.

They share processors, files and /dev/shm, but reach each other by their addresses alone. Nothing is left when they are
closed, because the namespaces end with the processes that hold them.
"""

import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Self

ADDRESSES = {4: ("10.78.0.1", "10.78.0.2"), 6: ("fd00:78::1", "fd00:78::2")}
PREFIX = {4: 24, 6: 64}
NOBODY = "02:00:00:00:00:99"  # an address of no interface
HOLD = "import sys; print(flush=True); sys.stdin.read()"  # until the other end of stdin is closed


def unavailable() -> str | None:
    """Return why this machine cannot have the hosts, or None."""
    try:
        with TwoHosts() as hosts:
            return hosts.problem
    except OSError as error:
        return str(error)


class TwoHosts:
    """Two hosts with one address each, of IP `version`."""

    def __init__(self, version: int = 4):
        self.addresses = ADDRESSES[version]
        self.problem: str | None = None
        self._holders = [
            subprocess.Popen(
                ["unshare", "--net", sys.executable, "-S", "-c", HOLD],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            for _ in self.addresses
        ]
        try:
            self._join(version)
        except (OSError, subprocess.CalledProcessError) as error:
            output = getattr(error, "stderr", None)
            self.problem = (output or str(error)).strip()

    def command(self, host: int, arguments: Sequence[str]) -> list[str]:
        """Return the command line that runs `arguments` on a host."""
        return ["nsenter", f"--net=/proc/{self._holders[host].pid}/ns/net", *arguments]

    def run(self, host: int, *arguments: str) -> None:
        """Run a command on a host. Raises CalledProcessError."""
        command = self.command(host, arguments)
        subprocess.run(command, check=True, capture_output=True, text=True)

    def cut(self) -> None:
        """Lose all packets between the hosts from now on; their interfaces stay up."""
        for host, peer in enumerate(reversed(self.addresses)):
            entry = [peer, "lladdr", NOBODY, "dev", f"side{host}", "nud", "permanent"]
            self.run(host, "ip", "neighbour", "replace", *entry)

    def mend(self) -> None:
        """End the loss of packets."""
        for host, peer in enumerate(reversed(self.addresses)):
            self.run(host, "ip", "neighbour", "delete", peer, "dev", f"side{host}")

    def close(self) -> None:
        """End the hosts. Processes on them keep theirs alive."""
        for holder in self._holders:
            assert holder.stdin is not None and holder.stdout is not None
            holder.stdin.close()
            holder.stdout.close()
        for holder in self._holders:
            holder.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _join(self, version: int) -> None:
        for holder in self._holders:
            assert holder.stdout is not None
            if not holder.stdout.readline():
                raise OSError("unshare --net is not permitted")
        first, second = (str(holder.pid) for holder in self._holders)
        link = ["ip", "link", "add", "name", "side0", "netns", first, "type", "veth"]
        subprocess.run(
            [*link, "peer", "name", "side1", "netns", second],
            check=True,
            capture_output=True,
            text=True,
        )
        for host, address in enumerate(self.addresses):
            device = f"side{host}"
            options = ["nodad"] if version == 6 else []
            self.run(host, "ip", "link", "set", "dev", "lo", "up")
            self.run(host, "ip", "link", "set", "dev", device, "up")
            place = f"{address}/{PREFIX[version]}"
            self.run(host, "ip", "address", "add", place, "dev", device, *options)
