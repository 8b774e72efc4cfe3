"""Runs steps of one size on a rank, whole and in slices, and says when what ran. Collective."""

from copy import copy
from typing import Any

import torch

from workers.forward_batch import ForwardBatch
from workers.overlap_tuning import PHASES
from workers.rank import Rank
from workers.schedule import RankTrace, Schedule
from workers.schedule_recorder import ScheduleRecorder


def trace_step(rank: Rank, phase: str, num_tokens: int) -> RankTrace:
    """The step of median length of each form, after the rank's stages; its engine must not run.

    phase   decode or prefill; num_tokens is of each rank. CUDA graphs are not used: they hold no marks.
    Raises ValueError where the limits or the cache allow no step of this size.
    """
    assert phase in PHASES, phase
    if rank.engine is None:
        rank.start_engine(lambda ingress, outputs: None, lambda step: None)
    engine = rank.engine
    assert engine is not None and engine.runner.microbatches is not None, "overlap.mode: on"
    _check_size(rank, phase, num_tokens)
    recorder, runner = ScheduleRecorder(rank.device), copy(engine.runner)
    found: list[tuple[int, Schedule]] = []
    whole = rank.model.with_kernels(recorder.kernels(rank.kernels, 0))
    runner.model = _followed(whole, recorder, found)
    slices = engine.runner.microbatches.recorded(recorder)
    runner.microbatches = _followed(slices, recorder, found)
    schedules = []
    for microbatch in (False, True):
        found.clear()
        timer = rank.overlap.timer(runner, engine.scheduler, rank.max_model_len)
        timer(phase, num_tokens, microbatch)
        # The first step of a size is slow.
        same = sorted((s for rows, s in found if rows == num_tokens), key=lambda s: s.seconds)
        schedules.append(same[(len(same) - 1) // 2])
    return RankTrace(rank.rank, num_tokens, rank.kernels.all2all.name, *schedules)


def _check_size(rank: Rank, phase: str, num_tokens: int) -> None:
    assert rank.engine is not None
    smallest = rank.config.overlap.num_microbatches
    largest = rank.overlap.largest(rank.engine.scheduler, rank.max_model_len)[phase]
    if not smallest <= num_tokens <= largest:
        raise ValueError(
            f"--tokens: a {phase} step has {smallest} to {largest} tokens with this configuration, got {num_tokens}; "
            "scheduler.max_num_batched_tokens, scheduler.max_num_seqs and the cache bound it"
        )


def _followed(model: Any, recorder: ScheduleRecorder, found: list[tuple[int, Schedule]]) -> Any:
    """`model`, each of whose forwards adds its number of rows and its schedule to `found`."""
    forward = model.forward

    def recording(batch: ForwardBatch) -> torch.Tensor:
        recorder.start()
        hidden_TD = forward(batch)
        found.append((len(batch.input_ids), recorder.finish()))
        return hidden_TD

    model.forward = recording
    return model
