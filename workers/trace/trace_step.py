"""Runs steps of one size on a rank, whole and in slices, and says when what ran. Collective."""

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch

from workers.rank.rank import Rank
from workers.runner.forward_batch import ForwardBatch
from workers.runner.model_runner import ModelRunner
from workers.trace.recorder import Recording, ScheduleRecorder
from workers.trace.spans import RankTrace, Schedule
from workers.ubatch.policy import PHASES

# Recordings of whole forwards, and of those in slices.
Found = tuple[list[Recording], list[Recording]]


def trace_step(rank: Rank, phase: str, num_tokens: int) -> RankTrace:
    """A step of each form, after the rank's stages; its engine must not run, then or later.

    phase   decode or prefill; num_tokens is of each rank. Steps that replay CUDA graphs are traced in new ones.
    Raises ValueError where the limits or the cache allow no step of this size.
    """
    assert phase in PHASES, phase
    if rank.engine is None:
        rank.start_engine(lambda ingress, outputs: None, lambda step: None)
    engine = rank.engine
    assert engine is not None and engine.runner.ubatches is not None, "overlap.mode: on"
    _check_size(rank, phase, num_tokens)
    timer = rank.overlap.timer(engine.runner, engine.scheduler, rank.max_model_len)
    unrecorded = timer(phase, num_tokens, False), timer(phase, num_tokens, True)
    recorder = ScheduleRecorder(rank.device)
    # By form, and kept to the end: a graph sets the events of its marks at each replay, whoever asked for it.
    found: Found = ([], [])
    runner = _recorded(rank, engine.runner, recorder, found)
    timer = rank.overlap.timer(runner, engine.scheduler, rank.max_model_len)
    schedules = []
    try:
        for ubatch in (False, True):
            timer(phase, num_tokens, ubatch)
            schedules.append(_typical(found[ubatch], num_tokens))
    finally:
        runner.close()  # a failure would keep graphs alive beyond their communicator
    return RankTrace(rank.rank, num_tokens, rank.kernels.all2all.name, *schedules, unrecorded)


def _recorded(
    rank: Rank, runner: ModelRunner, recorder: ScheduleRecorder, found: Found
) -> ModelRunner:
    """Another runner over the same sequences, whose forwards add what was recorded to `found`."""
    assert runner.ubatches is not None
    whole = rank.model.with_kernels(recorder.kernels(rank.kernels, 0))
    recorded = copy(runner)
    recorded.model = _followed(whole, recorder, found[False])
    recorded.ubatches = _followed(runner.ubatches.recorded(recorder), recorder, found[True])
    if runner.graphs is not None:
        runner.graphs.discard(runner.graphs.captured())
        recorded.make_graphs(runner.graphs.sizes)
    return recorded


def _typical(recordings: Sequence[Recording], num_tokens: int) -> Schedule:
    """Of all that was recorded, the last graph's last replay, or else the step of this size of median length."""
    for recording in reversed(recordings):
        # A graph of another form, captured beside the one that these batches replay, has no times.
        if recording.captured and recording.num_rows >= num_tokens and recording.happened():
            return recording.schedule()
    schedules = [one.schedule() for one in recordings if one.num_rows == num_tokens]
    # Lower median: the first step of a size is slow.
    return sorted(schedules, key=lambda schedule: schedule.seconds)[(len(schedules) - 1) // 2]


def _check_size(rank: Rank, phase: str, num_tokens: int) -> None:
    assert rank.engine is not None
    smallest = rank.config.overlap.num_ubatches
    largest = rank.overlap.largest(rank.engine.scheduler, rank.max_model_len)[phase]
    if not smallest <= num_tokens <= largest:
        raise ValueError(
            f"--tokens: a {phase} step has {smallest} to {largest} tokens with this configuration, got {num_tokens}; "
            "scheduler.max_num_batched_tokens, scheduler.max_num_seqs and the cache bound it"
        )


def _followed(model: Any, recorder: ScheduleRecorder, found: list[Recording]) -> Any:
    """`model`, each of whose forwards adds what was recorded of it to `found`."""
    forward = model.forward

    def recording(batch: ForwardBatch) -> torch.Tensor:
        recorder.start(len(batch.input_ids))
        hidden_TD = forward(batch)
        found.append(recorder.stop())
        return hidden_TD

    model.forward = recording
    return model
