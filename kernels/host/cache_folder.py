"""The folder of compiled kernels, one for all ranks of a user on a host."""

import os
from pathlib import Path

_chosen: Path | None = None


def use_cache_folder(folder: str | None) -> None:
    """Keep the compiled kernels of this process in `folder`, if given. Call it before a kernel is compiled."""
    global _chosen
    if folder is not None:
        _chosen = Path(folder)


def cache_folder() -> Path:
    """Return the chosen folder, else one below the user's cache folder; it may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return _chosen or Path(base) / "phalanx"
