"""What each rank of timeline.py does: fills a steady state, times its steps, profiles some more."""

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from kernels.host.host_copy import HostCopies
from scripts.bench.gpu_energy import GpuEnergy, used
from scripts.bench.processes import Report
from scripts.bench.step_work import StepShape
from scripts.bench.timeline_events import (
    EXCHANGE,
    PREFIX,
    SAMPLE,
    STEP,
    Trace,
    one_step,
    read_trace,
    summarise,
)
from workers.config import RankConfig
from workers.engine.engine import Engine
from workers.engine.vote_transport import AbortableVote
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous, start_stages
from workers.runner.batch_builder import ForwardBatchBuilder
from workers.runner.model_runner import ModelRunner
from workers.sampling.sampler import Sampler
from workers.scheduler.scheduler import Scheduler
from workers.wire.request import EngineRequest, SamplingParams

WARM_UP = 8  # steps of a state before it is timed
TIMED = {"decode": 60, "prefill": 12}
PROFILED = {"decode": 6, "prefill": 4}  # the first is left out
JOIN_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class State:
    """A steady state: sequences of a rank, and the tokens that each of them has, or brings to each step.

    of_group   `seqs` are those of all ranks, dealt in turn: ranks without one run along
    """

    phase: str
    seqs: int
    shortest: int
    longest: int
    of_group: bool = False

    @property
    def title(self) -> str:
        """For people."""
        if self.phase == "prefill":
            return f"Prefill: {self.seqs} prompts of {self.longest:,} tokens a rank in each step"
        seqs = "1 sequence" if self.seqs == 1 else f"{self.seqs} sequences"
        where = "in the whole group" if self.of_group else "a rank"
        return f"Decode: {seqs} {where} of {self.shortest:,} to {self.longest:,} tokens"

    def of_rank(self, rank: int, num_ranks: int) -> "State":
        """Return the state of one rank."""
        if not self.of_group:
            return self
        seqs = self.seqs // num_ranks + (rank < self.seqs % num_ranks)
        return replace(self, seqs=seqs, of_group=False)

    @property
    def tokens(self) -> int:
        """Tokens of a rank's step."""
        return self.seqs * (self.longest if self.phase == "prefill" else 1)

    @property
    def steps(self) -> int:
        """From the first that is warm to the last."""
        return WARM_UP + TIMED[self.phase] + PROFILED[self.phase]


def run_rank(
    index: int,
    report: Report,
    folder: Path,
    config: RankConfig,
    states: list[State],
    rendezvous: Rendezvous,
) -> None:
    """A rank's process: all stages, then all states. Rank 0 reports each stage, the start, and what all found."""
    epoch, stages = start_epoch(index, report, config, rendezvous)
    info = epoch.start_engine(lambda ingress_id, outputs: None, lambda step: None)
    report({"start": {"backends": info.backends, "stages_s": stages}})
    loop = Loop(epoch, folder / f"trace-{index}.json")
    # Ranks that vote over shared memory have left torch.distributed by now.
    store = dist.TCPStore(rendezvous.host, rendezvous.port, is_master=False)
    for number, state in enumerate(states):
        found = loop.measure(state)
        store.set(f"{number}/{index}", json.dumps(found))
        keys = [f"{number}/{other}" for other in range(config.num_ranks)]
        report({"state": state.title, "ranks": [json.loads(store.get(key)) for key in keys]})
        if index == 0:
            print(f"{state.title}: {found['step_ms']:.3f} ms a step", file=sys.stderr, flush=True)
    epoch.process.close()


def start_epoch(
    index: int, report: Report, config: RankConfig, rendezvous: Rendezvous
) -> tuple[Epoch, dict[str, float]]:
    """Return a rank behind all stages, and the seconds of each; rank 0 reports each stage."""
    if config.device == "cuda":
        torch.cuda.set_device(index % torch.cuda.device_count())  # ranks may share a GPU
    epoch = Epoch(RankProcess(index, config), rendezvous, JOIN_TIMEOUT_S)
    for stage in start_stages(config.device):
        epoch.run_stage(stage, lambda done, total: None)
        report({"stage": stage})
    return epoch, {stage: round(epoch.seconds[stage], 1) for stage in start_stages(config.device)}


class Loop:
    """The steps of one rank. All ranks take the same number of them, with sequences of the same lengths."""

    def __init__(self, epoch: Epoch, trace: Path):
        self._epoch, self._engine, self._trace = epoch, epoch.engine, trace
        self._vocab_size = epoch.process.model_config.vocab_size
        self._chance = random.Random(epoch.process.rank)
        self._names: list[str] = []
        self._annotated = Annotations(epoch)
        device = epoch.process.device
        self._energy = GpuEnergy([epoch.process.rank] if device.type == "cuda" else [])

    def seed(self, number: int) -> None:
        """Let the next prompts be those of this number."""
        self._chance = random.Random(f"{number} {self._epoch.process.rank}")

    def measure(self, state: State, *, profiled: bool = True) -> dict[str, Any]:
        """Median milliseconds of a step by the wall, the parts of profiled ones, and what was in them."""
        ranks = range(self._epoch.process.config.num_ranks)
        of_ranks = [state.of_rank(rank, len(ranks)) for rank in ranks]
        self._tokens = tuple(found.tokens for found in of_ranks)
        state = of_ranks[self._epoch.process.rank]
        bring = self._fill(state) if state.phase == "decode" else self._prompts(state)
        for _ in range(WARM_UP):
            self._step(state, bring)
        steps, before = TIMED[state.phase], self._engine.stats.snapshot()
        joules = self._energy.joules()
        seconds = [self._step(state, bring) for _ in range(steps)]
        joules = used(joules, self._energy.joules())
        after = self._engine.stats.snapshot()
        shape = self._shape(state)
        trace = self._profile(state, bring) if profiled else None
        self._drain()
        counted = after["steps"] - before["steps"]
        return {
            "step_ms": round(1e3 * statistics.median(seconds), 4),
            "steps": steps,
            "joules_a_step": joules and joules / steps,
            "kinds": kinds_between(before["kinds"], after["kinds"]),
            "host_ms": {
                name: round(1e3 * (after["step_seconds"][name] - old) / counted, 4)
                for name, old in before["step_seconds"].items()
            },
            "shape": asdict(shape),
            **({} if trace is None else self._summary(trace)),
        }

    def _summary(self, trace: Trace) -> dict[str, Any]:
        drawing = {"drawing": one_step(trace)} if self._epoch.process.rank == 0 else {}
        return {"device": summarise(trace), **drawing}

    def _fill(self, state: State) -> Callable[[], None]:
        """Compute all prompts; of lengths that make contexts as they should be over the steps to come."""
        limits = self._epoch.process.config.scheduler
        # Sequences that are done with their prompts decode beside the others.
        most = max(self._tokens)  # equal on all ranks, because all take as many steps
        for_prompts = limits.max_num_batched_tokens - most
        fill = -(-most * state.longest // for_prompts) + 2
        longest = max(state.shortest, state.longest - state.steps - fill)
        spread = (longest - state.shortest) / max(1, state.seqs - 1)
        lengths = [round(state.shortest + spread * seq) for seq in range(state.seqs)]
        random.Random(0).shuffle(lengths)
        for length in lengths:
            self._engine.submit(self._request(length, fill + state.steps + 2))
        for _ in range(fill):
            self._engine.step()
        scheduler = self._engine.scheduler
        assert not scheduler.waiting and len(scheduler.running) == state.seqs, (
            f"{len(scheduler.waiting)} sequences wait after {fill} steps, {len(scheduler.running)} of "
            f"{state.seqs} run"
        )
        return lambda: None

    def _prompts(self, state: State) -> Callable[[], None]:
        """What submits one step's prompts; they are made before, for it counts as part of the step."""
        count = state.seqs * state.steps
        requests = iter([self._request(state.longest, 1) for _ in range(count)])

        def bring() -> None:
            for request in islice(requests, state.seqs):
                self._engine.submit(request)

        return bring

    def _request(self, length: int, max_tokens: int) -> EngineRequest:
        self._names.append(str(len(self._names)))
        return EngineRequest(
            request_id=self._names[-1],
            ingress_id="i",
            prompt_token_ids=self._chance.choices(range(self._vocab_size), k=length),
            params=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        )

    def _step(self, state: State, bring: Callable[[], None]) -> float:
        """Seconds of a step in which every rank has what the state says."""
        started = time.perf_counter()
        bring()
        plan = self._engine.step()
        seconds = time.perf_counter() - started
        assert tuple(plan.num_tokens_across_dp) == self._tokens, (
            plan.num_tokens_across_dp,
            self._tokens,
        )
        return seconds

    def _shape(self, state: State) -> StepShape:
        cache = self._epoch.process.config.cache
        formats: dict[str, Any] = {
            "fp8": self._epoch.backends.grouped_gemm.fp8_weights,
            "four_bit": self._epoch.backends.grouped_gemm.four_bit,
            "fp8_cache": cache.dtype == "fp8",
            "states": None if cache.state_dtype == "auto" else cache.state_dtype,
        }
        if state.phase == "prefill":
            tokens = state.seqs * state.longest
            return StepShape(tokens, state.longest / 2, 0, state.seqs, **formats)
        context = sum(seq.num_computed_tokens for seq in self._engine.scheduler.running)
        return StepShape(state.seqs, context / max(1, state.seqs), context, state.seqs, **formats)

    def _profile(self, state: State, bring: Callable[[], None]) -> Trace:
        activities, device = [ProfilerActivity.CPU], self._epoch.process.device
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize(device)
        with self._annotated, profile(activities=activities) as profiler:
            for _ in range(PROFILED[state.phase]):
                self._step(state, bring)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        profiler.export_chrome_trace(str(self._trace))
        trace = read_trace(self._trace)
        self._trace.unlink()
        return trace

    def _drain(self) -> None:
        """Forget all requests; every rank does so before the same step."""
        for name in self._names:
            self._engine.abort(name)
        while self._engine.step().run:
            pass


class Annotations:
    """Names the host's phases in a profile, while it is entered."""

    def __init__(self, epoch: Epoch):
        attention = type(epoch.backends.attention)
        self._methods = [
            (Engine, "step", STEP),
            (Scheduler, "schedule", "schedule"),
            (AbortableVote, "all_gather", EXCHANGE),
            (ModelRunner, "launch", "launch"),
            (ForwardBatchBuilder, "build", "build"),
            *((attention, name, "plan") for name in ("plan", "plan_graph")),
            (Sampler, "sample", SAMPLE),
            (HostCopies, "wait", "wait"),
            (Scheduler, "commit", "commit"),
        ]
        self._undo: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        for subject, method, phase in self._methods:
            owner = next((it for it in subject.__mro__ if method in vars(it)), None)
            if owner is not None:
                original = vars(owner)[method]
                setattr(owner, method, record_function(PREFIX + phase)(original))
                self._undo.append(lambda put=(owner, method, original): setattr(*put))

    def __exit__(self, *error: object) -> None:
        while self._undo:
            self._undo.pop()()


def kinds_between(before: dict[Any, int], after: dict[Any, int]) -> dict[str, int]:
    """Steps by what they were: mode, whether a graph was replayed, whether in ubatches."""
    found = {}
    for (mode, graph, cut), count in after.items():
        if count > before.get((mode, graph, cut), 0):
            name = f"{mode}, graph {graph}" + (", ubatches" if cut == "True" else "")
            found[name] = count - before.get((mode, graph, cut), 0)
    return found
