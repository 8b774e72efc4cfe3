"""Ranks in processes of this machine, without Ray and HTTP: the engine of the kinds engine and step."""

import multiprocessing
import os
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from cluster.config.phalanx_config import PhalanxConfig
from cluster.config.resolve import resolve_rank_config
from cluster.experiments.planned_load import TokenRequests, in_tokens
from cluster.experiments.rank_loop import RankLoad, RankRequest
from cluster.experiments.target import Engine, EngineError, Job, Measured
from cluster.experiments.workload_section import RequestWorkload
from kernels.host import cuda_environment
from workers import hub
from workers.rank.process_group import local_rendezvous

PRELOADED = ["torch", "torch.distributed", "cluster.experiments.rank_worker"]
BEGIN_S = 0.02  # from the command to the start of the clock, so that all ranks are there
END_S = 5.0


class RankGroup(Engine):
    """Started ranks. They live until `close`, or until one of them fails."""

    def __init__(self, config: PhalanxConfig, folder: Path, start_s: float):
        cuda_environment.prepare(os.environ, config.kernels.cache)
        self._config = config
        self._num_ranks = config.cluster.ranks
        self.logs = [folder / f"rank-{rank}.log" for rank in range(self._num_ranks)]
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._facts: list[dict[str, Any]] = []
        self._calls = 0
        self._idle = False  # all ranks wait for a command
        self._closing = ExitStack()
        try:
            self._start(start_s)
        except BaseException:
            self.close()
            raise

    def describe(self) -> dict[str, Any]:
        """Return the report of rank 0, and the seconds of its stages."""
        return self._facts[0]

    def change(self, config: PhalanxConfig, start_s: float) -> None:
        before, self._closing = self._closing, ExitStack()
        with before:  # the ranks leave the old group before they join the new one
            self._config, ranks_config = config, resolve_rank_config(config)
            rendezvous = self._closing.enter_context(local_rendezvous())
            for pipe in self._pipes:
                _send(pipe, ("change", (ranks_config, rendezvous, start_s)))
            self._facts = self._results(start_s)

    def run(self, job: Job, timeout_s: float) -> Measured:
        if job.load is None:
            return self._run_steps(job, timeout_s)
        self._calls += 1
        assert isinstance(job.workload, RequestWorkload)
        encoded = in_tokens(job.load.requests, self._config.model.folder)
        begin = time.perf_counter() + BEGIN_S
        shares = rank_loads(job, encoded, self._num_ranks, begin)
        name = f"{self._calls}"
        for pipe, share in zip(self._pipes, shares, strict=True):
            _send(pipe, ("requests", (share, name)))
        found = self._results(timeout_s)
        answers = {number: answer for own, _ in found for number, answer in own.items()}
        return Measured(
            answers=[answers[number] for number in sorted(answers)],
            figures=_figures([counters for _, counters in found]),
        )

    def close(self) -> None:
        """Close the ranks in order if all of them live and wait for commands, else kill them."""
        try:
            if self._idle and all(process.is_alive() for process in self._processes):
                for pipe in self._pipes:
                    _send(pipe, ("close", ()))
                self._results(END_S)
        except EngineError:
            pass
        finally:  # after a second Ctrl-C too
            for process in self._processes:
                process.kill()
            for process in self._processes:
                process.join(END_S)
            for pipe in self._pipes:
                pipe.close()
            self._processes, self._pipes = [], []
            self._closing.close()

    def _start(self, start_s: float) -> None:
        model = self._config.model
        if model.weights == "checkpoint":
            hub.fetch_weights(model.path, model.revision, bars=True)
        config = resolve_rank_config(self._config)
        model = config.model
        if model.revision is not None:
            fetch = hub.fetch_description if model.weights == "dummy" else hub.fetch_weights
            fetch(model.path, model.revision)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        from cluster.experiments.rank_worker import run_rank

        rendezvous = self._closing.enter_context(local_rendezvous())
        for rank, log in enumerate(self.logs):
            pipe, theirs = context.Pipe()
            self._pipes.append(pipe)
            arguments = (rank, config, rendezvous, start_s, theirs, log)
            process = context.Process(target=run_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
        self._facts = self._results(start_s, "ready")

    def _run_steps(self, job: Job, timeout_s: float) -> Measured:
        for pipe in self._pipes:
            _send(pipe, ("steps", (job.workload, job.seed)))
        found = self._results(timeout_s)
        slowest = {name: max(own[name] for own in found) for name in found[0]}
        return Measured(figures=slowest)

    def _results(self, timeout_s: float, expected: str = "done") -> list[Any]:
        """Return the result of each rank; meanwhile answer idle ranks. Raises EngineError."""
        deadline = time.monotonic() + timeout_s
        self._idle = False
        results: dict[int, Any] = {}
        idle: dict[int, float | None] = {}
        while len(results) < self._num_ranks:
            for rank, (kind, value) in self._received(deadline, timeout_s):
                if kind == "failed":
                    raise EngineError(value)
                if kind == "idle":
                    idle[rank] = value
                else:
                    assert kind == expected, (kind, expected)
                    results[rank] = value
            if len(idle) == self._num_ranks:
                arrivals = [due for due in idle.values() if due is not None]
                for pipe in self._pipes:
                    _send(pipe, min(arrivals) if arrivals else None)
                idle.clear()
        self._idle = True
        return [results[rank] for rank in range(self._num_ranks)]

    def _received(self, deadline: float, timeout_s: float) -> list[tuple[int, Any]]:
        """Return one message of each rank that has sent one. Raises EngineError when a rank ended or none sends."""
        ready = wait(self._pipes, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise EngineError(f"the ranks took longer than {timeout_s:g} s")
        found = []
        for rank, pipe in enumerate(self._pipes):
            if pipe not in ready:
                continue
            try:
                found.append((rank, pipe.recv()))
            except (EOFError, OSError):
                self._processes[rank].join(END_S)
                code = self._processes[rank].exitcode
                raise EngineError(
                    f"rank {rank} ended with exit code {code}{_last_line(self.logs[rank])}"
                ) from None
        return found


def rank_loads(job: Job, encoded: TokenRequests, num_ranks: int, begin: float) -> list[RankLoad]:
    """Return the requests of each rank, in turn, and its places; fewer places than ranks leave ranks empty."""
    load, workload = job.load, job.workload
    assert load is not None and isinstance(workload, RequestWorkload)
    stop_ids = frozenset() if workload.prompts is None else encoded.stop_token_ids
    places = load.in_flight
    used = num_ranks if places is None else min(num_ranks, places)
    loads = []
    for rank in range(num_ranks):
        mine = []
        for number in range(rank, len(encoded.requests) if rank < used else 0, used):
            request = encoded.requests[number]
            due = None if load.offsets is None else load.offsets[number]
            assert isinstance(request.prompt, list)
            ids: list[Any] = request.prompt
            mine.append(RankRequest(number, ids, request.max_tokens, due))
        share = None if places is None else max(0, (places + used - 1 - rank) // used)
        loads.append(RankLoad(mine, share, begin, job.salt, workload.temperature, stop_ids))
    return loads


def _send(pipe: Connection, message: Any) -> None:
    try:
        pipe.send(message)
    except OSError as error:
        raise EngineError(f"a rank has ended: {error}") from error


def _last_line(log: Path) -> str:
    try:
        lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return f"; its log ends with: {lines[-1][:300]}" if lines else ""


def _figures(counters: list[dict[str, Any]]) -> dict[str, float]:
    """Return the figures of all ranks: sums, shares of the time in steps, and the slowest rank's step."""
    steps = max(own["steps"] for own in counters)
    seconds = {
        part: sum(own["step_seconds"][part] for own in counters)
        for part in counters[0]["step_seconds"]
    }
    total = sum(seconds.values())
    tokens = sum(own["prompt_tokens"] + own["generation_tokens"] for own in counters)
    figures = {
        "steps": float(steps),
        "idle_step_share": sum(own["idle_steps"] for own in counters)
        / max(1, sum(own["steps"] for own in counters)),
        "ubatched_step_share": max(own["ubatched_steps"] for own in counters) / max(1, steps),
        "tokens_per_step": tokens / max(1, steps),
        "preemptions": float(sum(own["preemptions"] for own in counters)),
    }
    if total > 0:
        figures["step_ms"] = 1e3 * total / max(1, steps) / len(counters)
        figures["vote_share"] = seconds["vote"] / total
        figures["forward_share"] = seconds["forward"] / total
    figures |= _slowest_clock([own["clock"] for own in counters])
    balanced = [own["expert_balancedness"] for own in counters if own["expert_balancedness"]]
    if balanced:
        figures["expert_balancedness"] = sum(balanced) / len(balanced)
    return figures


def _slowest_clock(clocks: list[dict[str, float]]) -> dict[str, float]:
    """Return clock and power of the GPU with the lowest clock, which the others wait for; none on CPUs."""
    return min(clocks, key=lambda own: own["gpu_mhz"]) if all(clocks) else {}
