"""Where the experts of a rank process are: by a saved map, by the map of the group's last epoch, or in their order."""

from collections.abc import Callable
from pathlib import Path

from kernels.routing.expert_map import ExpertMap
from kernels.routing.forced_routing import ForcedRouting
from workers.config import RankConfig
from workers.models.layer_stack import LayerStack
from workers.specs.expert_layout import ExpertLayout, LayoutError
from workers.specs.model import ModelConfig


class RankExperts:
    """The map of the model's experts, and that of a draft model's.

    base     experts in their order, as draft models have them
    layout   None: that of `base`
    map      of the model
    """

    def __init__(self, model: ModelConfig):
        self._model = model
        self._saved: tuple[str, ExpertLayout] | None = None
        self.base: ExpertMap
        self.map: ExpertMap
        self.layout: ExpertLayout | None = None

    def place(self, config: RankConfig, layout: ExpertLayout | None) -> None:
        """Set the maps for the ranks of `config`.

        layout    of any number of ranks; None: that of `experts.map`, or experts in their order
        """
        model, dims = self._model, config.dims
        self.base = dims.expert_map(model.num_experts, config.experts.redundant_slots)
        self.layout, self.map = None, self.base
        if layout is None and config.experts.map is not None:
            layout = self._read(config.experts.map)
        if layout is not None:
            self.layout = layout.fitted(self.base, model, dims.num_nodes)
            self.map = self.layout.expert_map(len(model.layers))

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
