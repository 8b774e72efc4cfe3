"""Compiles cpu.c with the machine's own C compiler, once, and calls it. Only CPU backends use it.

The result is kept in the user's cache folder under a hash of the source, the compiler and the processor.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from kernels.host.cache_folder import cache_folder

SOURCE = Path(__file__).with_name("cpu.c")
# What lets sums be reordered and so vectorised; not -ffast-math, which also changes the whole process's rounding.
FLAGS = (
    *("-O3", "-march=native", "-fPIC", "-shared", "-fassociative-math", "-fno-signed-zeros"),
    *("-fno-trapping-math", "-fno-math-errno", "-freciprocal-math"),
)


_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURES = {
    "grouped_gated_mlp": [_POINTER] * 2 + [_INT] * 4 + [_POINTER] * 6,
    "four_bit_linear": [_POINTER] * 2 + [_INT] * 5 + [_POINTER] * 2,
    "grouped_gated_mlp_four_bit": [_POINTER] * 2 + [_INT] * 6 + [_POINTER] * 6,
    "grouped_product_four_bit": [_POINTER] * 2 + [_INT] * 5 + [_POINTER] * 4,
    "paged_decode": [_POINTER, _INT, *[_POINTER] * 3, _INT, _POINTER, *[_INT] * 6, _FLOAT]
    + [_POINTER] * 5,
    "delta_decode": [_POINTER, _INT] * 3
    + [_POINTER] * 5
    + [_INT] * 8
    + [_FLOAT]
    + [_POINTER] * 2
    + [_INT]
    + [_POINTER] * 4,
    "linear": [_POINTER] * 3 + [_INT] * 4 + [_POINTER],
    "norm_and_rotate": [_POINTER, _INT, _POINTER, _FLOAT, _POINTER] + [_INT] * 3,
    "rms_norm": [_POINTER] * 2 + [_FLOAT] + [_INT] * 2 + [_POINTER],
    "route_top_k": [_POINTER] + [_INT] * 5 + [_FLOAT] + [_POINTER] * 2,
    "expert_slots": [_POINTER, *[_INT] * 2, *[_POINTER] * 2, *[_INT] * 3],
    "store_kv": [_POINTER, _INT] * 2 + [_POINTER] + [_INT] * 2 + [_POINTER] * 2,
    "route_pairs": [_POINTER, *[_INT] * 4, *[_POINTER] * 3],
    "sum_rows": [_POINTER] * 3 + [_INT] * 3 + [_POINTER],
    "pack_rows": [_POINTER] * 3 + [_INT] * 4 + [_POINTER],
    "route_rows": [_POINTER, _INT, _POINTER, *[_INT] * 6, *[_POINTER] * 4],
    "take_rows": [_POINTER] * 2 + [_INT] * 2 + [_POINTER],
    "sum_slots": [_POINTER, *[_INT] * 3, _POINTER],
}
_RESULTS = {"route_pairs": _INT, "route_rows": _INT}


class NativeUnavailableError(RuntimeError):
    """The kernels cannot be compiled or loaded here. The message has the reason."""


def native_unavailable() -> str | None:
    """Return why the kernels cannot be compiled or loaded here, or None."""
    try:
        load()
    except NativeUnavailableError as error:
        return str(error)
    return None


def native_unsupported_reason(dtype_name: str) -> str | None:
    """Return why the kernels cannot compute in a dtype, named as in the configuration, or None."""
    return (
        None if dtype_name == "float32" else f"it computes in float32, model.dtype is {dtype_name}"
    )


@functools.cache
def load() -> ctypes.CDLL:
    """The compiled kernels; the first call on a machine takes a second or two.

    Raises NativeUnavailableError without a working C compiler. Calls release the interpreter lock.
    """
    path = compiled_library()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeUnavailableError(f"{path}: {error}") from error
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, _RESULTS.get(name)
    return library


def compiled_library() -> Path:
    """Return the library in the cache folder, compiled if it is missing. Raises NativeUnavailableError."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise NativeUnavailableError("no C compiler (cc) is on the PATH")
    path = cache_folder() / f"cpu-{_fingerprint(compiler)}.so"
    try:
        if not path.is_file():
            _compile(compiler, path)
    except OSError as error:
        raise NativeUnavailableError(f"{path}: {error}") from error
    return path


@functools.cache
def load_or_none() -> ctypes.CDLL | None:
    """The same, or None where they are unavailable."""
    try:
        return load()
    except NativeUnavailableError:
        return None


def _fingerprint(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=30).stdout
    parts = [SOURCE.read_bytes(), version, " ".join(FLAGS).encode(), _processor().encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _processor() -> str:
    """Which instructions there are: a cache folder may be shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return platform.machine() + next((x for x in lines if x.startswith(("flags", "Features"))), "")


def _compile(compiler: str, path: Path) -> None:
    """Into a file of its own first: several ranks may do this at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        draft = Path(folder) / path.name
        command = [compiler, *FLAGS, "-o", str(draft), str(SOURCE)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        except subprocess.TimeoutExpired as error:
            raise NativeUnavailableError(
                f"{compiler} took more than {error.timeout:g} s"
            ) from error
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[0]
            raise NativeUnavailableError(f"{compiler} failed: {reason}")
        draft.replace(path)
