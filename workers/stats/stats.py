"""Statistics of one rank, written by the step loop and read by other threads as a plain dict."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workers.scheduler.scheduler import Scheduler
from workers.stats.drafts import DraftCounts
from workers.stats.expert_counts import ExpertCounts
from workers.stats.histogram import Histogram
from workers.stats.invalid_logits import InvalidLogits
from workers.stats.own_work import WorkMeter
from workers.stats.pace import Pace
from workers.stats.process_info import process_info
from workers.stats.request_times import RequestTimer
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.step_output import StepOutput
from workers.step.step_sync import StepPlan

STEP_PARTS = ("schedule", "vote", "prepare", "forward", "sample", "draft", "output")
STEP_TOKENS = tuple(float(2**i) for i in range(15))


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Seconds of one step on the host before its launch."""

    schedule: float = 0.0
    vote: float = 0.0


class EngineStats:
    """Counters since the start, and gauges of the last step."""

    def __init__(self, pace: Pace | None = None) -> None:
        self.requests = RequestTimer()
        self.pace = pace or Pace()
        self.work = WorkMeter()
        self.num_steps = 0
        self.num_idle_steps = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.padding_tokens = 0
        self.seconds = dict.fromkeys(STEP_PARTS, 0.0)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.kinds: Counter[tuple[str, str, str]] = Counter()
        self.experts = ExpertCounts()
        self.moves: Callable[[], dict[str, int]] = dict  # of experts, see ExpertMoves.counts
        self.shared_reads: Callable[[], dict[str, int]] = dict  # see SharedReads.counts
        self._prefill_cap: int | None = None
        self._invalid_logits = InvalidLogits()
        self._drafts = DraftCounts()
        self._gauges: dict[str, Any] = {
            "running": 0,
            "waiting": 0,
            "kv_cache_usage": 0.0,
            "preemptions": 0,
            "invalid_logits": 0,
            "prefix_cache_queries": 0,
            "prefix_cache_hits": 0,
        }

    def before_step(self, batch: ScheduledBatch, plan: StepPlan) -> None:
        """Count the requests of a batch before it runs."""
        self.pace.begin(sum(plan.num_tokens_across_dp))
        self.work.launch(batch, plan)
        if batch.admitted:
            self.requests.admitted(batch.admitted)
            self.prompt_tokens += sum(
                len(seq.request.prompt_token_ids)
                for seq in batch.admitted
                if not (
                    seq.num_preemptions or seq.request.emitted_token_ids or seq.request.is_probe
                )
            )

    def record_step(
        self,
        scheduler: Scheduler,
        batch: ScheduledBatch,
        plan: StepPlan,
        host: HostTimes,
        output: StepOutput,
        *,
        generated: int,
        publish: float,
    ) -> None:
        """Count a committed step with `generated` output tokens, published in `publish` seconds."""
        self.pace.end()
        self.num_steps += 1
        mode = batch.forward_mode
        self.num_idle_steps += mode.is_idle()
        self.generation_tokens += generated
        if plan.padded_tokens:
            self.padding_tokens += plan.padded_tokens - batch.num_tokens
        self.step_tokens.observe(batch.num_tokens)
        self._prefill_cap = plan.prefill_cap or self._prefill_cap
        self._invalid_logits.count(batch, output)
        self._drafts.count(batch, output)
        self.kinds[mode.name, plan.graph_mode.name, str(plan.ubatch)] += 1
        times = output.times()
        host_parts = host.schedule, host.vote, times.prepare
        parts = *host_parts, times.forward, times.sample, times.draft, publish
        for name, seconds in zip(STEP_PARTS, parts, strict=True):
            self.seconds[name] += seconds
        if output.expert_counts is not None:
            assert plan.load_step is not None
            self.work.sampled(self.experts.read(plan.load_step, output.expert_counts))
        self.record_idle(scheduler)

    def record_idle(self, scheduler: Scheduler) -> None:
        """Update the gauges."""
        images = scheduler.images.gauges() if scheduler.images else {}
        self._gauges = {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting) + images.get("images_waiting", 0),
            "preemptions": scheduler.num_preemptions,
            "invalid_logits": scheduler.num_invalid,
            **scheduler.cache.gauges(),
            **(scheduler.adapters.gauges() if scheduler.adapters else {}),
            **images,
        }

    def snapshot(self) -> dict[str, Any]:
        """Return all statistics, picklable.

        kinds        steps by (forward mode, graph mode, ubatched)
        prefill_cap  most prompt tokens of a rank in the last step with decodes; None: no limit, or no such step yet
        histograms   name -> bounds and values (see `Histogram.values`)
        time         monotonic time of the snapshot in seconds, for rates
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
            "invalid_logits_rows": self._invalid_logits.num_rows,
            "drafts": self._drafts.num_drafts,
            "draft_tokens": self._drafts.num_tokens,
            "accepted_tokens": sum(self._drafts.accepted),
            "accepted_tokens_by_place": list(self._drafts.accepted),
            "step_seconds": dict(self.seconds),
            "kinds": dict(self.kinds),
            "prefill_cap": self._prefill_cap,
            **self.experts.snapshot(),
            **self.moves(),
            **self.shared_reads(),
            "histograms": {name: (h.bounds, h.values()) for name, h in histograms.items()},
            "process": process_info(),
        }
