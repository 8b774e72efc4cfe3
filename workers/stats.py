"""What one rank counts about itself. Written by the step loop, read by other threads as a plain dict."""

from typing import Any

from workers.model_runner import RunTimes
from workers.scheduler import ScheduledBatch, Scheduler
from workers.step_sync import ForwardMode, StepPlan

STEP_PARTS = ("schedule", "exchange", "prepare", "forward", "sample", "output")


class EngineStats:
    """Counters since start, and gauges as of the last step."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_idle_steps = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.padding_tokens = 0
        self.seconds = dict.fromkeys(STEP_PARTS, 0.0)
        self._gauges: dict[str, Any] = {
            "running": 0,
            "waiting": 0,
            "kv_cache_usage": 0.0,
            "preemptions": 0,
        }

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
        self.num_idle_steps += batch.forward_mode == ForwardMode.IDLE
        sampled = int(batch.samples.sum())
        self.generation_tokens += sampled
        self.prompt_tokens += sum(
            len(seq.request.prompt_token_ids) for seq in batch.admitted if not seq.num_preemptions
        )
        if plan.padded_tokens:
            self.padding_tokens += plan.padded_tokens - batch.num_tokens
        parts = (schedule, exchange, times.prepare, times.forward, times.sample, output)
        for name, seconds in zip(STEP_PARTS, parts, strict=True):
            self.seconds[name] += seconds
        self.record_idle(scheduler)

    def record_idle(self, scheduler: Scheduler) -> None:
        """Refresh the gauges."""
        self._gauges = {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "kv_cache_usage": scheduler.pool.usage,
            "preemptions": scheduler.num_preemptions,
            "prefix_cache_queries": scheduler.prefix_cache_queries,
            "prefix_cache_hits": scheduler.prefix_cache_hits,
        }

    def snapshot(self) -> dict[str, Any]:
        """All of it, picklable."""
        return {
            **self._gauges,
            "steps": self.num_steps,
            "idle_steps": self.num_idle_steps,
            "prompt_tokens": self.prompt_tokens,
            "generation_tokens": self.generation_tokens,
            "padding_tokens": self.padding_tokens,
            "step_seconds": dict(self.seconds),
        }
