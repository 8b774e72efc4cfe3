"""What one rank counts about itself. Written by the step loop, read by other threads as a plain dict."""

import time
from collections import Counter
from typing import Any

from kernels.expert_load import ExpertLoad
from workers.histogram import Histogram
from workers.model_runner import RunTimes
from workers.process_info import process_info
from workers.request_times import RequestTimer
from workers.scheduler import ScheduledBatch, Scheduler
from workers.step_sync import ForwardMode, StepPlan

STEP_PARTS = ("schedule", "exchange", "prepare", "forward", "sample", "output")
STEP_TOKENS = tuple(float(2**i) for i in range(15))
EXPERT_LOAD_EVERY = 32  # steps between two looks at the experts' load: 1 ms each on a CPU


class EngineStats:
    """Counters since start, and gauges as of the last step."""

    def __init__(self, expert_load: ExpertLoad | None = None) -> None:
        self.requests = RequestTimer()
        self.num_steps = 0
        self.num_idle_steps = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.padding_tokens = 0
        self.seconds = dict.fromkeys(STEP_PARTS, 0.0)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.kinds: Counter[tuple[str, str, str]] = Counter()
        self._expert_load = expert_load or ExpertLoad()
        self._expert_rows = 0
        self._balancedness: float | None = None
        self._gauges: dict[str, Any] = {
            "running": 0,
            "waiting": 0,
            "kv_cache_usage": 0.0,
            "preemptions": 0,
            "prefix_cache_queries": 0,
            "prefix_cache_hits": 0,
        }

    def before_step(self, batch: ScheduledBatch) -> None:
        """`batch` is about to run."""
        if batch.admitted:
            self.requests.admitted(batch.admitted)
        if self.num_steps % EXPERT_LOAD_EVERY == 0:
            self._expert_load.watch()

    def record_step(
        self,
        scheduler: Scheduler,
        batch: ScheduledBatch,
        plan: StepPlan,
        *,
        schedule: float,
        exchange: float,
        times: RunTimes,
        output: float,
    ) -> None:
        """Add one step that ran. Times in seconds."""
        self.num_steps += 1
        mode = batch.forward_mode
        self.num_idle_steps += mode == ForwardMode.IDLE
        sampled = int(batch.samples.sum())
        self.generation_tokens += sampled
        self.prompt_tokens += sum(
            len(seq.request.prompt_token_ids) for seq in batch.admitted if not seq.num_preemptions
        )
        if plan.padded_tokens:
            self.padding_tokens += plan.padded_tokens - batch.num_tokens
        self.step_tokens.observe(batch.num_tokens)
        self.kinds[mode.name, plan.graph_mode.name, str(plan.microbatch)] += 1
        parts = (schedule, exchange, times.prepare, times.forward, times.sample, output)
        for name, seconds in zip(STEP_PARTS, parts, strict=True):
            self.seconds[name] += seconds
        if self._expert_load.watching:
            self._look_at_experts()
        self.record_idle(scheduler)

    def record_idle(self, scheduler: Scheduler) -> None:
        """Refresh the gauges."""
        self._gauges = {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "kv_cache_usage": scheduler.pool.usage,
            "preemptions": scheduler.num_preemptions,
            "prefix_cache_queries": scheduler.prefixes.num_queries,
            "prefix_cache_hits": scheduler.prefixes.num_hits,
        }

    def snapshot(self) -> dict[str, Any]:
        """All of it, picklable.

        kinds        steps by (forward mode, graph mode, microbatched)
        histograms   name -> its bounds, and its values (see `Histogram.values`)
        time         when this was taken, by this machine's monotonic clock, for rates
        """
        timer = self.requests
        histograms = {
            "request_queue_time": timer.queue,
            "request_prefill_time": timer.prefill,
            "request_decode_time": timer.decode,
            "request_inference_time": timer.inference,
            "step_tokens": self.step_tokens,
        }
        return {
            **self._gauges,
            "time": time.monotonic(),
            "steps": self.num_steps,
            "idle_steps": self.num_idle_steps,
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
            "padding_tokens": self.padding_tokens,
            "step_seconds": dict(self.seconds),
            "kinds": dict(self.kinds),
            "expert_rows_sampled": self._expert_rows,
            "expert_balancedness": self._balancedness,
            "histograms": {name: (h.bounds, h.values()) for name, h in histograms.items()},
            "process": process_info(),
        }

    def _look_at_experts(self) -> None:
        sample = self._expert_load.finish()
        if sample is not None:
            self._expert_rows += sample.rows
            self._balancedness = sample.balancedness
