"""The control plane. Importing it fails where another package named `kernels` hides that of Phalanx.

Hugging Face's distribution `kernels` has files at the same paths: installed after Phalanx it replaces
kernels/__init__.py, removed later it deletes the file. Later imports would fail with messages about neither.
"""

from importlib.util import find_spec
from pathlib import Path


def _check_kernels() -> None:
    """Raise ImportError unless `kernels` is ours, with an empty __init__.py."""
    found = find_spec("kernels")
    origin = found and found.origin
    if not origin or Path(origin).read_bytes():
        at = f"at {origin} is not that of Phalanx" if origin else "has lost its __init__.py"
        raise ImportError(
            f"the package 'kernels' {at}: the distribution 'kernels' of Hugging Face uses the same name. "
            "Run `pip uninstall kernels`, then install Phalanx again with `pip install --force-reinstall --no-deps`"
        )


_check_kernels()
