"""Several hosts on one Linux machine: network namespaces joined by a bridge.

Each host has its own network, mounts, processes and host name, its own /tmp, /run, /sys, /dev/shm and home, and, on a
bed with ssh, an sshd that takes the bed's key. The repository and Python's folders are those of the machine. All
namespaces belong to one process: when it ends, the kernel ends every process, mount and interface of the bed.
"""

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
HOME = Path.home()
NETWORK, NETWORK6 = "10.77.7", "fd77:7:"
PROGRAMS = ("unshare", "nsenter", "ip", "mount", "ss", "ps", "pkill")
LAUNCHER_PROGRAMS = ("sshd", "ssh", "ssh-keygen", "rsync")
"""What `ray up` needs on a bed with sshd."""
SEARCHED = f"{os.environ.get('PATH', '')}:/usr/local/sbin:/usr/sbin:/sbin"
START_S = 30.0

# Bash is process 1 of each PID namespace: it reaps the orphans of Ray, which `ray stop` would wait for as zombies.
SWITCH = """
set -e
mount --make-rprivate /
mount -t proc proc /proc
ip link set dev lo up
ip link add name switch type bridge
ip link set dev switch up
echo ready
sleep infinity & wait
"""
# Arguments: name, folder of the host, folders of the machine that stay visible.
HOST = """
set -e
name=$1 folder=$2
shift 2
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /mnt
for hidden in /tmp "$HOME"; do
    mkdir -p "/mnt/own$hidden"
    for path; do
        case $path/ in "$hidden"/*) mkdir -p "/mnt/own$path"; mount --rbind "$path" "/mnt/own$path";; esac
    done
done
for hidden in /tmp "$HOME"; do mount --rbind "/mnt/own$hidden" "$hidden"; done
chmod 1777 /tmp
for own in /dev/shm /run; do mount -t tmpfs tmpfs "$own"; done
mount -t sysfs sysfs /sys
mkdir /run/sshd
mount --bind "$folder/hosts" /etc/hosts
hostname "$name"
ip link set dev lo up
echo ready
read -r linked
if test -e "$folder/sshd_config"; then /usr/sbin/sshd -f "$folder/sshd_config" -E "$folder/sshd.log"; fi
echo ready
sleep infinity & wait
"""
SSHD = """
ListenAddress {address}
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
SetEnv {environment}
"""


@functools.cache
def unavailable(*, ssh: bool = False) -> str | None:
    """Return the reason why there can be no bed on this machine; None if there can. `ssh`: a bed with ssh."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        return "hosts need Linux and root"
    programs = PROGRAMS + (LAUNCHER_PROGRAMS if ssh else ())
    missing = [name for name in programs if shutil.which(name, path=SEARCHED) is None]
    if missing:
        return f"hosts need {', '.join(missing)} (Debian: openssh-server, rsync, iproute2)"
    script = "mount --make-rprivate / && ip link add name b type bridge && ip link add name p0 type veth peer name p1"
    command = ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "sh", "-c"]
    tried = subprocess.run([*command, script], capture_output=True, text=True, timeout=20)
    return None if tried.returncode == 0 else f"no namespaces here: {tried.stderr.strip()}"


@dataclass(frozen=True)
class Host:
    """One host of a bed. `pid`: its process 1, by the machine's number."""

    name: str
    address: str
    address6: str
    folder: Path
    pid: int

    def command(
        self, *arguments: object, environment: Mapping[str, str] | None = None
    ) -> list[str]:
        """Return a command line of this machine that runs `arguments` on the host, in its home folder."""
        enter = ["nsenter", "--target", str(self.pid), "--all"]
        variables = [f"{key}={value}" for key, value in (environment or {}).items()]
        # nsenter's own --wd would be the home folder of the machine, which it opens before it enters.
        return [*enter, "env", f"--chdir={HOME}", *variables, *map(str, arguments)]

    def run(
        self, *arguments: object, timeout: float = 60, environment: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        """Run a command on the host and return its output, standard error too."""
        return subprocess.run(
            self.command(*arguments, environment=environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
        )

    def start(
        self,
        *arguments: object,
        output: int | IO[str],
        environment: Mapping[str, str] | None = None,
    ) -> "subprocess.Popen[str]":
        """Start a command on the host; its output and errors go to `output`."""
        return subprocess.Popen(
            self.command(*arguments, environment=environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def python(self, script: str, *arguments: object, timeout: float = 60) -> str:
        """Run Python on the host and return its output. Fails the test where the script fails."""
        ended = self.run(sys.executable, "-c", script, *arguments, timeout=timeout)
        assert ended.returncode == 0, ended.stdout
        return ended.stdout

    def processes(self) -> list[str]:
        """Return the command lines of the processes of the host, without process 1 and its sleep."""
        lines = self.run("ps", "-wweo", "pid=,args=").stdout.splitlines()
        ours = ("ps -wweo", "sleep infinity", "/usr/sbin/sshd", "sshd:")
        found = [line.split(None, 1) for line in lines]
        return [args for pid, args in found if pid != "1" and not args.startswith(ours)]


class Bed:
    """The hosts `host1` to `hostN` of a folder, joined by a bridge.

    ssh_environment  variables of commands that come over ssh; None: the hosts have no sshd
    visible          folders of the machine that the hosts see beside the repository and Python's
    """

    def __init__(
        self,
        folder: Path,
        num_hosts: int,
        ssh_environment: Mapping[str, str] | None = None,
        visible: Sequence[Path] = (),
    ):
        self.folder = folder
        self.key = folder / "key"
        self._ssh_environment = ssh_environment
        self._visible = (folder, ROOT, Path(sys.prefix), Path(sys.base_prefix), *visible)
        self._held: list[subprocess.Popen[str]] = []
        self.hosts: list[Host] = []
        if ssh_environment is not None:
            generate = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key)]
            subprocess.run(generate, check=True)
        self._switch = self._hold(_unshare(), SWITCH)
        try:
            for number in range(1, num_hosts + 1):
                self.hosts.append(self._add_host(number))
        except BaseException:
            self.close()
            raise

    def pull_cable(self, host: Host) -> None:
        """Cut a host off from the bridge."""
        self._ip("link", "set", "dev", host.name, "down")

    def plug_cable(self, host: Host) -> None:
        """Join a host to the bridge again."""
        self._ip("link", "set", "dev", host.name, "up")

    def lose(self, host: Host) -> None:
        """End a host with all its processes at once, as a power cut does."""
        os.kill(host.pid, 9)

    def close(self) -> None:
        """End all hosts: their namespaces end with their last process."""
        for process in reversed(self._held):
            process.kill()
        for process in self._held:
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        pids = [self._switch, *(host.pid for host in self.hosts)]
        wait_for(
            lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 20, "all hosts end"
        )

    def _add_host(self, number: int) -> Host:
        name, address = f"host{number}", f"{NETWORK}.{number}"
        address6 = f"{NETWORK6}:{number}"
        folder = self.folder / name
        folder.mkdir()
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {name}\n")
        if self._ssh_environment is not None:
            self._write_sshd_config(folder, address, self._ssh_environment)
        enter = ["nsenter", "--target", str(self._switch), "--pid", "--mount"]
        pid = self._hold([*enter, *_unshare()], HOST, name, folder, *self._visible)
        self._ip("link", "add", "name", name, "type", "veth", "peer", "name", "eth0", "netns", pid)
        self._ip("link", "set", "dev", name, "master", "switch", "up")
        host = Host(name, address, address6, folder, pid)
        # Ray finds the address of a host by its default route.
        up = "ip link set dev eth0 up && ip route add default dev eth0"
        address_both = (
            f"ip address add {address}/24 dev eth0 && ip address add {address6}/64 dev eth0 nodad"
        )
        script = f"{address_both} && {up}"
        ended = host.run("sh", "-c", script)
        assert ended.returncode == 0, ended.stdout
        holder = self._held[-1]
        assert holder.stdin is not None
        holder.stdin.write("linked\n")
        holder.stdin.flush()
        _expect_ready(holder)
        return host

    def _write_sshd_config(
        self, folder: Path, address: str, environment: Mapping[str, str]
    ) -> None:
        variables = " ".join(f'"{key}={value}"' for key, value in environment.items())
        for part in ("key", "key.pub"):
            shutil.copy(self.folder / part, folder / part)
        (folder / "sshd_config").write_text(
            SSHD.format(address=address, folder=folder, environment=variables)
        )

    def _ip(self, *arguments: object) -> None:
        enter = ["nsenter", "--target", str(self._switch), "--net"]
        command = [*enter, "ip", *map(str, arguments)]
        subprocess.run(command, check=True, capture_output=True)

    def _hold(self, enter: list[str], script: str, *arguments: object) -> int:
        """Start process 1 of new namespaces and return its number."""
        process = subprocess.Popen(
            [*enter, "bash", "-c", script, "bash", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PATH": SEARCHED},
        )
        self._held.append(process)
        _expect_ready(process)
        return _innermost(process.pid)


@contextlib.contextmanager
def bed(
    folder: Path,
    num_hosts: int,
    ssh_environment: Mapping[str, str] | None = None,
    visible: Sequence[Path] = (),
) -> Iterator[Bed]:
    """Yield a bed, see Bed; afterwards nothing of it is left but the files of `folder`."""
    made = Bed(folder, num_hosts, ssh_environment, visible)
    try:
        yield made
    finally:
        made.close()


def _unshare() -> list[str]:
    own = ("--net", "--pid", "--mount", "--uts", "--ipc")
    return ["unshare", *own, "--fork", "--kill-child=KILL"]


def _expect_ready(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "ready\n", f"a host did not start: {process.args}"


def _innermost(pid: int) -> int:
    """Return the last of a chain of only children, which is process 1 of its PID namespace."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if (inner := _process_one(pid)) is not None:
            return inner
        time.sleep(0.01)
    raise AssertionError(f"process {pid} has started no namespace")


def _process_one(pid: int) -> int | None:
    while True:
        status = Path(f"/proc/{pid}/status").read_text()
        numbers = next(line for line in status.splitlines() if line.startswith("NSpid:")).split()
        if len(numbers) > 2 and numbers[-1] == "1":
            return pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if len(children) != 1:
            return None
        pid = int(children[0])


def wait_for(condition: Any, timeout: float, what: str) -> Any:
    """Return the first true result of `condition`."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if result := condition():
            return result
        time.sleep(0.2)
    raise AssertionError(f"not within {timeout:g} s: {what}")
