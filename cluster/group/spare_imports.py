"""Modules of a rank in a spare process: a note for the next process that Ray starts on a node.

Ray keeps a process that has run nothing for the next actor, so the modules must be there before the process runs
anything: `preload` is imported as it starts.
"""

import importlib
import time

from ray.experimental import internal_kv
from ray.runtime_context import get_runtime_context

MODULES = ("torch", "workers.rank.epoch")
"""Neither starts CUDA, which reads CUDA_VISIBLE_DEVICES once."""
NOTE_S = 10.0
"""Time in which a process starts. Ray starts none if one waits already, and the note then is for no other process."""


def request(node_id: str) -> None:
    """Let the next process that starts on a node import the modules of a rank."""
    internal_kv._internal_kv_put(_key(node_id), str(time.time()).encode(), overwrite=True)


def import_if_requested() -> None:
    """Import the modules if this node has a note, which one process alone finds."""
    key = _key(get_runtime_context().get_node_id())
    note = internal_kv._internal_kv_get(key)
    if note is None or not internal_kv._internal_kv_del(key):
        return
    if time.time() - float(note) < NOTE_S:
        for module in MODULES:
            importlib.import_module(module)


def _key(node_id: str) -> bytes:
    return f"phalanx:spare:{node_id}".encode()
