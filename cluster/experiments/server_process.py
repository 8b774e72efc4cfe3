"""The process of a server of kind http: `phalanx serve`, which stops with the process of the experiment."""

import signal
import sys

from cluster.experiments.parent_death import stop_with_parent


def main() -> None:
    """Entry point; the first argument is the process of the experiment, the others are those of `phalanx`."""
    stop_with_parent(int(sys.argv.pop(1)), signal.SIGINT)
    from cluster.cli import main as phalanx

    phalanx()
