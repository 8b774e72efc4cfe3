"""Modules of a rank in a process that Ray starts for a later rank.

Ray keeps a process that has run nothing for the next actor with the same environment variables. The variable here
reserves such a process for ranks: a supervisor or an HTTP process that Ray starts anew would keep torch in memory and
leave the next rank without a spare process. The modules must be there before the process runs anything: `preload` is
imported as it starts.
"""

import importlib
import os

VARIABLE = "PHALANX_SPARE_RANK"
MODULES = ("torch", "workers.rank.actor", "workers.rank.epoch")
"""Neither starts CUDA, which reads CUDA_VISIBLE_DEVICES once."""


def import_if_requested() -> None:
    """Import the modules in a process with the variable."""
    if VARIABLE in os.environ:
        for module in MODULES:
            importlib.import_module(module)
