"""Runs `phalanx check`, then all compilers at once, in a process of its own while Ray starts.

Importing torch and probing backends takes as long as Ray's start, and would slow it down in the same process.
FlashAttention 3 takes a minute to compile if the cache folder has no kernels, DeepGEMM's kernels more than that one
after another. The ranks find the compiled kernels in the folder that they share, or wait for its lock. Compiler errors
are reported by the ranks, not here.
"""

import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from cluster.config.phalanx_config import PhalanxConfig
from kernels.host import cuda_environment
from kernels.host.owned import start_thread

if TYPE_CHECKING:
    from cluster.commands.check import CheckReport

PARENT_POLL_S = 1.0
SILENT = (
    "the configuration's check ended without an answer (exit code {}); `phalanx check` repeats it"
)


class Preflight:
    """The process; it ends by itself or by `close`."""

    def __init__(self, config: PhalanxConfig, num_api_keys: int):
        self._warnings: Future[list[str]] = Future()
        self._reported = False
        # With this process's sys.path: -m would import from the user's folder first.
        program = (
            f"import sys; sys.path[:] = {sys.path!r}; "
            f"from cluster.commands.preflight import run; run({os.getpid()})"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        job = pickle.dumps((config, num_api_keys))
        start_thread(partial(self._follow, job), self._warnings.set_exception, "preflight")

    def done(self) -> bool:
        """Whether `warnings` would not wait."""
        return self._warnings.done()

    def warnings(self) -> list[str]:
        """The warnings of the check at the first call, none later. Raises the error of the check."""
        found = [] if self._reported else self._warnings.result()
        self._reported = True
        return found

    def close(self) -> None:
        """End the process and its compilers."""
        if self._process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGTERM)
            self._process.wait()

    def _follow(self, job: bytes) -> None:
        """Send the job, wait for the outcome, then for the end of the process."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError), process.stdin:
            process.stdin.write(job)
        with process.stdout:
            answer = process.stdout.read()
        try:
            outcome = pickle.loads(answer)
        except Exception:  # broken bytes can raise any error
            outcome = [SILENT.format(process.wait())]
        if isinstance(outcome, Exception):
            self._warnings.set_exception(outcome)
        else:
            self._warnings.set_result(outcome)
        process.wait()


def run(launcher: int) -> None:
    """Run in the process: read (configuration, number of API keys) from stdin, write the outcome to stdout.

    launcher   process id of the parent, which may have ended already
    """
    start_thread(partial(_end_with, launcher), lambda _: os._exit(1), "end-with-launcher")
    config, num_api_keys = pickle.load(sys.stdin.buffer)
    cuda_environment.prepare(os.environ, config.kernels.cache)
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # the output of libraries must not mix with the outcome
        report, outcome = _check(config, num_api_keys)
        answers.write(pickle.dumps(outcome))
    if report is not None:
        _compile(config, report)


def _end_with(parent: int) -> None:
    """End this process and its compilers when `parent` has ended."""
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    os.killpg(os.getpid(), signal.SIGKILL)


def _check(
    config: PhalanxConfig, num_api_keys: int
) -> "tuple[CheckReport | None, list[str] | Exception]":
    from cluster.commands.check import check_groups

    try:
        reports = check_groups(config, num_api_keys)
    except ValueError as error:  # a user's mistake
        return None, error
    except Exception as error:
        traceback.print_exc()
        return None, RuntimeError(f"{type(error).__name__}: {error}")
    warnings = dict.fromkeys(line for report in reports for line in report.warnings)
    return reports[0], list(warnings)  # kernels of all groups are compiled alike


def _compile(config: PhalanxConfig, report: "CheckReport") -> None:
    """Compile attention's kernels and the grouped products' for this machine's GPUs, if ranks here would."""
    import torch

    from cluster.config.resolve import resolve_rank_config
    from kernels.interface.registry import backend_class
    from workers.models.registry import configured_model
    from workers.rank.backend_choice import backend_shape
    from workers.rank.warm_up import warm_up_sizes
    from workers.weights.tensors import fp8_shapes

    if not torch.cuda.is_available():
        return
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    attention, gemm = (
        backend_class(seam, report.backends[seam]["name"]) for seam in ("attention", "grouped_gemm")
    )
    model, ranks = configured_model(config.model), resolve_rank_config(config)
    shape = backend_shape(ranks, model)
    sizes = warm_up_sizes(shape.max_num_tokens, dense=gemm.compiles_by_rows)
    dense = list(fp8_shapes(model).values()) if gemm.fp8_dense else []
    with ThreadPoolExecutor(2) as compilers:
        compilers.submit(gemm.compile_kernels, shape, dense, sizes)
        compilers.submit(attention.compile_kernels, shape.dtype, shape.attention_specs)
