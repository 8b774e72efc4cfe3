"""Fetches the weights of a model of the Hub to this machine, before a command starts Ray.

The download runs in a process of its own, because threads that wait for the network cannot be interrupted.
"""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from cluster.config.phalanx_config import PhalanxConfig
from workers import hub

POLL_S = 0.1


def is_needed(config: PhalanxConfig) -> bool:
    """Whether the ranks run on this machine with weights of the Hub. Ranks of a joined cluster fetch on their nodes."""
    model = config.model
    return (
        model.revision is not None
        and model.weights == "checkpoint"
        and config.cluster.ray_address is None
    )


def run(config: PhalanxConfig, stopped: Callable[[], bool] = lambda: False) -> None:
    """Fetch the weights with huggingface_hub's progress on standard error; return early once `stopped()`.

    Does nothing for a folder. Raises HubError.
    """
    if not is_needed(config):
        return
    # With this process's sys.path: -m would import from the user's folder first.
    program = f"import sys; sys.path[:] = {sys.path!r}; from cluster.commands.download import fetch; fetch()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, config.model.path, str(config.model.revision)],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        with process.stdout:
            while process.poll() is None and not stopped():
                time.sleep(POLL_S)
            if process.poll() is not None:
                _raise_error(process.stdout.read(), process.returncode)
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def fetch() -> None:
    """Run in the process: fetch the model of the arguments, write a HubError to standard output."""
    name, commit = sys.argv[1:]
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)  # the output of libraries must not mix with the error
        try:
            hub.fetch_weights(name, commit, bars=True)
        except hub.HubError as error:
            answer.write(pickle.dumps(error))


def _raise_error(answer: bytes, exit_code: int) -> None:
    if answer:
        raise pickle.loads(answer)
    if exit_code:
        raise hub.HubError(f"the download ended with exit code {exit_code}; its error stands above")
