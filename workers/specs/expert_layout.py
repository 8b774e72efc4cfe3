"""Where the experts of a model are, with their loads, as data: to save, to send, and to fit to other numbers of ranks.

Needs no torch. Knows nothing of weights.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kernels.routing.balance import plan_layer
from kernels.routing.expert_map import ExpertMap, PlacedMap
from workers.specs.model import ModelConfig, MoeSpec

FORMAT = 1


class LayoutError(ValueError):
    """A saved map that cannot be read, or that is of another model."""


@dataclass(frozen=True)
class LayerLayout:
    """One layer.

    slots   the logical expert of every slot, rank by rank
    loads   rows of each logical expert; empty if they are not known
    """

    slots: tuple[int, ...]
    loads: tuple[float, ...] = ()


@dataclass(frozen=True)
class ExpertLayout:
    """A map of all layers with experts, by the number of the layer.

    starts   of the ranks' slots, see ExpertMap
    """

    num_experts: int
    starts: tuple[int, ...]
    layers: dict[int, LayerLayout]

    @classmethod
    def of(cls, expert_map: ExpertMap, layers: Iterable[int]) -> "ExpertLayout":
        """Return the layout of these layers in a map, without loads."""
        found = {layer: LayerLayout(expert_map.experts(layer)) for layer in layers}
        return cls(expert_map.num_experts, expert_map.starts, found)

    @classmethod
    def read(cls, path: Path) -> "ExpertLayout":
        """Read a file that `save` has written. Raises LayoutError."""
        try:
            data = json.loads(path.read_text())
            if data["format"] != FORMAT:
                raise LayoutError(f"{path} has format {data['format']}, expected {FORMAT}")
            layers = {
                int(layer): LayerLayout(
                    tuple(map(int, it["slots"])), tuple(map(float, it["loads"]))
                )
                for layer, it in data["layers"].items()
            }
            found = cls(int(data["num_experts"]), tuple(map(int, data["starts"])), layers)
            found.expert_map(max(layers) + 1)
        except OSError as error:
            raise LayoutError(f"{path} cannot be read: {error.strerror}") from error
        except LayoutError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise LayoutError(f"{path} is no saved map of experts: {error!r}") from error
        return found

    def save(self, path: Path) -> None:
        """Write the layout as JSON, whole or not at all."""
        data = {"format": FORMAT, "num_experts": self.num_experts, "starts": self.starts}
        layers = {str(layer): asdict(it) for layer, it in sorted(self.layers.items())}
        new = path.with_name(f"{path.name}.new")
        new.write_text(json.dumps({**data, "layers": layers}) + "\n")
        new.replace(path)

    @property
    def digest(self) -> str:
        """A short name of the map, equal for equal maps."""
        slots = {layer: it.slots for layer, it in sorted(self.layers.items())}
        return hashlib.sha256(repr((self.starts, slots)).encode()).hexdigest()[:16]

    def problem(self, model: ModelConfig) -> str | None:
        """Return why the layout is of another model, or None."""
        wanted = moe_layers(model)
        if self.num_experts != model.num_experts:
            return f"it has {self.num_experts} experts, the model has {model.num_experts}"
        if sorted(self.layers) != wanted:
            return f"it has layers {sorted(self.layers)}, the model has experts in {wanted}"
        return None

    def expert_map(self, num_layers: int) -> ExpertMap:
        """Return the map of a model with this many layers."""
        any_layer = next(iter(self.layers.values()))
        of_layers = tuple(self.layers.get(layer, any_layer).slots for layer in range(num_layers))
        return PlacedMap(self.num_experts, self.starts, of_layers)

    def fitted(self, base: ExpertMap, model: ModelConfig, num_nodes: int) -> "ExpertLayout":
        """Return the layout for ranks and slots as in `base`: itself if they are, else a plan by the loads."""
        if base.starts == self.starts:
            return self
        start = ExpertLayout.of(base, self.layers)
        return start.with_loads({n: it.loads for n, it in self.layers.items()}).planned(
            model, num_nodes
        )

    def with_loads(self, loads: dict[int, Any]) -> "ExpertLayout":
        """Return the layout with these loads of each layer's experts."""
        layers = {
            layer: LayerLayout(it.slots, tuple(map(float, loads[layer])))
            for layer, it in self.layers.items()
        }
        return ExpertLayout(self.num_experts, self.starts, layers)

    def planned(self, model: ModelConfig, num_nodes: int) -> "ExpertLayout":
        """Return the layout that the planner makes of this one by its loads; layers without loads stay."""
        groups = expert_groups(model)
        layers = {}
        for number, it in self.layers.items():
            slots = it.slots
            if any(it.loads):
                planned = plan_layer(
                    np.array(it.loads),
                    self.starts,
                    np.array(slots),
                    hosts=num_nodes,
                    groups=groups,
                )
                slots = tuple(planned.tolist())
            layers[number] = LayerLayout(slots, it.loads)
        return ExpertLayout(self.num_experts, self.starts, layers)


@dataclass(frozen=True)
class ExpertMove:
    """A change of a map while ranks serve.

    number   larger than that of every move before
    layers   (layer, the expert of every slot) of the layers that change, in the order of their commits
    """

    number: int
    layers: tuple[tuple[int, tuple[int, ...]], ...]

    @classmethod
    def between(
        cls, number: int, present: ExpertLayout, wanted: ExpertLayout
    ) -> "ExpertMove | None":
        """Return the move from one layout to another of equal slots; None if they have equal maps."""
        layers = tuple(
            (layer, it.slots)
            for layer, it in sorted(wanted.layers.items())
            if it.slots != present.layers[layer].slots
        )
        return cls(number, layers) if layers else None


def moe_layers(model: ModelConfig) -> list[int]:
    """Return the numbers of the layers with experts."""
    return [number for number, spec in enumerate(model.layers) if isinstance(spec.mlp, MoeSpec)]


def expert_groups(model: ModelConfig) -> int:
    """Return the groups of experts to which the router limits its choice; 1 where it chooses among all."""
    router = model.moe.router
    return router.num_groups if router.topk_group < router.num_groups else 1
