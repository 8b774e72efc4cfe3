"""Runs steps of one size on a rank, whole and in ubatches, and records their spans. Collective."""

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch

from workers.overlap.policy import PHASES
from workers.rank.epoch import Epoch
from workers.runner.model_runner import ModelRunner
from workers.step.forward_batch import ForwardBatch
from workers.trace.recorder import Recording, SpanRecorder
from workers.trace.spans import RankTrace, StepTrace

# Recordings of whole forwards, and of forwards in ubatches.
Found = tuple[list[Recording], list[Recording]]


def trace_step(epoch: Epoch, phase: str, num_tokens: int) -> RankTrace:
    """Return the trace of a step of each form. The rank has passed all stages; its engine must not run then or later.

    phase        decode or prefill
    num_tokens   tokens of each rank

    Steps that replay CUDA graphs are traced in new graphs. Raises ValueError if the limits or the cache allow no step
    of this size.
    """
    assert phase in PHASES, phase
    if not epoch.started:
        epoch.start_engine(lambda ingress, outputs: None, lambda step: None)
    engine = epoch.engine
    assert engine.runner.ubatches is not None, "overlap.mode: on"
    _check_size(epoch, phase, num_tokens)
    timer = epoch.ubatches.timer(engine.runner, engine.scheduler, epoch.process.max_model_len)
    unrecorded = timer(phase, num_tokens, False), timer(phase, num_tokens, True)
    recorder = SpanRecorder(epoch.process.device)
    # By form. Kept to the end, because a graph sets its events at each replay, also after the timer has returned.
    found: Found = ([], [])
    runner = _recorded(epoch, engine.runner, recorder, found)
    timer = epoch.ubatches.timer(runner, engine.scheduler, epoch.process.max_model_len)
    traces = []
    try:
        for ubatch in (False, True):
            timer(phase, num_tokens, ubatch)
            traces.append(_typical(found[ubatch], num_tokens))
    finally:
        runner.close()  # a failure would keep graphs alive beyond their communicator
    plain, ubatched = traces
    return RankTrace(
        rank=epoch.process.rank,
        num_tokens=num_tokens,
        all2all=epoch.backends.all2all.name,
        plain=plain,
        ubatched=ubatched,
        unrecorded=unrecorded,
    )


def _recorded(
    epoch: Epoch, runner: ModelRunner, recorder: SpanRecorder, found: Found
) -> ModelRunner:
    """Return another runner over the same sequences; each of its forwards adds a recording to `found`."""
    assert runner.ubatches is not None
    whole = epoch.model.with_backends(recorder.record(epoch.backends, 0))
    recorded = copy(runner)
    recorded.model = _followed(whole, recorder, found[False])
    recorded.ubatches = _followed(runner.ubatches.recorded(recorder), recorder, found[True])
    if runner.graphs is not None:
        runner.graphs.discard(runner.graphs.captured())
        recorded.make_graphs(runner.graphs.sizes)
    return recorded


def _typical(recordings: Sequence[Recording], num_tokens: int) -> StepTrace:
    """Return the last replay of the last graph, or without graphs the step of this size of median length."""
    for recording in reversed(recordings):
        # A graph of a form that these batches do not replay has no times.
        if recording.captured and recording.num_rows >= num_tokens and recording.happened():
            return recording.trace()
    traces = [one.trace() for one in recordings if one.num_rows == num_tokens]
    # Lower median: the first step of a size is slow.
    return sorted(traces, key=lambda trace: trace.seconds)[(len(traces) - 1) // 2]


def _check_size(epoch: Epoch, phase: str, num_tokens: int) -> None:
    smallest = epoch.process.config.overlap.num_ubatches
    largest = epoch.ubatches.largest(epoch.engine.scheduler, epoch.process.max_model_len)[phase]
    if not smallest <= num_tokens <= largest:
        raise ValueError(
            f"--tokens: a {phase} step has {smallest} to {largest} tokens with this configuration, got {num_tokens}; "
            "scheduler.max_num_batched_tokens, scheduler.max_num_seqs and the cache bound it"
        )


def _followed(model: Any, recorder: SpanRecorder, found: list[Recording]) -> Any:
    """Return `model`; each of its forwards now adds a recording to `found`."""
    forward = model.forward

    def recording(batch: ForwardBatch) -> torch.Tensor:
        recorder.start(len(batch.input_ids))
        hidden_TD: torch.Tensor = forward(batch)
        found.append(recorder.stop())
        return hidden_TD

    model.forward = recording
    return model
