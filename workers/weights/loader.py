"""Fills a model from safetensors files, reading only the tensors that this rank holds.

Every file's header is checked against the weight map first, so that one error names all that is wrong. Then tensors
are read into the model's fused parameters. Knows nothing of what the tensors mean.
"""

import logging
from collections.abc import Container, Iterable, Mapping
from pathlib import Path

import torch

from kernels.routing.expert_map import ExpertMap
from workers.specs.model import ModelConfig, weight_map
from workers.specs.quantization import renamed_scales, unread_scales
from workers.specs.weight_map import WeightEntry, WeightKind, mapped_name
from workers.weights.checkpoint_files import ROOT, CheckpointError
from workers.weights.column_orders import check_column_orders
from workers.weights.files import (
    FLOATS,
    TIED_HEAD,
    StoredTensor,
    check_against_map,
    check_tied_head,
    read_headers,
)
from workers.weights.fused_experts import split_experts
from workers.weights.reader import SlotSource, fill_slots
from workers.weights.slots import FourBitSlot, Progress, Slot, SlottedModel, WeightSlot
from workers.weights.stored_forms import changed_forms, check_unquantised
from workers.weights.tensors import rank_weights

logger = logging.getLogger(__name__)
PACKED = "_blocks"  # transformers 5 keeps it at the names of experts that it has unpacked
HEADS = ("lm_head.", "score.")
ROPE_TABLE = ".rotary_emb.inv_freq"  # old checkpoints hold it; it follows from config.json

__all__ = ["CheckpointError", "load_weights"]


def load_weights(
    model: SlottedModel,
    path: str | Path,
    *,
    config: ModelConfig,
    expert_map: ExpertMap,
    rank: int,
    device: torch.device,
    progress: Progress | None = None,
    experts: Container[tuple[int, int]] | None = None,
) -> None:
    """Fill `model`, which is on `device`, from the checkpoint folder; `progress(done, total)` in bytes read.

    A tensor in FP8 or in four bits on disk stays so where the model computes with it; elsewhere it takes the model's
    dtype.
    CheckpointError names every missing, surplus or misshaped tensor, also tensors of other ranks. Tensors in
    `config.skipped`, and those that are not in `config.kept`, are not read.

    experts   read the tensors of these (layer, expert) alone
    """
    checkpoint = Checkpoint(path, config)
    chosen = rank_weights(config, expert_map, rank, experts=experts)
    checkpoint.read(chosen, model.weight_slots(), device, progress=progress)
    checkpoint.check_tied_head()


class Checkpoint:
    """The tensors of a folder that fill the weight map of `config`. Reads all headers; raises as `load_weights`."""

    def __init__(self, path: str | Path, config: ModelConfig):
        of_map = weight_map(config)
        stored = _headers(Path(path), config)
        if config.quantization is None and config.stacked_form is None:
            check_unquantised(Path(path), stored)
        self._stored = split_experts(stored, of_map)
        self._changed = changed_forms(of_map, self._stored, config.quantization)
        self._entries = self._as_stored(of_map)
        tied = self._stored.pop(TIED_HEAD, None) if config.tie_word_embeddings else None
        self._tied_head = tied
        check_against_map(Path(path), self._stored, self._entries)

    def read(
        self,
        entries: Iterable[WeightEntry],
        slots: Mapping[str, Slot],
        device: torch.device,
        *,
        serving: bool = False,
        progress: Progress | None = None,
    ) -> None:
        """Fill the slots of these entries, by their keys.

        serving   beside steps: on one thread, without a wait for the whole device
        """
        chosen = self._as_stored(entries)
        self._check_changed([entry for entry in chosen if entry.key in self._changed], slots)
        packed = [entry for entry in chosen if isinstance(slots[entry.key], FourBitSlot)]
        check_column_orders(self._stored, packed)
        sources = []
        for entry in chosen:
            parts = [self._stored[name] for name in entry.disk]
            if entry.stacked:
                assert entry.expert is not None
                parts = [part.part(entry.expert) for part in parts]
            sources.append(SlotSource(slots[entry.key], parts, entry.key, entry.four_bit))
        num_threads = 1 if serving else torch.get_num_threads()
        fill_slots(sources, device, num_threads=num_threads, serving=serving, progress=progress)

    def _check_changed(self, changed: list[WeightEntry], slots: Mapping[str, Slot]) -> None:
        """Refuse matrices in 16 bits that the model holds in four bits; warn of those that it holds in FP8."""
        rounded = []
        for entry in changed:
            slot = slots[entry.key]
            if isinstance(slot, WeightSlot):
                continue
            dtype = self._stored[entry.name].dtype
            if isinstance(slot, FourBitSlot):
                raise CheckpointError(
                    f"{entry.name} is {dtype}, but the model holds it in four bits; name its module in "
                    "quantization_config.modules_to_not_convert, or choose another kernels.grouped_gemm"
                )
            rounded.append(f"{entry.name} ({dtype})")
        if rounded:
            logger.warning(
                "%d matrices are not quantised, as quantization_config in config.json has them, such as %s; the model "
                "rounds them to FP8",
                len(rounded),
                rounded[0],
            )

    def _as_stored(self, entries: Iterable[WeightEntry]) -> list[WeightEntry]:
        return [self._changed.get(entry.key, entry) for entry in entries]

    def check_tied_head(self) -> None:
        """Compare a head that is stored beside the embedding that it shares."""
        if self._tied_head is not None:
            kind = WeightKind.EMBEDDING
            name = next(entry.name for entry in self._entries if entry.kind == kind)
            check_tied_head(self._tied_head, self._stored[name], name)


def _headers(folder: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """Return the entries of all tensors that are kept and not skipped, under the names of the weight map."""
    found = {}
    stored = read_headers(folder)
    renamed = (*config.renamed, *renamed_scales(config.quantization))
    unread = (ROPE_TABLE, *unread_scales(config.quantization))
    of_base = not any(name.startswith(ROOT) for name in stored)
    for stored_name, tensor in stored.items():
        name = stored_name
        if of_base and not name.startswith(HEADS):
            name = ROOT + name
        skipped = any(it.startswith(config.skipped) for it in (stored_name, name))
        kept = name.startswith(config.kept) and not skipped
        if kept and not name.endswith(unread):
            mapped = mapped_name(name, renamed)
            if config.stacked_form is None and tensor.dtype in FLOATS:
                mapped = mapped.removesuffix(PACKED)
            if mapped in found:
                raise CheckpointError(f"{folder} holds {mapped} twice, also as {stored_name}")
            found[mapped] = tensor
    return found
