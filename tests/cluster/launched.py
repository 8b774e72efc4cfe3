"""A Ray cluster that `ray up` starts on the hosts of a bed, from the launcher file of configs/ray."""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.hosts import ROOT, Bed, Host, wait_for

BIN = Path(sys.prefix) / "bin"
LAUNCHER_FILE = ROOT / "configs" / "ray" / "local.yaml"
CLIENT = (Path(__file__).parent / "stream.py").read_text()
# Every process of the hosts runs this repository. The token is what makes commands of Ray welcome.
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
TOKEN = {**ENVIRONMENT, "RAY_AUTH_MODE": "token"}
NODES = """
import json, logging, sys, time, ray
ray.init(address="auto", logging_level=logging.ERROR, log_to_driver=False)
def alive():
    return [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]
deadline = time.monotonic() + float(sys.argv[2])
while len(alive()) != int(sys.argv[1]) and time.monotonic() < deadline:
    time.sleep(0.3)
print(json.dumps(sorted(alive())))
"""


def launcher_file(bed: Bed) -> Path:
    """Write the launcher file of the repository for the hosts of a bed.

    Changed are the lines marked CHANGE, the local paths, and the installation: hosts share Python's folder and have no
    way to a package registry.
    """
    config = yaml.safe_load(LAUNCHER_FILE.read_text())
    head, *others = bed.hosts
    config["provider"] |= {
        "head_ip": head.address,
        "worker_ips": [host.address for host in others],
    }
    config["auth"] = {"ssh_user": "root", "ssh_private_key": str(bed.key)}
    config["min_workers"] = config["max_workers"] = len(others)
    make, install, *rest = config["setup_commands"]
    assert "-m venv ~/phalanx/venv" in make and "pip install" in install
    config["setup_commands"] = [f"ln -sfn {sys.prefix} ~/phalanx/venv", *rest]
    wheel = bed.folder / "dist"
    wheel.mkdir()
    mounts = config["file_mounts"]
    mounts |= {
        "~/phalanx/wheel": str(wheel),
        "~/phalanx/serve.yaml": str(ROOT / mounts["~/phalanx/serve.yaml"]),
    }
    path = bed.folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


class Server:
    """`phalanx serve` on a host."""

    def __init__(self, host: Host, *overrides: str, environment: Mapping[str, str] = TOKEN):
        self.host = host
        self._log = host.folder / "serve.log"
        settings = [word for override in overrides for word in ("--set", override)]
        command = [BIN / "python", "-m", "cluster.cli", "serve", *settings]
        with self._log.open("w") as output:
            self.process = host.start(*command, output=output, environment=environment)

    @property
    def log(self) -> str:
        """What the command has printed."""
        return self._log.read_text()

    def wait_ready(self, timeout: float) -> None:
        """Return when the server answers."""
        wait_for(
            lambda: "ready in" in self.log or self.process.poll() is not None, timeout, "ready"
        )
        assert self.process.poll() is None, self.log

    def stop(self) -> None:
        """End the command, if it runs."""
        if self.process.poll() is None:
            self.host.run("pkill", "-TERM", "-f", "cluster.cli serve")
            self.process.wait(60)

    def groups(self) -> list[dict[str, Any]]:
        """The state of each group, as `phalanx status` shows it."""
        answer = phalanx(self.host, "status", "--json").stdout
        found: list[dict[str, Any]] = json.loads(answer[answer.index("{") :])["groups"]
        return found

    def group(self) -> dict[str, Any]:
        """The state of the only group."""
        (found,) = self.groups()
        return found

    def stream(self, num_tokens: int, timeout: float, **fields: object) -> "Stream":
        """Start a client that streams `num_tokens` tokens."""
        return Stream(self.host, num_tokens, timeout, **fields)


class Stream:
    """A client on a host that streams one completion. `fields`: of its body, such as the prompt."""

    _number = 0

    def __init__(self, host: Host, num_tokens: int, timeout: float, **fields: object):
        Stream._number += 1
        self._host, self._name = host, f"stream-{Stream._number}"
        self._events = host.folder / f"{self._name}.jsonl"
        body = json.dumps({"max_tokens": num_tokens, **fields})
        arguments = (sys.executable, "-c", CLIENT, 8000, body, timeout, self._name)
        with self._events.open("w") as output:
            self._process = host.start(*arguments, output=output)

    def events(self) -> list[dict[str, Any]]:
        """Return the events until now."""
        lines = self._events.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def stop(self) -> None:
        """End the client."""
        self._host.run("pkill", "-TERM", "-f", self._name)
        self._process.wait(20)

    def wait(self, timeout: float) -> list[dict[str, Any]]:
        """Return all events when the client has ended."""
        self._process.wait(timeout)
        return self.events()


def start_cluster(bed: Bed) -> Path:
    """Run `ray up` on the first host; return the launcher file when all hosts are nodes."""
    head = bed.hosts[0]
    ray_command(head, "get-auth-token", "--generate")
    path = launcher_file(bed)
    ray_command(head, "up", path, "-y", "--no-config-cache", timeout=150)
    found = head.run(
        sys.executable, "-c", NODES, len(bed.hosts), 100, timeout=150, environment=TOKEN
    )
    nodes = json.loads(found.stdout.splitlines()[-1])
    assert nodes == [host.address for host in bed.hosts], found.stdout + monitor_log(head)
    return path


def ray_command(
    host: Host,
    *arguments: object,
    timeout: float = 180,
    environment: Mapping[str, str] = TOKEN,
) -> str:
    """Run a command of Ray on a host and return its output."""
    ended = host.run(BIN / "ray", *arguments, timeout=timeout, environment=environment)
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


def share_token(head: Host, others: Iterable[Host]) -> None:
    """Generate the token of a Ray cluster on its head, and give it to other hosts."""
    ray_command(head, "get-auth-token", "--generate")
    token = head.run("cat", ".ray/auth_token").stdout
    for host in others:
        host.run("sh", "-c", f"mkdir .ray && printf %s '{token}' > .ray/auth_token")


def rank_processes(host: Host) -> list[str]:
    """Return the processes of the ranks on a host."""
    return host.run("pgrep", "-f", "ray::RankActor").stdout.split()


def phalanx(
    host: Host, *arguments: object, timeout: float = 120
) -> "subprocess.CompletedProcess[str]":
    """Run a command of Phalanx on a host."""
    return host.run(
        BIN / "python", "-m", "cluster.cli", *arguments, timeout=timeout, environment=TOKEN
    )


def monitor_log(head: Host) -> str:
    """Return the end of the log of Ray's autoscaler, which starts the other nodes."""
    return head.run("tail", "-n", "40", "/tmp/ray/session_latest/logs/monitor.out").stdout


def listeners(host: Host) -> list[str]:
    """Return the addresses on which processes of a host listen beyond the host, with their programs."""
    lines = host.run("ss", "-Hltnp").stdout.splitlines()
    found = [(line.split()[3], line.split("users:")[-1]) for line in lines]
    return [f"{address} {user}" for address, user in found if is_public(address)]


def is_public(address: str) -> bool:
    """Whether an address of `ss` is that of all interfaces."""
    return address.rsplit(":", 1)[0] in ("0.0.0.0", "*", "[::]")
