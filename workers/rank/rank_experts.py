"""Where the experts of a rank process are: by a saved map, by the map of the group's last epoch, or in their order."""

import logging
from collections.abc import Callable
from pathlib import Path

import torch

from kernels.host.shared_gpu_tensors import share_gpu
from kernels.host.shared_tensors import SharedTensors
from kernels.routing.expert_map import ExpertMap
from kernels.routing.forced_routing import ForcedRouting
from workers.config import RankConfig
from workers.layers.moe import SpareWeights, flat
from workers.models.layer_stack import LayerStack
from workers.rank.peer_experts import Handles
from workers.specs.expert_layout import ExpertLayout, LayoutError, expert_groups, moe_layers
from workers.specs.model import ModelConfig, MoeSpec

logger = logging.getLogger(__name__)


class RankExperts:
    """The map of the model's experts, and that of a draft model's.

    base     experts in their order, as draft models have them
    layout   of the model's experts; None: that of `base`
    movable  experts may move while the process serves
    handles  by which ranks of this host read the weights; none where they cannot be shared
    spare    where they move: memory of one layer's experts, by layer; equal layers share it
    """

    def __init__(self, model: ModelConfig):
        self._model = model
        self._saved: tuple[str, ExpertLayout] | None = None
        self.base: ExpertMap
        self.layout: ExpertLayout | None = None
        self._map: ExpertMap | None = None
        self.movable = False
        self.spare: dict[int, SpareWeights] = {}
        self._reserved: dict[int, int] = {}  # slots by layer
        self._shared = SharedTensors()
        self.handles: Handles = {}

    def place(self, config: RankConfig, layout: ExpertLayout | None) -> None:
        """Set the maps for the ranks of `config`.

        layout    of any number of ranks; None: that of `experts.map`, or experts in their order
        """
        model, dims = self._model, config.dims
        self.base = dims.expert_map(model.num_experts, config.experts.redundant_slots)
        self.layout, self._map = None, None
        self._num_nodes = dims.num_nodes
        self.movable = config.experts.rebalance != "off" and not dims.alone
        if layout is None and config.experts.map is not None:
            layout = self._read(config.experts.map)
        if layout is not None:
            self.layout = layout.fitted(self._in_order(dims.num_nodes))

    def _in_order(self, num_nodes: int) -> ExpertLayout:
        layers, groups = moe_layers(self._model), expert_groups(self._model)
        return ExpertLayout.of(self.base, layers, hosts=num_nodes, groups=groups)

    def reserve(self, model: LayerStack) -> None:
        """Allocate the spare memory for the weights that the model holds now; let ranks of this host read these."""
        blocks = model.moe_blocks() if self.movable else {}
        of_layers = {number: flat(block.parameters) for number, block in blocks.items()}
        self.handles = self._share(of_layers, model.device)
        if {number: len(block.wanted) for number, block in blocks.items()} == self._reserved:
            return
        made: dict[MoeSpec, SpareWeights] = {}
        for block in blocks.values():
            if block.spec not in made:
                made[block.spec] = block.spare_weights()
        self.spare = {number: made[block.spec] for number, block in blocks.items()}
        self._reserved = {number: len(block.wanted) for number, block in blocks.items()}

    def _share(self, of_layers: dict[int, list[torch.Tensor]], device: torch.device) -> Handles:
        if device.type != "cpu":
            try:
                return {str(n): list(map(share_gpu, it)) for n, it in of_layers.items()}
            except OSError as error:
                logger.warning("other ranks read moving experts from the checkpoint: %s", error)
                return {}
        shared = iter(self._shared.share(t for tensors in of_layers.values() for t in tensors))
        return {str(n): [next(shared) for _ in it] for n, it in of_layers.items()}

    def close(self) -> None:
        """Let no further rank read the weights."""
        self._shared.close()

    def lose_spare(self) -> None:
        """Leave the spare memory to a thread that still writes to it."""
        self.spare, self._reserved = {}, {}

    @property
    def map(self) -> ExpertMap:
        """The map of the model."""
        if self._map is None:
            self._map = self.base
            if self.layout is not None:
                self._map = self.layout.expert_map(len(self._model.layers))
        return self._map

    @property
    def present(self) -> ExpertLayout:
        """The layout of all layers with experts."""
        return self.layout or self._in_order(self._num_nodes)

    def moved(self, layer: int, slots: tuple[int, ...]) -> None:
        """Note the new map of a layer."""
        self.layout, self._map = self.present.with_slots(layer, slots), None

    def _read(self, path: str) -> ExpertLayout:
        if self._saved is None or self._saved[0] != path:
            layout = ExpertLayout.read(Path(path))
            problem = layout.problem(self._model)
            if problem is not None:
                raise LayoutError(f"experts.map: {problem}")
            self._saved = path, layout
        return self._saved[1]


def take_place(
    model: LayerStack,
    expert_map: ExpertMap,
    rank: int,
    forced_routing: Callable[..., ForcedRouting] | None,
    read: Callable[[set[tuple[int, int]]], None],
) -> None:
    """Let a model hold the experts of `rank`; after an error the next call goes on from there.

    read    fills the weights of these (layer, expert)
    """
    if model.seat != (expert_map, rank):
        model.hold_experts(expert_map, rank, forced_routing)
    missing = model.missing()
    if missing:
        read(missing)
        model.filled()
