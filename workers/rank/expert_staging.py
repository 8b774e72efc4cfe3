"""Stages experts that come to a rank while it serves: into spare memory, then in place at once.

They come from ranks of the same host, else from the checkpoint. The spare memory has as many places as a layer has
slots on the rank; layers with few new experts share it until their commit. Knows nothing of votes.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from kernels.host.host_copy import blocking_event
from workers.engine.expert_moves import ExpertMoves
from workers.engine.staging_pace import Pace
from workers.layers.moe import MoeBlock, StagedMap, flat
from workers.rank.peer_experts import PeerExperts
from workers.rank.process import RankProcess
from workers.specs.expert_layout import ExpertReport
from workers.specs.model import weight_map
from workers.specs.weight_map import WeightEntry
from workers.stats.stats import EngineStats
from workers.weights.initial_weights import draw_entries
from workers.weights.loader import Checkpoint
from workers.weights.slots import slot_of

COMMIT_BYTES = {"cpu": 8 << 20, "cuda": 512 << 20}
"""Most bytes that one step copies to commit more than one layer: less than 1 ms on an H200, some ms on a CPU."""
PACE = {"cpu": Pace(share=0.03, longest_s=1.0), "cuda": Pace(share=0.1, longest_s=0.02)}
"""Of staging one layer. A CPU rank's thread copies on the cores of the steps; on a GPU it only launches copies."""


@dataclass(frozen=True)
class StagedLayer:
    """A layer that waits for its commit.

    places   slots of the rank, ascending, that get new weights, each with the place of these in the spare memory
    slots    the expert of every slot of all ranks
    """

    layer: int
    places: list[tuple[int, int]]
    slots: tuple[int, ...]
    map: StagedMap


class ExpertStager:
    """Stages layers for a rank process, see workers.engine.expert_moves.Stager.

    committed   called with a layer behind its commit
    """

    def __init__(
        self,
        process: RankProcess,
        committed: Callable[[int], None],
        peers: PeerExperts | None = None,
    ):
        """Reads the headers of the checkpoint. The process has loaded its weights."""
        assert process.model is not None, "load() comes first"
        self._blocks, self._device = process.model.moe_blocks(), process.device
        self.pace = PACE[process.device.type]
        self._config, self._experts, self._rank = (
            process.model_config,
            process.experts,
            process.rank,
        )
        self._spare, self._committed = process.experts.spare, committed
        self._peers = peers or PeerExperts(process.rank, {})
        self._checkpoint = None
        if process.config.model.weights != "dummy":
            self._checkpoint = Checkpoint(process.config.model.folder, process.model_config)
        self._entries: dict[tuple[int, int], list[WeightEntry]] = defaultdict(list)
        for entry in weight_map(self._config):  # now, because this holds the interpreter for long
            if entry.expert is not None:
                self._entries[entry.layer, entry.expert].append(entry)
        self._free: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            # Memory for small maps, because a call of the driver for memory beside steps may hold them up.
            with torch.cuda.stream(self._stream):
                torch.empty(1, device=self._device)

    def fits(self, layer: int, slots: tuple[int, ...], waiting: Sequence[StagedLayer]) -> bool:
        """See Stager. One step commits what waits, so several layers have at most COMMIT_BYTES."""
        coming = self._coming(layer, slots)
        num_bytes = sum(len(it.places) * self._expert_bytes(it.layer) for it in waiting)
        num_bytes += len(coming) * self._expert_bytes(layer)
        has_room = len(coming) <= len(self._free_places(layer, waiting))
        return not waiting or (has_room and num_bytes <= COMMIT_BYTES[self._device.type])

    def settled(self) -> bool:
        """See Stager."""
        return self._free is None or bool(self._free.query())  # type: ignore[no-untyped-call]

    def _coming(self, layer: int, slots: tuple[int, ...]) -> dict[int, int]:
        """Return the slot of the rank for each expert that a layer's new map adds."""
        own = self._experts.base.slots_of(self._rank)
        pairs = zip(slots[own.start : own.stop], self._blocks[layer].held, strict=True)
        coming = {wanted: at for at, (wanted, held) in enumerate(pairs) if wanted != held}
        assert not coming.keys() & set(self._blocks[layer].held), "an expert changes slots"
        return coming

    def _free_places(self, layer: int, waiting: Sequence[StagedLayer]) -> list[int]:
        spare = self._spare[layer]
        taken = {at for it in waiting if self._spare[it.layer] is spare for _, at in it.places}
        return [at for at in range(len(self._blocks[layer].held)) if at not in taken]

    def _expert_bytes(self, layer: int) -> int:
        tensors = flat(self._spare[layer].parameters)
        return sum(tensor.nbytes // max(1, len(tensor)) for tensor in tensors)

    def stage(
        self,
        layer: int,
        slots: tuple[int, ...],
        waiting: Sequence[StagedLayer] = (),
        rest: Callable[[], None] = lambda: None,
    ) -> StagedLayer:
        """See Stager."""
        coming = self._coming(layer, slots)
        places = dict(zip(coming, self._free_places(layer, waiting), strict=False))
        assert len(places) == len(coming), "the layer does not fit"
        with torch.inference_mode(), self._on_stream():
            if places:
                self._read(layer, slots, places, rest)
                if self._stream is not None:
                    blocking_event(self._stream).synchronize()
            new = StagedMap.of(slots, self._experts.base, self._rank, self._device)
        pairs = sorted((slot, places[expert]) for expert, slot in coming.items())
        return StagedLayer(layer, pairs, slots, new)

    def _on_stream(self) -> AbstractContextManager[object]:
        if self._stream is None:
            return nullcontext()
        if self._free is not None:  # the last commit reads the spare memory
            self._free.synchronize()
        return torch.cuda.stream(self._stream)

    def _read(
        self,
        layer: int,
        slots: tuple[int, ...],
        places: dict[int, int],
        rest: Callable[[], None],
    ) -> None:
        """Read experts into these places of the spare memory: from peers, what they lack from the checkpoint."""
        spare, places = self._spare[layer], {**places}
        tensors = flat(spare.parameters)
        for transfer in self._peers.transfers(layer, slots, self._experts.present):
            place = places.pop(transfer.expert)
            self._peers.copy(layer, transfer, [tensor[place] for tensor in tensors])
            rest()
        if not places:
            return
        entries = [entry for expert in places for entry in self._entries[layer, expert]]
        shell = SimpleNamespace(layers={layer: SimpleNamespace(mlp=spare)})
        at = {(layer, expert): place for expert, place in places.items()}
        into = {entry.key: slot_of(shell, entry, at) for entry in entries}
        if self._checkpoint is not None:
            self._checkpoint.read(entries, into, self._device, serving=True)
        else:
            draw_entries(entries, into, self._config, self._device)

    def commit(self, staged: StagedLayer) -> None:
        """See Stager. Takes the copies of one layer's new weights, queued before the next step."""
        block: MoeBlock = self._blocks[staged.layer]
        with torch.inference_mode():
            block.commit(staged.places, self._spare[staged.layer], staged.map)
        if self._stream is not None:
            self._free = blocking_event(torch.cuda.current_stream(self._device))
        self._experts.moved(staged.layer, staged.slots)
        self._committed(staged.layer)


def report(process: RankProcess, moves: ExpertMoves, stats: EngineStats) -> ExpertReport:
    """Return where the experts are and their load, while the engine serves; from any thread."""
    # In the middle of a commit the layer has its new map and the load of its old one.
    with moves.between_commits():
        present, recent_Ls, step = (
            process.experts.present,
            stats.experts.recent_Ls,
            stats.experts.step,
        )
        rows = {}
        if recent_Ls is not None:
            rows = {layer: tuple(recent_Ls[layer].tolist()) for layer in present.layers}
        return ExpertReport(process.rank, step, present, rows, moves.number, moves.ended)


def begin_serving(
    process: RankProcess, closing: ExitStack, gather: Callable[[Any], Sequence[Any]]
) -> tuple[EngineStats, ExpertMoves]:
    """Return the statistics of an epoch and its moves of experts, which `closing` ends. Collective."""
    process.count_experts()  # from zero: without the rows of the warm-up
    stats, experts = EngineStats(process.pace), process.experts
    if process.shared_reads is not None:
        process.shared_reads.clear()
        stats.shared_reads = process.shared_reads.counts
    if not experts.movable:
        return stats, ExpertMoves()
    peers = PeerExperts.meet(process.rank, process.dims, process.device, experts.handles, gather)
    moves = ExpertMoves(ExpertStager(process, stats.experts.moved, peers))
    stats.moves = moves.counts

    def close() -> None:
        if moves.close():
            peers.close()
        else:
            experts.lose_spare()

    closing.callback(close)
    return stats, moves
