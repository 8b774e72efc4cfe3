"""Runners and schedulers of one epoch: for warm-up, for measuring the memory of a step, and for serving."""

import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import torch

from kernels.attention.base import Attention
from kernels.backends.graph_planner import GraphPlanner
from kernels.backends.select import Backends
from workers.kv_cache.demand import sizes_that_fit
from workers.kv_cache.manager import KVCacheManager
from workers.models.decoder import DecoderLM
from workers.overlap.epoch_ubatches import EpochUbatches
from workers.overlap.rank_overlap import Gather
from workers.rank import process_group
from workers.rank.device_memory import memory_for
from workers.rank.draft_model import EpochDraft
from workers.rank.kv_sizing import (
    OwnBytes,
    check_longest_request_fits,
    free_bytes,
    own_bytes,
)
from workers.rank.process import RankProcess
from workers.rank.rank_images import measure_time, run_largest
from workers.rank.rank_info import Progress
from workers.rank.warm_up_steps import WarmUpSteps
from workers.runner.graph_sizes import GraphSizes
from workers.runner.graph_times import agreed_times
from workers.runner.model_runner import ModelRunner
from workers.scheduler.image_queue import ImageQueue
from workers.scheduler.scheduler import Scheduler
from workers.speculation.synthetic import acceptance_of
from workers.step.adapter_slots import AdapterSlots

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunnerMaker:
    """Makes runners over KV caches that are already bound to the attention."""

    process: RankProcess
    model: DecoderLM
    backends: Backends
    ubatches: EpochUbatches
    draft: EpochDraft | None = None

    def __call__(
        self, cache: KVCacheManager, attention: Attention | None = None
    ) -> tuple[ModelRunner, Scheduler]:
        """Return a runner and its scheduler over `cache`; `attention` replaces the attention of whole steps."""
        process, model, backends = self.process, self.model, self.backends
        config = process.config
        if attention is not None:
            backends = replace(backends, attention=attention)
            model = model.with_backends(backends)
        scheduler = Scheduler(config.scheduler, cache, process.max_model_len)
        if (store := process.adapters) is not None:
            scheduler.adapters = AdapterSlots(
                config.lora.max_loras, store.__contains__, store.write, store.pools.num_pieces
            )
        if process.images is not None:
            scheduler.images = ImageQueue(process.images)
        drafts = None
        if self.draft is not None:
            most = config.speculation.num_draft_tokens
            drafts = self.draft.passes(scheduler, process.device, most)
        runner = ModelRunner(
            model,
            backends,
            scheduler.table,
            cache,
            rank=process.rank,
            max_num_tokens=config.scheduler.max_num_batched_tokens,
            max_num_seqs=config.scheduler.max_num_seqs,
            num_threads=config.threads,
            device=process.device,
            asynchronous=process.asynchronous,
            ubatches=self.ubatches.wrapper(self.model),
            drafts=drafts,
            acceptance=acceptance_of(config.speculation),
            adapters=process.adapters is not None,
        )
        return runner, scheduler

    def bind_draft(self, draft_caches: Sequence[torch.Tensor]) -> None:
        """Bind the caches of the draft model, if there is one; later runners run it."""
        if self.draft is not None:
            self.draft.attention.bind(draft_caches)

    def run_largest_image(self) -> None:
        """On a GPU, compile the kernels of the vision tower, and measure its largest call's memory, and its time."""
        process = self.process
        if process.images is not None and process.device.type == "cuda":
            with memory_for("the largest image (scheduler.max_image_tokens)"):
                process.image_bytes = run_largest(process.images)
                measure_time(process.images)

    def warm_up_steps(self) -> WarmUpSteps:
        """Return the steps that all ranks run alike, before there are requests."""
        config = self.process.config
        return WarmUpSteps(
            self.process.dims,
            self.backends.all2all.needs_equal_tokens,
            self.process.max_model_len,
            config.scheduler,
            config.cache.block_size,
            self.process.model_config.vocab_size,
            windows=self.process.model_config.window is not None,
            num_drafts=config.speculation.most_drafts,
            pooling=self.process.pooling,
            adapters=self.process.adapters is not None,
        )

    def graph_sizes(self) -> GraphSizes:
        """Return the sizes of the CUDA graphs; none where graphs are off or unavailable."""
        mixed = GraphPlanner.of(self.backends).captures_prompts
        drafts = self.draft is not None and self.draft.captures_all_passes
        return self.process.graph_sizes(mixed=mixed, drafts=drafts)

    def capture_graphs(
        self,
        runner: ModelRunner,
        sizes: GraphSizes,
        gather: Gather,
        progress: Progress | None,
        *,
        on_demand: bool,
    ) -> int:
        """Capture the graphs of `runner` and return their bytes; time them if drafts need it. Collective.

        on_demand   capture the largest now, the rest when steps need them
        """
        process = self.process
        with memory_for("CUDA graphs"):
            graphs = runner.make_graphs(sizes, on_demand=on_demand)
            num_bytes = graphs.provide(graphs.keys, progress)
        captured = "captures on demand" if on_demand else "captured"
        logger.info("%s CUDA graphs of %s: %.2f GB", captured, sizes, num_bytes / 1e9)
        if process.config.speculation.method != "off":
            process.step_seconds = agreed_times(graphs, process.step_seconds, gather)
            if process.rank == 0:
                logger.info("milliseconds of a step by rows: %s", process.step_seconds)
        return num_bytes

    def cache_sizes(self, graph_sizes: GraphSizes) -> tuple[int, int]:
        """Return the KV blocks and snapshots of states of every rank: as configured, or measured. Collective.

        A profiling forward measures the memory beside them.
        """
        process, cache = self.process, self.process.config.cache
        if cache.num_blocks != "auto":
            return cache.num_blocks, process.caches.num_snapshots
        assert process.device.type == "cuda", "on CPU the configuration sets the number of blocks"
        own = self._own_bytes(graph_sizes)
        free = free_bytes(process.device, cache.memory_fraction, own.total)
        if not process.dims.alone:
            of_ranks = process_group.gather_json((free, asdict(own)))
            free, fields = min(of_ranks, key=lambda found: found[0])
            own = OwnBytes(**fields)
        demand = process.caches.demand
        blocks, snapshots = sizes_that_fit(
            free,
            cache,
            demand,
            process.max_model_len,
            block_bytes=process.caches.block_bytes,
            slot_bytes=process.caches.slot_bytes,
            num_rows=process.config.scheduler.max_num_seqs,
        )
        check_longest_request_fits(blocks, process.max_model_len, demand, own)
        return blocks, snapshots

    def _own_bytes(self, graph_sizes: GraphSizes) -> OwnBytes:
        """Measure with a small KV cache, which is freed afterwards."""
        process, steps = self.process, self.warm_up_steps()
        with memory_for("a step"):
            self.ubatches.bind(process.caches.new_kv_caches(steps.num_blocks))
            runner, scheduler = self(process.caches.new_manager(steps.num_blocks))
        own = own_bytes(
            steps,
            runner,
            scheduler,
            graph_sizes,
            weight_bytes=process.weight_bytes() + process.adapter_bytes,
            kv_bytes=steps.num_blocks * process.caches.block_bytes,
            state_bytes=process.caches.state_bytes,
            image_bytes=process.image_bytes,
        )
        self.ubatches.bind(())
        return own
