"""Runs steps of one size on a rank, whole and in ubatches, under torch's profiler. Collective."""

import gzip
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch.autograd.profiler import profile, record_function

from kernels.pending import Pending
from workers.overlap.policy import PHASES
from workers.rank.epoch import Epoch
from workers.rank.rank_info import RankTrace
from workers.runner.model_runner import ModelRunner

FORMS = {"whole": False, "in ubatches": True}


def trace_step(epoch: Epoch, phase: str, num_tokens: int) -> RankTrace:
    """Return the trace of steps of each form. The rank has passed all stages; its engine must not run then or later.

    phase        decode or prefill
    num_tokens   tokens of each rank

    Raises ValueError if the limits or the cache allow no step of this size.
    """
    assert phase in PHASES, phase
    if not epoch.started:
        epoch.start_engine(lambda ingress, outputs: None, lambda step: None)
    engine, process = epoch.engine, epoch.process
    assert engine.runner.ubatches is not None, "overlap.mode: on"
    _check_size(epoch, phase, num_tokens)
    timer = epoch.ubatches.timer(engine.runner, engine.scheduler, process.max_model_len)
    # Before the profile, because the first step of a size compiles kernels and captures graphs.
    seconds = {form: timer(phase, num_tokens, ubatch) for form, ubatch in FORMS.items()}
    device = "cuda" if process.device.type == "cuda" else None
    # Not torch.profiler's class around it, which imports inductor for seconds.
    with _annotated(epoch), profile(use_device=device, use_kineto=True) as profiler:
        for form, ubatch in FORMS.items():
            with record_function(f"{phase} of {num_tokens} tokens, {form}"):
                timer(phase, num_tokens, ubatch)
    return RankTrace(
        rank=process.rank,
        all2all=epoch.backends.all2all.name,
        seconds=seconds,
        events=_events(profiler),
    )


@contextmanager
def annotated(owner: Any, method: str, name: str) -> Iterator[None]:
    """Give each call of `owner.method` a range of this name in a profile while the block runs."""
    inherited = method not in vars(owner)
    original = getattr(owner, method)

    def call(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return original(*args, **kwargs)

    setattr(owner, method, call)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, method)
        else:
            setattr(owner, method, original)


@contextmanager
def _annotated(epoch: Epoch) -> Iterator[None]:
    """Name launches, the all-to-alls of each ubatch and the waits for them in a profile while the block runs."""
    ubatches = epoch.engine.runner.ubatches
    assert ubatches is not None
    suffixes = {epoch.backends.all2all: ""}
    for index, own in enumerate(ubatches.backends):
        suffixes.setdefault(own.all2all, f" of ubatch {index}")  # some share one with whole steps
    with ExitStack() as stack:
        stack.enter_context(annotated(ModelRunner, "launch", "launch"))
        stack.enter_context(annotated(Pending, "result", "wait for an all-to-all"))
        for all2all, suffix in suffixes.items():
            for method in ("dispatch", "combine"):
                stack.enter_context(annotated(all2all, method, method + suffix))
        yield


def _events(profiler: profile) -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))  # type: ignore[no-untyped-call]
        return gzip.compress(path.read_bytes())


def _check_size(epoch: Epoch, phase: str, num_tokens: int) -> None:
    smallest = epoch.process.config.overlap.num_ubatches
    largest = epoch.ubatches.largest(epoch.engine.scheduler, epoch.process.max_model_len)[phase]
    if not smallest <= num_tokens <= largest:
        raise ValueError(
            f"--tokens: a {phase} step has {smallest} to {largest} tokens with this configuration, got {num_tokens}; "
            "scheduler.max_num_batched_tokens, scheduler.max_num_seqs and the cache bound it"
        )
