"""Compiles attention's kernels for this machine beside Ray's start: where none are kept, they take most of the start.

The ranks find them in the folder that they share, or wait for its lock. A process of its own does it, so that whoever
ends the server ends the compilers too; what it may fail of, the ranks will say.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.util import find_spec

from cluster.config import PhalanxConfig, resolve_rank_config
from kernels import cuda_environment


class CompileAhead:
    """The process, from now until `close`; there is none where no kernel of attention is ever compiled."""

    def __init__(self, config: PhalanxConfig):
        self._process: subprocess.Popen[str] | None = None
        if config.cluster.device == "cpu" or find_spec("flashinfer") is None:
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cluster.compile_ahead"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(config.model_dump_json())
            self._process.stdin.close()

    def close(self) -> None:
        """End it, and its compilers."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait()


def compile_kernels(config: PhalanxConfig) -> None:
    """Compile what ranks of this configuration would on this machine's GPUs."""
    import torch

    from kernels import select
    from workers.kernel_choice import kernel_shape
    from workers.models.config import load_model_config

    rank_config = resolve_rank_config(config)
    if rank_config.device != "cuda" or not torch.cuda.is_available():
        return
    model = load_model_config(rank_config.model.path)
    shape = kernel_shape(rank_config, model)
    selection = select.select(config.kernels, select.probe("cuda"), **shape)
    if selection.attention.name == "flashinfer":
        from kernels.attention.flashinfer_modules import compile_modules

        compile_modules(getattr(torch, str(rank_config.model.dtype)), model.head_dim)


if __name__ == "__main__":
    cuda_environment.prepare(os.environ)
    compile_kernels(PhalanxConfig.model_validate_json(sys.stdin.read()))
