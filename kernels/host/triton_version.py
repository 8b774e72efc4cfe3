"""Check that the installed Triton can compile our kernels. Imports nothing of Triton."""

from importlib.metadata import PackageNotFoundError, version

MIN_VERSION = (3, 4)  # tensor descriptors made on the host


def triton_unavailable() -> str | None:
    """Return why our Triton kernels cannot run, or None."""
    needed = ".".join(map(str, MIN_VERSION))
    try:
        installed = version("triton")
    except PackageNotFoundError:
        return f"triton is not installed, {needed} or newer is needed"
    if tuple(int(part) for part in installed.split(".")[:2]) < MIN_VERSION:
        return f"triton {installed} is installed, {needed} or newer is needed"
    return None
