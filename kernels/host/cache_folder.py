"""The folder of compiled kernels, one for all ranks of a user on a host."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder below the user's cache folder; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "phalanx"
