"""One experiment at a time from this machine, on its ranks or on a Ray cluster."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster.config.phalanx_config import PhalanxConfig
from cluster.experiments.results_folder import locked


@contextmanager
def experiment_lock(config: PhalanxConfig) -> Iterator[None]:
    """Hold this machine's ranks, or the Ray cluster of a configuration, for one experiment. Raises FolderError."""
    folder = Path(tempfile.gettempdir()) / f"phalanx-experiments-{os.getuid()}"
    address = config.cluster.ray_address
    if address is None:
        name, what = "local", "this machine"
    else:
        name, what = address.replace("/", "_"), f"the Ray cluster {address}"
    with locked(folder / f"{name}.lock", what):
        yield
