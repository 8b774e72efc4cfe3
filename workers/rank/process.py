"""State of one rank for the life of its process: configuration, weights, grammars, KV memory and measurements.

Every Epoch is built from it. Only the first epoch loads weights, compiles kernels and sizes the KV cache. Between two
epochs a process can take another rank's place, in a group of another number of ranks: then it loads the experts that
it lacks. A standby is a process with rank STANDBY: it has loaded everything but experts.
Knows nothing of Ray, peers or requests.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from kernels.backends import select
from kernels.host.cache_folder import use_cache_folder
from kernels.host.links import HostNetwork
from kernels.host.shm import SharedMemoryGroup
from kernels.interface.context import BackendContext
from kernels.interface.shared_reads import SharedReads
from kernels.linear_attention.base import LinearStates
from kernels.routing.expert_map import ExpertMap
from kernels.routing.forced_routing import ForcedRouting
from workers.adapters.layout import slots_bytes
from workers.adapters.store import AdapterStore, Gather
from workers.config import RankConfig
from workers.images.encoder import ImageEncoder
from workers.kv_cache.caches import CacheMemory
from workers.layers.builder import Placement
from workers.models.decoder import DecoderLM
from workers.models.layer_stack import LayerStack
from workers.models.registry import configured_model
from workers.overlap.rank_overlap import RankOverlap
from workers.rank.backend_choice import (
    backend_shape,
    forced_routing,
    shared_settings,
    slow_attention,
    warnings_of_answers,
)
from workers.rank.device_memory import memory_for
from workers.rank.draft_model import DraftChoice, DraftHead, EpochDraft, with_attention
from workers.rank.kv_places import KVPlaces
from workers.rank.rank_adapters import load_adapters
from workers.rank.rank_experts import RankExperts, take_place
from workers.rank.rank_images import make_encoder
from workers.rank.rank_info import Progress, RankInfo
from workers.runner.graph_sizes import GraphSizes, graphs_to_capture
from workers.sampling.grammar_compiler import GrammarCompiler
from workers.scheduler.prefill_cap import PrefillCap
from workers.specs.expert_layout import ExpertLayout
from workers.specs.model import ModelConfig
from workers.speculation.step_times import StepSeconds
from workers.stats.pace import Pace
from workers.weights.initial_weights import draw_weights
from workers.weights.loader import load_weights
from workers.weights.tensors import rank_weight_bytes
from workers.wire.request import PoolingParams

logger = logging.getLogger(__name__)


class ClosableEpoch(Protocol):
    """The part of an Epoch that a process uses."""

    closed: bool

    def close(self) -> None:
        """Leave the group."""


class RankProcess:
    """One data-parallel rank without its peers.

    backends     grouped GEMM and expert load of every epoch; all-to-all and attention belong to the epochs
    model        the weights; an epoch runs them with its own backends
    draft        the draft model that the configuration wants, draft_model its weights; None: there is none
    adapters     LoRA adapters in host memory, and their slots on the device; None: lora.max_loras is 0
    images       computes the embeddings of images; None: the model takes none
    experts      where the experts are
    caches       KV blocks and states with their contents
    kv_places    where their contents move to and from
    warm         every kernel that a step may need has been compiled here
    overlap      the ubatch policy, which the first epoch tunes
    pace         the times of steps
    prefill_cap  prompt tokens of steps with decodes; None: no limit
    epoch        the last epoch
    """

    def __init__(self, rank: int, config: RankConfig, layout: ExpertLayout | None = None):
        use_cache_folder(config.kernels.cache)
        self.model_config: ModelConfig = configured_model(config.model)
        self.device = torch.device(config.device)
        if config.device == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        wanted = config.scheduler.async_scheduling
        self.asynchronous = self.device.type == "cuda" if wanted == "auto" else wanted
        self.dtype: torch.dtype = getattr(torch, str(config.model.dtype))
        self.max_model_len = int(config.model.max_model_len)
        self.experts = RankExperts(self.model_config)
        self._configure(rank, config, layout)
        self.shared_reads = SharedReads() if config.kernels.cascade == "auto" else None
        self.overlap = RankOverlap.configured(config.overlap, self.selection.all2all_class)
        self.grammars: GrammarCompiler | None = None
        self.backends: select.Backends | None = None
        self.model: DecoderLM | None = None
        self.draft = DraftChoice.of(config, self.model_config, select.probe(self.device))
        self.draft_model: DraftHead | None = None
        self.adapters: AdapterStore | None = None
        self.images: ImageEncoder | None = None
        self.image_bytes = 0  # of the largest call of the tower, and of the outputs that are kept
        drafting = () if self.draft is None else self.draft.kv_groups
        place = self.selection, self.shape, self.model_config.window, self.device
        self.caches = CacheMemory(config, *place, draft_groups=drafting)
        self.kv_places = KVPlaces()
        self.warm, self.pace = False, Pace()
        self.step_seconds: StepSeconds | None = None  # measured where steps verify drafts in graphs
        self.prefill_cap = PrefillCap.of(config.scheduler, config.cache.block_size)
        self.epoch: ClosableEpoch | None = None

    def _configure(self, rank: int, config: RankConfig, layout: ExpertLayout | None) -> None:
        self.rank, self.config, self.dims = rank, config, config.dims
        self.experts.place(config, layout)
        self.shape = backend_shape(config, self.model_config)
        unavailable = select.probe(self.device)
        self.selection = select.select(config.kernels, unavailable, self.shape)
        if rank == 0:
            for warning in slow_attention(config.kernels, self.selection, unavailable, self.shape):
                logger.warning("%s", warning)
        torch.set_num_threads(config.threads)

    def become(self, rank: int, config: RankConfig, layout: ExpertLayout | None = None) -> None:
        """Take the place of `rank` in a group of `config`, between two epochs; `load` then reads experts new here.

        layout    of the group's experts; None: that of `experts.map`, or experts in their order

        A GPU sizes its KV cache anew for another number of ranks, another all-to-all and other ubatches, because
        experts and buffers then take other memory. Raises ValueError if `config` has other settings that hold for the
        life of a process.
        """
        assert self.epoch is None or self.epoch.closed, "the last epoch is still open"
        if (rank, config) == (self.rank, self.config):
            self.experts.place(config, layout)
            return
        differs = self.config.differs_for_process(config)
        if differs:
            raise ValueError(f"{', '.join(differs)} changed, which needs a new process")
        dims, selection, before = self.dims, self.selection, self.config
        self._configure(rank, config, layout)
        self.caches.configure(config, self.selection, self.shape)
        if self.model is not None and config.model.routing != before.model.routing:
            self.model.route_by(self._forced_routing())
            if self.draft_model is not None:
                self.draft_model.route_by(self._forced_routing())
        same_backends = selection.names() == self.selection.names()
        if self.dims == dims and same_backends and config.overlap == before.overlap:
            return
        self.overlap = RankOverlap.configured(config.overlap, self.selection.all2all_class)
        names, kept = self.selection.names(), selection.names().items()
        if any(names[seam] != name for seam, name in kept if seam != "all2all"):
            # The weights, the caches and the states have the memory order of these backends.
            self._drop_model()
            self.caches.free()
        if self.device.type == "cuda":
            self.warm, self.caches.kv_caches, self.caches.draft_caches = False, [], []
            self.caches.take_sizes(0, self.config.cache.num_snapshots or 0)
            torch.cuda.empty_cache()

    @property
    def pooling(self) -> PoolingParams | None:
        """Parameters of the requests of the warm-up of a model that makes vectors of prompts; None: it generates."""
        spec = self.model_config.pooling
        return None if spec is None else spec.warm_up_params()

    def graph_sizes(self, *, mixed: bool, drafts: bool) -> GraphSizes:
        """Return the sizes of CUDA graphs; `mixed` and `drafts` as in graphs_to_capture."""
        return graphs_to_capture(
            self.config.scheduler,
            self.selection,
            self.device,
            mixed=mixed,
            drafts=drafts,
            rows_per_seq=self.config.speculation.rows_per_seq,
            decodes=self.pooling is None,
            adapters=bool(self.config.lora.max_loras),
            max_rows=self.selection.all2all_class.graph_rows(self.shape),
        )

    def enter(self, epoch: ClosableEpoch) -> None:
        """Begin `epoch`; the epoch before must be closed, because its memory is needed."""
        assert self.epoch is None or self.epoch.closed, "the last epoch is still open"
        self.epoch = epoch

    def build_backends(self, context: BackendContext) -> select.Backends:
        """Build the backends of an epoch, with the grouped GEMM that the weights were made for. Collective."""
        built = select.build(self.selection, context)
        if self.backends is None:
            self.backends = select.unbound(built)
        kept = self.backends
        return replace(built, grouped_gemm=kept.grouped_gemm, expert_load=kept.expert_load)

    def load(self, progress: Progress | None = None, gather: Gather | None = None) -> None:
        """Read the weights that this process lacks: all of them once, later those of experts that are new here.

        gather   returns a value of every rank, by which the ranks agree on the adapters; None: there are no peers
        """
        if self.backends is None:
            self.backends = select.build_unbound(self.selection, self.backend_context(None))
        if self.grammars is None:
            self.grammars = GrammarCompiler(self.config.model.folder, self.model_config.vocab_size)
        with memory_for("the weights", self.weight_bytes()):
            if self.model is None:
                model = self._build_model(self.backends)
                self._read_weights(model, progress)
                model.filled()
                self._load_draft(model, self.backends, progress)
                self.model, self.images = model, make_encoder(model, self.config)
            else:
                forced, model = self._forced_routing(), self.model
                read = partial(self._read_weights, model, progress)
                take_place(self.model, self.experts.map, self.rank, forced, read)
                if (head := self.draft_model) is not None and self.draft is not None:
                    read = partial(self._read_draft, self.draft, head, progress)
                    take_place(head, self.experts.base, self.rank, forced, read)
            self.experts.reserve(self.model)
        if self.config.lora.max_loras:
            self.adapters = load_adapters(self, gather)
        self.count_experts()

    def count_experts(self) -> None:
        """Count the rows of this rank's experts from zero."""
        assert self.backends is not None
        size = len(self.model_config.layers), len(self.experts.base.slots_of(self.rank))
        self.backends.expert_load.allocate(*size, self.device)

    @property
    def adapter_bytes(self) -> int:
        """Bytes of the slots of adapters on the device."""
        return slots_bytes(self.model_config, self.config, self.rank)

    def _build_model(self, backends: select.Backends) -> DecoderLM:
        if self.rank == 0:
            for warning in warnings_of_answers(self.config.model, self.model_config):
                logger.warning("%s", warning)
        return DecoderLM(self.model_config, backends, **self._place(self.experts.map))

    def _place(self, expert_map: ExpertMap) -> dict[str, Any]:
        """The arguments of a LayerStack that hold for the model and for the draft model."""
        return {
            "expert_map": expert_map,
            "placement": Placement(self.experts.movable, self.config.experts.copies),
            "rank": self.rank,
            "device": self.device,
            "dtype": self.dtype,
            "max_positions": self.max_model_len,
            "forced_routing": self._forced_routing(),
        }

    def _load_draft(
        self, model: DecoderLM, backends: select.Backends, progress: Progress | None
    ) -> None:
        if self.draft is None:
            return
        unbound = with_attention(backends, self.draft, self.config.cache.block_size)
        head = self.draft.build(model, unbound, **self._place(self.experts.base))
        self._read_draft(self.draft, head, progress)
        head.filled()
        self.draft_model = head

    def _read_draft(
        self,
        draft: DraftChoice,
        head: LayerStack,
        progress: Progress | None,
        experts: set[tuple[int, int]] | None = None,
    ) -> None:
        read = partial(self._read, progress, expert_map=self.experts.base)
        draft.load(head, read, experts)  # type: ignore[arg-type]

    def _read_weights(
        self,
        model: LayerStack,
        progress: Progress | None,
        experts: set[tuple[int, int]] | None = None,
    ) -> None:
        folder, config = self.config.model.folder, self.model_config
        self._read(progress, model, folder, config, expert_map=self.experts.map, experts=experts)

    def _read(
        self,
        progress: Progress | None,
        model: LayerStack,
        folder: Path,
        config: ModelConfig,
        *,
        expert_map: ExpertMap,
        experts: set[tuple[int, int]] | None = None,
    ) -> None:
        where: dict[str, Any] = {"config": config, "expert_map": expert_map}
        where |= {"rank": self.rank, "device": self.device, "progress": progress}
        if self.config.model.weights == "dummy":
            draw_weights(model, **where, experts=experts)
        else:
            load_weights(model, folder, **where, experts=experts)

    def _forced_routing(self) -> Callable[..., ForcedRouting] | None:
        return forced_routing(self.config, self.model_config, self.rank, self.device)

    def draft_of(self, backends: select.Backends) -> EpochDraft | None:
        """Return the draft model of an epoch with these backends, after `load`; None: there is none."""
        if self.draft is None or self.draft_model is None:
            return None
        return EpochDraft.of(self.draft_model, self.draft, backends, self.config.cache.block_size)

    def backend_context(
        self,
        shared_memory: SharedMemoryGroup | None,
        network: HostNetwork | None = None,
        gather: Callable[[Any], Sequence[Any]] | None = None,
    ) -> BackendContext:
        """Return the context from which this rank builds backends, inside the current process group."""
        return BackendContext(
            shape=self.shape,
            device=self.device,
            rank=self.rank,
            group=None if self.dims.alone else torch.distributed.group.WORLD,
            shared_memory=shared_memory,
            network=network,
            gather=gather,
            expert_map=self.experts.map,
            block_size=self.config.cache.block_size,
            shared_reads=self.shared_reads,
        )

    def state_pools(self) -> list[LinearStates]:
        """Return the pools of states, allocated at the first call; none for a model without linear attention."""
        with memory_for("the states of linear attention", self.caches.state_bytes):
            return self.caches.state_pools()

    def settings(self) -> dict[str, object]:
        """Return all settings that must be equal on all ranks, flat, with dotted names."""
        return shared_settings(self.config, self.selection, self.experts.layout)

    def weight_bytes(self) -> int:
        """Return the bytes of this rank's weights."""
        dtype = self.config.model.dtype
        assert dtype != "auto", "resolve_rank_config comes first"
        count = partial(
            rank_weight_bytes,
            expert_map=self.experts.map,
            rank=self.rank,
            dtype=dtype,
            fp8_experts=self.selection.fp8_experts,
            fp8_dense=self.selection.fp8_dense,
            in_four_bits=self.selection.four_bit_experts,
        )
        if self.draft is None:
            return count(self.model_config)
        head_bytes = self.draft.head_bytes(self.model_config, fp8_dense=self.selection.fp8_dense)
        return count(self.model_config) + count(self.draft.config) + head_bytes

    def info(self, graph_bytes: int, stage_seconds: dict[str, float]) -> RankInfo:
        """Describe this rank to the supervisor."""
        return RankInfo(
            rank=self.rank,
            backends=self.selection.names(),
            num_blocks=self.caches.num_blocks,
            block_size=self.config.cache.block_size,
            max_model_len=self.max_model_len,
            window_blocks=self.caches.demand.window_blocks,
            memory_bytes={
                "weights": self.weight_bytes(),
                "adapters": self.adapter_bytes,
                "kv_cache": self.caches.num_blocks * self.caches.block_bytes,
                "states": self.caches.state_bytes,
                "cuda_graphs": graph_bytes,
            },
            stage_seconds=dict(stage_seconds),
            adapter_errors={} if self.adapters is None else dict(self.adapters.errors),
        )

    def _drop_model(self) -> None:
        """Release the weights, and all that has their memory order."""
        if self.images is not None:
            self.images.close()
        self.backends = self.model = self.draft_model = self.adapters = self.images = None

    def close(self) -> None:
        """Close the open epoch, stop the threads, and release weights and KV memory."""
        for part in (self.epoch, self.grammars, self.kv_places):
            if part is not None:
                part.close()
        self._drop_model()
        self.epoch = None
        self.experts.close()
        self.caches.free()
        torch.cuda.empty_cache()
