"""The process of one rank: starts the rank, then runs the commands of its parent until the pipe closes.

Messages to the parent: ("ready", facts), ("done", result), ("failed", reason), ("idle", next arrival or None).
"""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from cluster.bench.stream import Answer
from cluster.experiments.gpu_clock import clock_figures, clock_samples
from cluster.experiments.parent_death import stop_with_parent
from cluster.experiments.rank_loop import RankLoad, RankLoop
from cluster.experiments.rank_steps import time_steps
from cluster.experiments.workload_section import StepWorkload
from workers.config import RankConfig
from workers.log import set_up_logging
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous, start_stages

LOST_PARENT = (EOFError, BrokenPipeError, ConnectionResetError)


def run_rank(
    rank: int,
    config: RankConfig,
    rendezvous: Rendezvous,
    start_s: float,
    pipe: Connection,
    log: Path,
) -> None:
    """Entry point of the process."""
    stop_with_parent(
        os.getppid(), signal.SIGKILL
    )  # the fork server, which ends with the experiment
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C ends
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    set_up_logging(f"rank {rank}", config.log_level, config.log_format)
    try:
        worker = RankWorker(rank, config, rendezvous, start_s, pipe)
        pipe.send(("ready", worker.facts))
        while True:
            name, arguments = pipe.recv()
            command: Callable[..., Any] = getattr(worker, name)
            pipe.send(("done", command(*arguments)))
    except LOST_PARENT:
        os._exit(0)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        reason = (str(error).strip().splitlines() or [""])[0]
        pipe.send(("failed", f"rank {rank}: {type(error).__name__}: {reason}"))
        os._exit(1)  # peers may wait for this rank, so an orderly end could hang


class RankWorker:
    """One started rank and its commands: the public methods. Collective."""

    def __init__(
        self,
        rank: int,
        config: RankConfig,
        rendezvous: Rendezvous,
        start_s: float,
        pipe: Connection,
    ):
        if config.device == "cuda":
            torch.cuda.set_device(rank)
        self._pipe = pipe
        self._process = RankProcess(rank, config)
        self.facts = self._meet(rendezvous, start_s)

    def _meet(self, rendezvous: Rendezvous, start_s: float) -> dict[str, Any]:
        """Begin an epoch with its engine; return the report of this rank."""
        self._loop = RankLoop()
        self._epoch = Epoch(self._process, rendezvous, start_s)
        for stage in start_stages(self._process.config.device):
            self._epoch.run_stage(stage, lambda done, total: None)
        return asdict(self._epoch.start_engine(self._loop.publish, lambda step: None))

    def change(self, config: RankConfig, rendezvous: Rendezvous, start_s: float) -> dict[str, Any]:
        """Begin another epoch with other settings and the weights of before; return the report of this rank."""
        del self._loop  # it holds the engine, and with it the memory of the epoch
        self._epoch.close()
        self._process.become(self._process.rank, config)
        return self._meet(rendezvous, start_s)

    def requests(self, load: RankLoad, name: str) -> tuple[dict[int, Answer], dict[str, Any]]:
        """Run requests; return the answers by number, and what this rank's engine did meanwhile."""
        engine = self._epoch.engine
        before = engine.stats.snapshot()
        with clock_samples(self._process.device) as samples:
            answers = self._loop.run(engine, load, name, self._go_on)
        found = _between(before, engine.stats.snapshot())
        return answers, {**found, "clock": clock_figures(samples)}

    def steps(self, workload: StepWorkload, seed: int) -> dict[str, float]:
        """Time single steps."""
        return time_steps(self._epoch, workload, seed)

    def close(self) -> None:
        """Release memory, and leave the group."""
        self._epoch.close()
        self._process.close()

    def _go_on(self, due: float | None) -> bool:
        self._pipe.send(("idle", due))
        wake_at: float | None = self._pipe.recv()
        if wake_at is None:
            return False
        time.sleep(max(0.0, wake_at - time.perf_counter()))
        return True


def _between(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the counters of a rank between two snapshots."""
    counters = ("steps", "idle_steps", "prompt_tokens", "generation_tokens", "preemptions")
    found: dict[str, Any] = {name: after[name] - before[name] for name in counters}
    seconds = after["step_seconds"]
    found["step_seconds"] = {part: seconds[part] - before["step_seconds"][part] for part in seconds}
    kinds = after["kinds"]
    found["ubatched_steps"] = sum(
        count - before["kinds"].get(kind, 0) for kind, count in kinds.items() if kind[2] == "True"
    )
    pairs = zip(
        after["expert_balancedness_samples"], before["expert_balancedness_samples"], strict=True
    )
    count, total = (now - then for now, then in pairs)
    found["expert_balancedness"] = total / count if count else None
    return found
