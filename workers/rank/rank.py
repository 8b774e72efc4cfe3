"""Builds one rank in named stages and owns what it is made of. Knows nothing of Ray.

The stages are collective: every rank goes through them in the same order.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace

import torch

from kernels.attention.base import Attention
from kernels.attention.dummy import DummyAttention
from kernels.attention.kv_layout import KVGroup, kv_block_bytes
from kernels.backends import select
from kernels.backends.context import BackendContext
from kernels.backends.memory import backend_memory
from kernels.host.shm import SharedMemoryGroup, shared_memory_unavailable
from workers.config import RankConfig, not_for_answers
from workers.engine.engine import Engine, Publish
from workers.engine.kv_caches import allocate_kv_caches
from workers.engine.scheduler import Scheduler
from workers.engine.step_sync import PlanConfig, compare_settings
from workers.engine.vote_transport import make_vote_transport
from workers.models.registry import load_model_config, model_class
from workers.models.specs import ModelConfig
from workers.rank import process_group
from workers.rank.backend_choice import (
    backend_shape,
    forced_routing,
    graphs_off,
)
from workers.rank.device_memory import memory_for
from workers.rank.kv_sizing import OwnBytes, blocks_that_fit, check_room, own_bytes
from workers.rank.rank_info import GRAPHS, KERNELS, KV_CACHE, WEIGHTS, RankInfo, Rendezvous
from workers.rank.warm_up import warm_up_sizes
from workers.rank.warm_up_steps import WarmUpSteps, bind_beside
from workers.runner.graph_sizes import GraphSizes, graphs_to_capture
from workers.runner.model_runner import ModelRunner
from workers.sampling.grammar import GrammarCompiler
from workers.stats.stats import EngineStats
from workers.ubatch.epoch_ubatches import EpochUbatches
from workers.ubatch.rank_overlap import RankOverlap
from workers.weights.initial_weights import draw_weights
from workers.weights.loader import load_weights
from workers.weights.tensors import rank_weight_bytes

logger = logging.getLogger(__name__)
Progress = Callable[[int, int], None]


class Rank:
    """One data-parallel rank: its model shard, cache, kernels and engine."""

    def __init__(self, rank: int, config: RankConfig):
        self.rank = rank
        self.config = config
        self.model_config: ModelConfig = load_model_config(config.model.path)
        self.device = torch.device(config.device)
        if config.device == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        wanted = config.scheduler.async_scheduling
        self.asynchronous = self.device.type == "cuda" if wanted == "auto" else wanted
        self.dtype: torch.dtype = getattr(torch, str(config.model.dtype))
        self.max_model_len = int(config.model.max_model_len)
        self.engine: Engine | None = None
        self.grammars: GrammarCompiler | None = None
        self.shared_memory: SharedMemoryGroup | None = None
        self._attention_compiled: Future[None] | None = None
        self._sized: tuple[ModelRunner, Scheduler] | None = None
        self._graph_sizes = GraphSizes()
        self._graph_bytes = 0
        torch.set_num_threads(config.threads)

    def join_group(self, rendezvous: Rendezvous, timeout_s: float) -> None:
        """Meet the other ranks and make sure that all were told the same."""
        config = self.config
        self.rendezvous = rendezvous
        self.backend_shape = backend_shape(config, self.model_config)
        unavailable = select.probe(self.device)
        self.selection = select.select(config.kernels, unavailable, self.backend_shape)
        self.placement = config.dims.expert_placement(self.model_config.num_experts)
        if not config.dims.alone:
            with memory_for("the ranks' group"):
                process_group.join(rendezvous, self.rank, config.num_ranks, self.device, timeout_s)
                compare_settings(process_group.gather_objects(self._settings()))
            self.shared_memory = self._share_memory()
        context = self._kernel_context()
        num_ubatches = config.overlap.num_ubatches
        takes = backend_memory(self.selection, self.backend_shape, num_ubatches=num_ubatches)
        with memory_for("the exchange's buffers", takes.kept):
            self.kernels = select.build(self.selection, context)
        with memory_for("ubatches", takes.ubatches):
            overlap = RankOverlap.configured(config.overlap, self.selection.all2all_class)
            self.overlap = EpochUbatches(overlap, config, self.selection, context, self.kernels)

    def run_stage(self, name: str, progress: Progress) -> None:
        """One of rank_info.start_stages, which all ranks go through in their order."""
        stages = {
            WEIGHTS: self.load,
            KERNELS: self.compile_kernels,
            KV_CACHE: self.size_cache,
            GRAPHS: self.capture_graphs,
        }
        stages[name](progress)

    def load(self, progress: Progress | None = None) -> None:
        """Build the model and read this rank's weights; attention's kernels are compiled beside it."""
        if self.device.type == "cuda":
            with memory_for("attention's workspace"):
                self._attention_compiled = bind_beside(self.kernels.attention, self._caches(1))
        self.grammars = GrammarCompiler(self.config.model.path, self.model_config.vocab_size)
        with memory_for("the weights", self._weight_bytes()):
            self._load(progress)

    def _load(self, progress: Progress | None) -> None:
        self.model = model_class(self.model_config)(
            self.model_config,
            self.kernels,
            placement=self.placement,
            rank=self.rank,
            device=self.device,
            dtype=self.dtype,
            max_positions=self.max_model_len,
            forced_routing=forced_routing(self.config, self.model_config, self.rank, self.device),
        )
        if self.rank == 0:
            for warning in not_for_answers(self.config.model):
                logger.warning("%s", warning)
        where = {"config": self.model_config, "placement": self.placement, "rank": self.rank}
        where |= {"device": self.device, "progress": progress}
        if self.config.model.weights == "dummy":
            draw_weights(self.model, **where)
        else:
            load_weights(self.model, self.config.model.path, **where)

    def compile_kernels(self, progress: Progress | None = None) -> None:
        """Collective: run all that compiles at first use, at every size of step that has kernels of its own.

        Attention's kernels, which take longest, are compiled on, and a stand-in takes their place.
        """
        max_tokens = self.config.scheduler.max_num_batched_tokens
        sizes = warm_up_sizes(max_tokens, dense=self.kernels.grouped_gemm.compiles_by_rows)
        steps, total = self._warm_up_steps(), len(sizes) + 2
        tell = progress or (lambda done, total: None)
        stand_in = DummyAttention(self.kernels.attention)
        with memory_for("a step"):
            stand_in.bind(self._caches(1))
            runner, scheduler = self._runner(steps.num_blocks, stand_in)
            for done, size in enumerate(sizes):
                tell(done, total)
                steps.prefill(runner, scheduler, size)
            tell(len(sizes), total)
            steps.sample(runner, scheduler)
        tell(total - 1, total)
        self._wait_for_attention()
        tell(total, total)
        self.overlap.bind(())

    def size_cache(self, progress: Progress | None = None) -> None:
        """Collective: size and allocate the KV cache, and run a step with it."""
        self._wait_for_attention()
        mixed = self.kernels.attention.mixed_graph
        self._graph_sizes = graphs_to_capture(
            self.config.scheduler, self.selection, self.device, mixed=mixed
        )
        num_blocks = self._num_blocks()
        with memory_for("the KV cache", num_blocks * self._block_bytes()):
            runner, scheduler = self._runner(num_blocks)
            num_tokens = min(64, self.config.scheduler.max_num_batched_tokens)
            self._warm_up_steps().prefill(runner, scheduler, num_tokens)
        self._sized = runner, scheduler
        if not self._graph_sizes:
            self._tune_overlap(None)

    def capture_graphs(self, progress: Progress | None = None) -> None:
        """Collective: capture the forwards of steps, where the kernels can and the configuration wants it."""
        assert self._sized is not None, "size_cache comes first"
        sizes = self._graph_sizes
        if not sizes:
            if self.device.type == "cuda" and self.rank == 0:
                wanted = self.config.scheduler.cuda_graphs
                logger.info("no CUDA graphs: %s", graphs_off(wanted, self.selection, "cuda"))
            return
        with memory_for("CUDA graphs"):
            graphs = self._sized[0].make_graphs(sizes)
            self._graph_bytes = graphs.capture(sizes.whole_steps(), progress)
        logger.info("captured CUDA graphs of %s: %.2f GB", sizes, self._graph_bytes / 1e9)
        self._tune_overlap(progress)

    def _tune_overlap(self, progress: Progress | None) -> None:
        assert self._sized is not None
        with memory_for("ubatches"):
            self.overlap.tune(*self._sized, self.max_model_len, self._settings(), progress)

    def start_engine(self, publish: Publish, wake_peers: Callable[[int], None]) -> RankInfo:
        """Make the engine, after all stages before it; sizes the cache first where that was left out."""
        if self._sized is None:
            self.size_cache()
            self.capture_graphs()
        assert self._sized is not None
        runner, scheduler = self._sized
        num_blocks = scheduler.pool.num_blocks
        if not self.selection.all2all_class.needs_process_group:
            # Sockets were needed to meet; gloo's thread would go on polling them 100 times a second.
            process_group.leave(None)
        exchange = make_vote_transport(
            self.config.num_ranks, self.device, self.config.vote_timeout_s, self.shared_memory
        )
        self.engine = Engine(
            scheduler,
            runner,
            exchange,
            self._plan_config(),
            epoch=self.rendezvous.epoch,
            publish=publish,
            wake_peers=wake_peers,
            stats=EngineStats(self.kernels.expert_load),
            grammars=self.grammars,
            asynchronous=self.asynchronous,
            graph_sizes=self._graph_sizes,
            overlap=self.overlap.policy,
        )
        return RankInfo(
            rank=self.rank,
            backends=self.selection.names(),
            num_blocks=num_blocks,
            block_size=self.config.cache.block_size,
            max_model_len=self.max_model_len,
            memory_bytes=self._memory_bytes(num_blocks),
        )

    def close(self) -> None:
        """Leave the group and free what is shared with other ranks."""
        if self.grammars is not None:
            self.grammars.close()
        if self._sized is not None:
            self._sized[0].close()
        self.overlap.close()
        self.kernels.all2all.close()
        process_group.leave(self.shared_memory)

    def _settings(self) -> dict[str, object]:
        """What must be equal on all ranks, flat, with dotted names."""
        config = self.config
        flat: dict[str, object] = {"torch": torch.__version__}
        for section in ("model", "scheduler", "cache", "kernels", "overlap"):
            values = getattr(config, section).model_dump()
            flat.update({f"{section}.{key}": value for key, value in values.items()})
        flat.update({f"backend.{key}": name for key, name in self.selection.names().items()})
        flat.update(num_ranks=config.num_ranks, device=config.device)
        return flat

    def _kernel_context(self) -> BackendContext:
        config = self.config
        return BackendContext(
            shape=self.backend_shape,
            device=self.device,
            rank=self.rank,
            group=None if config.dims.alone else torch.distributed.group.WORLD,
            shared_memory=self.shared_memory,
            placement=self.placement,
            block_size=config.cache.block_size,
        )

    def _share_memory(self) -> SharedMemoryGroup | None:
        """Memory that all ranks of one host share: for the votes, and for the `shm` exchange; else None."""
        config = self.config
        if not config.dims.on_one_host or shared_memory_unavailable():
            return None
        return SharedMemoryGroup(
            self.rendezvous.name,
            self.rank,
            config.num_ranks,
            slot_bytes=self.selection.all2all_class.shared_memory_slots(self.backend_shape),
            timeout_s=config.vote_timeout_s,
        )

    def _plan_config(self) -> PlanConfig:
        equal_tokens = self.kernels.all2all.needs_equal_tokens
        return PlanConfig(equal_tokens, self.config.overlap.num_ubatches)

    def _runner(
        self, num_blocks: int, stand_in: Attention | None = None
    ) -> tuple[ModelRunner, Scheduler]:
        """A fresh cache of `num_blocks`, and who works with it; none with another attention in place of ours."""
        config, model, kernels = self.config, self.model, self.kernels
        block_size = config.cache.block_size
        if stand_in is None:
            self.overlap.bind(self._caches(num_blocks))
        else:
            kernels = replace(kernels, attention=stand_in)
            model = model.with_kernels(kernels)
        scheduler = Scheduler(
            config.scheduler,
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=self.max_model_len,
            prefix_caching=config.cache.prefix_caching,
        )
        runner = ModelRunner(
            model,
            kernels,
            scheduler.table,
            rank=self.rank,
            max_num_tokens=config.scheduler.max_num_batched_tokens,
            max_num_seqs=config.scheduler.max_num_seqs,
            num_threads=config.threads,
            device=self.device,
            asynchronous=self.asynchronous,
            ubatches=self.overlap.wrapper(self.model),
        )
        return runner, scheduler

    def _warm_up_steps(self) -> WarmUpSteps:
        return WarmUpSteps(
            self.config.dims,
            self._plan_config().equal_tokens,
            self.max_model_len,
            self.config.scheduler,
            self.config.cache.block_size,
        )

    def _caches(self, num_blocks: int) -> list[torch.Tensor]:
        size = self.config.cache.block_size
        return allocate_kv_caches(self._kv_groups(), num_blocks, size, self.dtype, self.device)

    def _kv_groups(self) -> tuple[KVGroup, ...]:
        return self.kernels.attention.kv_groups(self.model_config.attention_specs)

    def _wait_for_attention(self) -> None:
        if self._attention_compiled is not None:
            with memory_for("attention's workspace"):
                self._attention_compiled.result()
            self._attention_compiled = None

    def _num_blocks(self) -> int:
        """KV blocks of every rank: as configured, or what a profiling forward leaves of the GPU."""
        configured = self.config.cache.num_blocks
        if configured != "auto":
            return configured
        assert self.device.type == "cuda", "on CPU the configuration says how many blocks"
        own = self._own_bytes()
        fitting = blocks_that_fit(
            self.device,
            self.config.cache.memory_fraction,
            block_bytes=self._block_bytes(),
            own_bytes=own.total,
        )
        if not self.config.dims.alone:
            of_ranks = process_group.gather_objects((fitting, own))
            fitting, own = min(of_ranks, key=lambda found: found[0])
        check_room(fitting, self.max_model_len, self.config.cache.block_size, own)
        return fitting

    def _own_bytes(self) -> OwnBytes:
        """Collective: measured with a small KV cache, which is gone afterwards."""
        steps = self._warm_up_steps()
        with memory_for("a step"):
            runner, scheduler = self._runner(steps.num_blocks)
        own = own_bytes(
            steps,
            runner,
            scheduler,
            self._graph_sizes,
            weight_bytes=self._weight_bytes(),
            kv_bytes=steps.num_blocks * self._block_bytes(),
        )
        self.overlap.bind(())
        return own

    def _block_bytes(self) -> int:
        size = self.config.cache.block_size
        return kv_block_bytes(self._kv_groups(), size, self.dtype.itemsize)

    def _weight_bytes(self) -> int:
        return rank_weight_bytes(
            self.model_config,
            self.placement,
            self.rank,
            self.config.model.dtype,
            fp8_experts=self.selection.fp8_experts,
        )

    def _memory_bytes(self, num_blocks: int) -> dict[str, int]:
        return {
            "weights": self._weight_bytes(),
            "kv_cache": num_blocks * self._block_bytes(),
            "cuda_graphs": self._graph_bytes + self.overlap.graph_bytes,
        }
