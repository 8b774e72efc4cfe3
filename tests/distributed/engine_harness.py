"""Runs whole engines in the processes of a RankPool, step by step, without Ray."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.distributed.rank_pool import RankPool
from workers.config import RankConfig
from workers.stats.own_work import OwnWork
from workers.wire.request import NO_OUTPUT, EngineRequest, PoolingParams, SamplingParams

LONG_PAUSE = 20
"""Steps without work in which saves end, however late the machine runs the threads and the process that save."""


@dataclass(frozen=True)
class Event:
    """Before step `step` of rank `rank`: submit `request`, or abort the request named `abort`."""

    step: int
    rank: int
    request: EngineRequest | None = None
    abort: str | None = None


@dataclass
class RankResult:
    """What one rank's requests got, and how it ran."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    logits: dict[str, list[Any]] = field(default_factory=dict)
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[Any]] = field(default_factory=dict)
    vectors: dict[str, Any] = field(default_factory=dict)
    num_steps: int = 0
    num_microbatched: int = 0
    num_preemptions: int = 0
    prefix_cache_hits: int = 0
    states_restored: int = 0
    shared_prefix_rows: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    images_computed: int = 0
    cached_tokens: dict[str, int] = field(default_factory=dict)
    accepted: dict[str, int] = field(default_factory=dict)
    gauges: dict[str, float] = field(default_factory=dict)
    work: OwnWork = field(default_factory=OwnWork)


def rank_config(
    checkpoint: Path, num_ranks: int, device: str = "cpu", **sections: dict[str, Any]
) -> RankConfig:
    """A resolved configuration; `sections` override, e.g. scheduler={"max_num_seqs": 4}.

    With the all-to-all `hierarchical` the ranks are taken for those of two hosts, an odd number for hosts of one each.
    """
    values: dict[str, Any] = {
        "model": {"path": str(checkpoint), "dtype": "float32", "max_model_len": 1024},
        "scheduler": {"max_num_seqs": 16, "max_num_batched_tokens": 256},
        "cache": {"block_size": 16, "num_blocks": 1024},
        "kernels": {},
        "overlap": {"mode": "off"},
        "speculation": {},
    }
    for name, changes in sections.items():
        values[name] = {**values.get(name, {}), **changes}
    hosts = 1
    if values["kernels"].get("all2all") == "hierarchical":
        hosts = num_ranks if num_ranks % 2 else 2
    return RankConfig(
        **values,
        num_ranks=num_ranks,
        num_nodes=hosts,
        device=device,
        threads=1,
        vote_timeout_s=60,
    )


def make_request(name: str, prompt: list[int], **params: Any) -> EngineRequest:
    """A request of the only ingress there is; greedy unless told otherwise."""
    values = {"max_tokens": 16, "temperature": 0.0, **params}
    return EngineRequest(
        request_id=name,
        ingress_id="test",
        prompt_token_ids=prompt,
        params=SamplingParams(**values),
    )


def make_pooling(name: str, prompt: list[int], **params: Any) -> EngineRequest:
    """A request of the only ingress there is that answers with a vector."""
    return EngineRequest(
        request_id=name,
        ingress_id="test",
        prompt_token_ids=prompt,
        params=NO_OUTPUT,
        pooling=PoolingParams(**params),
    )


def run_engines(
    pool: RankPool,
    config: RankConfig,
    events: list[Event],
    *,
    keep_logits: bool = False,
    max_steps: int = 5000,
    timeout_s: float = 120,
    function: Callable[..., RankResult] | None = None,
) -> list[RankResult]:
    """Run all events to their end on `config.num_ranks` ranks, each by `function` in place of `run_rank`."""
    from workers.rank.process_group import local_rendezvous

    with local_rendezvous() as rendezvous:
        arguments = (config, rendezvous, events, keep_logits, max_steps)
        return pool.run(
            function or run_rank,
            config.num_ranks,
            *arguments,
            with_group=False,
            timeout_s=timeout_s,
        )


def run_rank(
    rank_index: int,
    num_ranks: int,
    info: Any,
    config: RankConfig,
    rendezvous: Any,
    events: list[Event],
    keep_logits: bool,
    max_steps: int,
) -> RankResult:
    from tests.integrity import check_every_step
    from workers.rank.epoch import Epoch
    from workers.rank.process import RankProcess

    if config.device == "cuda":
        from tests.devices import take_gpu

        take_gpu(rank_index)
    result = RankResult()

    def publish(ingress_id: str, outputs: list[Any]) -> None:
        for output in outputs:
            if output.begins:
                continue
            result.cached_tokens.setdefault(output.request_id, 0)
            result.cached_tokens[output.request_id] += output.num_cached_tokens
            result.tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if output.drafts is not None:
                result.accepted.setdefault(output.request_id, 0)
                result.accepted[output.request_id] += output.drafts[0]
            if output.logprobs is not None:
                result.logprobs.setdefault(output.request_id, []).extend(output.logprobs)
            if output.prompt_logprobs is not None:
                assert output.request_id not in result.prompt_logprobs, "told of its prompt twice"
                result.prompt_logprobs[output.request_id] = output.prompt_logprobs
            if output.vector is not None:
                result.vectors[output.request_id] = output.vector
            if output.finish_reason:
                assert output.request_id not in result.reasons, "finished twice"
                result.reasons[output.request_id] = output.finish_reason
            if output.error:
                result.errors[output.request_id] = output.error

    check_every_step()
    process = RankProcess(rank_index, config)
    try:
        epoch = Epoch(process, rendezvous, 60)
        epoch.load()
        epoch.start_engine(publish, lambda step: None)
        assert process.kv_places.wait_ready(60), "the host tier has not started"
        _never_wait_outside(epoch.engine.scheduler)
        if keep_logits:
            _record_logits(epoch.engine, result)
        _spoil_unused_states(epoch)
        _step_to_the_end(epoch, events, max_steps, result)
        _await_transfers(epoch.engine.scheduler)
        kinds = epoch.engine.stats.kinds.items()
        result.num_microbatched = sum(count for (_, _, cut), count in kinds if cut == "True")
        result.work = epoch.engine.stats.work.total
        result.num_preemptions = epoch.engine.scheduler.num_preemptions
        counts = epoch.engine.stats.snapshot()
        result.shared_prefix_rows = counts.get("shared_prefix_rows", 0)
        result.num_draft_tokens = counts["draft_tokens"]
        result.num_accepted_tokens = counts["accepted_tokens"]
        if process.images is not None:
            result.images_computed = process.images.num_computed
        result.prefix_cache_hits = epoch.engine.scheduler.cache.num_hits
        gauges = epoch.engine.scheduler.cache.gauges()
        result.states_restored = int(gauges.get("states_restored", 0))
        result.gauges = gauges
        assert gauges["kv_cache_usage"] == 0, "blocks leaked"
    finally:
        process.close()
    return result


def _step_to_the_end(epoch: Any, events: list[Event], max_steps: int, result: RankResult) -> None:
    """All ranks see the same plans, so all leave after the same step, and a pause is one of all ranks."""
    pause = 0
    last_event = max((event.step for event in events), default=0)
    mine: dict[int, list[Event]] = {}
    for event in events:
        if event.rank == epoch.process.rank:
            mine.setdefault(event.step, []).append(event)
    for step in range(max_steps):
        for event in mine.get(step, []):
            if event.request is not None:
                epoch.engine.submit(event.request)
            else:
                epoch.engine.abort(event.abort)
        plan = epoch.engine.step()
        result.num_steps += plan.run
        pause = pause + 1 if plan.sleeps else 0
        if plan.sleeps:
            epoch.engine.scheduler.settle(idle=True)
        if pause == LONG_PAUSE:
            _await_transfers(epoch.engine.scheduler)
        epoch.process.grammars.wait()
        if epoch.process.images is not None:
            epoch.process.images.wait()
        # The grammars that a step has seen are compiled by the next one, which may be the first to run.
        if step > last_event and plan.sleeps:
            return
    raise AssertionError(f"not done after {max_steps} steps")


def _never_wait_outside(scheduler: Any) -> None:
    """Let steps wait for transfers where a rank would otherwise have no work: the ranks leave when none has any."""
    schedule = scheduler.schedule

    def waiting_schedule(prefill_cap: int) -> Any:
        batch = schedule(prefill_cap)
        while not batch.seqs and scheduler._by_id and scheduler.cache.transfers_ended is not None:
            _await_transfers(scheduler)
            batch = schedule(prefill_cap)
        return batch

    scheduler.schedule = waiting_schedule


def _await_transfers(scheduler: Any) -> None:
    """End all transfers."""
    deadline = time.monotonic() + 60
    while (transfers := scheduler.cache.transfers) is not None and transfers.num_open:
        assert time.monotonic() < deadline, "a transfer does not end"
        time.sleep(1e-4)
        scheduler.settle(idle=True)


def _spoil_unused_states(epoch: Any) -> None:
    """Fill every slot of linear attention that no forward may read with NaN before each forward, the null slot too."""
    from tests.unit.schedulers import snapshots_of

    runner, scheduler, pools = (
        epoch.engine.runner,
        epoch.engine.scheduler,
        epoch.process.caches.states,
    )
    plan = runner._plan

    def spoiling_plan(*args: Any) -> Any:
        live = {seq.row + 1 for seq in scheduler.running if seq.num_computed_tokens}
        kept = live.union(snapshots_of(scheduler.cache).slots)
        for slots in (slots for pool in pools for slots in (pool.conv, pool.state)):
            slots[[slot for slot in range(len(slots)) if slot not in kept]] = float("nan")
        return plan(*args)

    if pools:
        runner._plan = spoiling_plan


def _record_logits(engine: Any, result: RankResult) -> None:
    """Keep the logits of every sampled token, by request."""
    runner = engine.runner
    launch, compute = runner.launch, runner.model.compute_logits
    names: list[str] = []

    def recording_launch(batch: Any, plan: Any) -> Any:
        names[:] = [batch.seqs[index].request.request_id for index in batch.logits_seqs]
        return launch(batch, plan)

    def recording_compute(hidden: Any) -> Any:
        logits = compute(hidden)
        for name, row in zip(names, logits, strict=True):
            result.logits.setdefault(name, []).append(row.cpu().numpy().copy())
        return logits

    runner.launch, runner.model.compute_logits = recording_launch, recording_compute
