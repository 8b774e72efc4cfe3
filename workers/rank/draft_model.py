"""The draft model of a rank process: its config, its choice of attention, its weights. Knows nothing of steps."""

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kernels.attention.base import Attention, GraphAttention
from kernels.backends import select
from kernels.interface.backend import BackendShape
from kernels.interface.config import KernelsConfig
from kernels.interface.kv_layout import KVGroup
from kernels.interface.registry import backend_class
from workers.config import RankConfig
from workers.models.decoder import DecoderLM
from workers.models.draft_config import load_draft_config
from workers.models.eagle3.head import Eagle3Head
from workers.models.eagle3.spec import Eagle3Config
from workers.models.mtp.head import MtpHead
from workers.rank.backend_choice import backend_shape
from workers.runner.draft_passes import DraftPasses
from workers.scheduler.scheduler import Scheduler
from workers.specs.model import ModelConfig
from workers.weights.checkpoint_files import CheckpointError
from workers.weights.tensors import draft_head_bytes

DraftHead = MtpHead | Eagle3Head


@dataclass(frozen=True)
class DraftChoice:
    """The draft model that a configuration wants, for a model.

    config      its layers; experts are those of the model
    eagle       None: the head of the model's checkpoint
    folder      of its weights
    attention   name of its backend of attention
    shape       of the model, with the draft model's attention
    """

    config: ModelConfig
    eagle: Eagle3Config | None
    folder: Path
    attention: str
    shape: BackendShape

    @classmethod
    def of(cls, config: RankConfig, model: ModelConfig, unavailable: Any) -> "DraftChoice | None":
        """Return the choice of `speculation`; None: no draft model. Raises ModelConfigError with the key to change."""
        speculation = config.speculation
        found = load_draft_config(speculation, config.model, model)
        if found is None:
            return None
        draft, folder = found.layers, config.model.folder
        if found.eagle is not None and speculation.draft_model is not None:
            folder = Path(speculation.draft_model)
        shape = replace(backend_shape(config, draft), linear_specs=())
        attention = _choose_attention(config.kernels, unavailable, shape)
        return cls(draft, found.eagle, folder, attention, shape)

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The caches of its layers."""
        groups: tuple[KVGroup, ...] = self.attention_class.kv_groups(self.shape.attention_specs)
        return groups

    @property
    def attention_class(self) -> Any:
        return backend_class("attention", self.attention)

    def head_bytes(self, model: ModelConfig, *, fp8_dense: bool) -> int:
        """Return the bytes of a copy of the output head of `model` that drafts."""
        return 0 if self.eagle is not None else draft_head_bytes(model, fp8_dense=fp8_dense)

    def build(self, target: DecoderLM, backends: select.Backends, **place: Any) -> DraftHead:
        """Return the draft model beside `target`, without weights; `place` as for the target."""
        if self.eagle is not None:
            return Eagle3Head(target, self.eagle, backends, **place)
        return MtpHead(target, self.config, backends, **place)

    def load(
        self,
        head: DraftHead,
        read: Callable[..., None],
        experts: Container[tuple[int, int]] | None = None,
    ) -> None:
        """Read weights by read(model, folder, config, experts=...). Raises CheckpointError with the key to change."""
        try:
            read(head, self.folder, self.config, experts=experts)
        except CheckpointError as error:
            key = "method" if self.eagle is None else "draft_model"
            raise CheckpointError(f"speculation.{key}: {error}") from error
        if isinstance(head, Eagle3Head):
            head.share_embedding()


def _choose_attention(config: KernelsConfig, unavailable: Any, shape: BackendShape) -> str:
    """Return the backend that the configuration names where it can run, else the best: the layers may differ."""
    try:
        return select.select(config, unavailable, shape).attention.name
    except select.BackendChoiceError as error:
        if error.key != "kernels.attention" or config.attention == "auto":
            raise
    auto = config.model_copy(update={"attention": "auto"})
    return select.select(auto, unavailable, shape).attention.name


def with_attention(
    backends: select.Backends, choice: DraftChoice, block_size: int
) -> select.Backends:
    """Return the backends of an epoch with an attention for the draft model's layers, still without caches."""
    attention = choice.attention_class(choice.shape.attention_specs, block_size)
    quiet = select.Backends(
        backends.all2all, backends.grouped_gemm, attention
    )  # with no sample of the load
    return replace(quiet, stream=backends.stream)


@dataclass(frozen=True)
class EpochDraft:
    """The draft model of one epoch: the weights of the process, with backends of the epoch."""

    model: DraftHead
    attention: Attention

    @classmethod
    def of(
        cls, model: DraftHead, choice: DraftChoice, backends: select.Backends, block_size: int
    ) -> "EpochDraft":
        """Return the draft model without caches; `backends` are those of whole steps."""
        own = with_attention(backends, choice, block_size)
        return cls(model.with_backends(own), own.attention)

    @property
    def captures_all_passes(self) -> bool:
        """Whether the passes behind the first one can be captured in CUDA graphs too."""
        return isinstance(self.attention, GraphAttention) and self.attention.shortens

    def passes(
        self, scheduler: Scheduler, device: torch.device, num_drafts: int
    ) -> DraftPasses | None:
        """Return the passes behind the steps of `scheduler`, for so many drafts; None until there are caches."""
        if not self.attention.kv_caches:
            return None
        place = scheduler.table, scheduler.cache, device
        return DraftPasses(self.model, self.attention, *place, num_drafts)
