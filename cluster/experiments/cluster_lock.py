"""One experiment at a time: a lock file for the ranks of this machine, an actor with a name for a Ray cluster.

The actor belongs to a process that lives as long as the experiment, and Ray ends the actor with that process. The
process is not that of the experiment, because Ray ends processes that have joined a cluster with the cluster.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cluster.config.phalanx_config import PhalanxConfig
from cluster.experiments.results_folder import FolderError, locked

NAME = "experiment"
HELD = "held"
ANSWER_S = 20.0
STOP_S = 10.0
POLL_S = 0.1
PROGRAM = """import signal
from cluster.experiments.parent_death import stop_with_parent
stop_with_parent({parent}, signal.SIGKILL)
from cluster.experiments.cluster_lock import hold
hold({config!r}, {owner!r})"""


class Holder:
    """The actor. `owner`: the process of the experiment, for the error of the next one."""

    def __init__(self, owner: str):
        self._owner = owner

    def owner(self) -> str:
        """Return the process of the experiment."""
        return self._owner


@contextmanager
def experiment_lock(config: PhalanxConfig) -> Iterator[None]:
    """Hold this machine's ranks, or the Ray cluster of a configuration, for one experiment. Raises FolderError."""
    folder = Path(tempfile.gettempdir()) / f"phalanx-experiments-{os.getuid()}"
    if config.cluster.ray_address is None:
        with locked(folder / "local.lock", "this machine"):
            yield
    else:
        with _cluster_lock(config):
            yield


@contextmanager
def _cluster_lock(config: PhalanxConfig) -> Iterator[None]:
    owner = f"{os.getpid()} on {os.uname().nodename}"
    program = PROGRAM.format(parent=os.getpid(), config=config.model_dump_json(), owner=owner)
    process = subprocess.Popen(
        # With this process's sys.path: -m would import from the current folder first.
        [sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}\n{program}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C reaches this process alone
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        lines = iter(process.stdout.readline, "")
        answer = next((line for line in lines if line.startswith((HELD, "error: "))), "")
        if not answer.startswith(HELD):
            reason = answer.removeprefix("error: ").strip()
            raise FolderError(reason or f"cannot join Ray at {config.cluster.ray_address}")
        yield
    finally:
        process.stdin.close()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:  # the cluster does not answer
            process.kill()
            process.wait()
        process.stdout.close()


def hold(text: str, owner: str) -> None:
    """Create the actor, print that it is held or why not, and return when standard input ends."""
    from cluster.commands.start import ServerError, start_ray

    config = PhalanxConfig.model_validate_json(text)
    try:
        start_ray(config)
        holder = _create(str(config.cluster.ray_address), owner)
    except (ServerError, FolderError) as error:
        print(f"error: {' '.join(str(error).split())}", flush=True)
    else:
        print(HELD, flush=True)
        sys.stdin.read()
        del holder  # with its last handle Ray ends the actor
    import ray

    ray.shutdown()


def _create(address: str, owner: str) -> Any:
    """Return the actor in the cluster that was joined. Raises FolderError if another experiment has one."""
    import ray

    actor_class: Any = ray.remote(Holder)
    while True:
        try:
            holder = actor_class.options(name=NAME, num_cpus=0).remote(owner)
            ray.get(holder.owner.remote(), timeout=ANSWER_S)
            return holder
        except ValueError:  # Ray has an actor of this name
            found = _owner()
        if found is not None:
            raise FolderError(
                f"the Ray cluster {address} is in use by another experiment, process {found}; wait for its end"
            )
        time.sleep(POLL_S)


def _owner() -> str | None:
    """Return the process of the experiment that holds the cluster; None if it has ended meanwhile."""
    import ray
    from ray.exceptions import RayActorError

    try:
        return str(ray.get(ray.get_actor(NAME).owner.remote(), timeout=ANSWER_S))
    except (ValueError, RayActorError):
        return None
