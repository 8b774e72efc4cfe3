"""Where compiled kernels are kept: one folder for all ranks of a user on a host."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Below the user's cache folder; may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "phalanx"
