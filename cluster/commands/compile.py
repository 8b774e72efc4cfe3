"""`phalanx compile`: start the ranks with random weights into an empty folder of compiled kernels, and stop them.

The start compiles what the model and the machine use and nothing else, because a server does the same. `kernels.cache`
uses the folder, on this machine or another one with the same GPUs and software.
"""

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from cluster.config.phalanx_config import PhalanxConfig
from cluster.config.resolve import resolve_device
from kernels.host.cache_folder import use_cache_folder

KINDS = {".cubin": "GPU kernels", ".so": "libraries"}


def compile_kernels(
    config: PhalanxConfig, folder: Path, console: Console, print_line: Callable[[str], Any]
) -> None:
    """Compile into `folder`, which needs no room for weights. On GPUs all ranks of `config` start, on a CPU none.

    After an error the folder is empty or gone, so that the same command can be repeated.
    Raises ValueError if the folder holds other files, or nothing is to be compiled on this machine; ServerError,
    ConfigError and BackendChoiceError if the ranks do not start.
    """
    folder = folder.absolute()
    if folder.is_dir() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty; expected a folder for compiled kernels alone")
    device = resolve_device(config)
    folder.mkdir(parents=True, exist_ok=True)
    use_cache_folder(str(folder))
    try:
        _compile_native(device)
        if device == "cuda":
            _start_ranks(_compiling(config, folder), console)
            _seal(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    for line in summary(folder):
        print_line(line)


def summary(folder: Path) -> list[str]:
    """Return what a folder of compiled kernels holds."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    counts = Counter(KINDS[file.suffix] for file in files if file.suffix in KINDS)
    found = ", ".join(f"{kind}: {counts[kind]}" for kind in KINDS.values() if counts[kind])
    size = sum(file.stat().st_size for file in files)
    return [f"{found}, {size / 1e6:.2f} MB", f"kernels.cache: {folder}"]


def _compiling(config: PhalanxConfig, folder: Path) -> PhalanxConfig:
    """Return `config` with random weights, which take no time to read, and with compiled kernels in `folder`."""
    kernels = config.kernels.model_copy(update={"cache": str(folder)})
    model = config.model.model_copy(update={"weights": "dummy"})
    return config.model_copy(update={"kernels": kernels, "model": model})


def _compile_native(device: str) -> None:
    from kernels.native.library import NativeUnavailableError, compiled_library

    try:
        compiled_library()
    except NativeUnavailableError as error:
        if device == "cpu":
            raise ValueError(f"the CPU's kernels cannot be compiled: {error}") from error


def _start_ranks(config: PhalanxConfig, console: Console) -> None:
    from cluster.commands.stop_signals import StopSignals
    from cluster.offline.engine import OfflineEngine, StoppedError

    stop = StopSignals()
    stop.install()
    try:
        OfflineEngine(config, console, stop).close()
    except StoppedError as error:
        raise ValueError("stopped by a signal; the incomplete folder was removed") from error


def _seal(folder: Path) -> None:
    from kernels.attention.flashinfer_modules import seal_modules

    seal_modules(folder)
