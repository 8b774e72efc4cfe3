"""Where the experts of a model are, with their loads, as data: to save, to send, and to fit to other numbers of ranks.

Needs no torch. Knows nothing of weights.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kernels.routing.balance import plan_layer, rank_loads
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
    hosts    of the ranks, one after another; groups: of experts to which routers limit their choice, 1 = no groups
    """

    num_experts: int
    starts: tuple[int, ...]
    layers: dict[int, LayerLayout]
    hosts: int = 1
    groups: int = 1

    @classmethod
    def of(
        cls, expert_map: ExpertMap, layers: Iterable[int], *, hosts: int = 1, groups: int = 1
    ) -> "ExpertLayout":
        """Return the layout of these layers in a map, without loads."""
        found = {layer: LayerLayout(expert_map.experts(layer)) for layer in layers}
        return cls(expert_map.num_experts, expert_map.starts, found, hosts, groups)

    @classmethod
    def read(cls, path: Path) -> "ExpertLayout":
        """Read a file that `save` has written. Raises LayoutError."""
        try:
            data = json.loads(path.read_text())
        except OSError as error:
            raise LayoutError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise LayoutError(f"{path} is no saved map of experts: {error!r}") from error
        return cls.of_json(data, str(path))

    def to_json(self) -> dict[str, Any]:
        """Return plain data, of which `save` makes a file."""
        names = ("num_experts", "starts", "hosts", "groups")
        data = {"format": FORMAT, **{name: getattr(self, name) for name in names}}
        layers = {str(layer): asdict(it) for layer, it in sorted(self.layers.items())}
        return {**data, "layers": layers}

    @classmethod
    def of_json(cls, data: Any, source: str) -> "ExpertLayout":
        """Return the layout of plain data. Raises LayoutError, which names the source."""
        try:
            if data["format"] != FORMAT:
                raise LayoutError(f"{source} has format {data['format']}, expected {FORMAT}")
            layers = {
                int(layer): LayerLayout(
                    tuple(map(int, it["slots"])), tuple(map(float, it["loads"]))
                )
                for layer, it in data["layers"].items()
            }
            sizes = {name: int(data[name]) for name in ("num_experts", "hosts", "groups")}
            found = cls(starts=tuple(map(int, data["starts"])), layers=layers, **sizes)
            found.expert_map(max(layers) + 1)
        except LayoutError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise LayoutError(f"{source} is no saved map of experts: {error!r}") from error
        return found

    def save(self, path: Path) -> None:
        """Write the layout as JSON, whole or not at all."""
        new = path.with_name(f"{path.name}.new")
        new.write_text(json.dumps(self.to_json()) + "\n")
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

    def fitted(self, base: "ExpertLayout") -> "ExpertLayout":
        """Return the layout for ranks and slots as in `base`: itself if they are, else a plan by the loads."""
        if base.starts == self.starts:
            return replace(self, hosts=base.hosts, groups=base.groups)
        if not all(it.loads for it in self.layers.values()):
            return base
        return base.with_loads({number: it.loads for number, it in self.layers.items()}).planned()

    def busiest(self) -> tuple[float, float]:
        """Return the load of the busiest rank, and that of a rank with equal loads, added over layers with loads."""
        busiest = even = 0.0
        for it in self.layers.values():
            if any(it.loads):
                load_R = rank_loads(np.array(it.loads), np.array(it.slots), self.starts)
                busiest += float(load_R.max())
                even += float(load_R.mean())
        return busiest, even

    def with_loads(self, loads: Mapping[int, Any]) -> "ExpertLayout":
        """Return the layout with these loads of each layer's experts."""
        layers = {
            layer: LayerLayout(it.slots, tuple(map(float, loads[layer])))
            for layer, it in self.layers.items()
        }
        return replace(self, layers=layers)

    def with_slots(self, layer: int, slots: tuple[int, ...]) -> "ExpertLayout":
        """Return the layout with another map of a layer, of which the load is not known."""
        return replace(self, layers={**self.layers, layer: LayerLayout(slots)})

    def planned(self) -> "ExpertLayout":
        """Return the layout that the planner makes of this one by its loads; layers without loads stay."""
        layers = {}
        for number, it in self.layers.items():
            slots = it.slots
            if any(it.loads):
                places = {"hosts": self.hosts, "groups": self.groups}
                loads, present = np.array(it.loads), np.array(slots)
                slots = tuple(plan_layer(loads, self.starts, present, **places).tolist())
            layers[number] = LayerLayout(slots, it.loads)
        return replace(self, layers=layers)


@dataclass(frozen=True)
class ExpertReport:
    """Where one rank has experts, and their recent load.

    step     the last step that counts; -1 before the first reading
    layout   of all ranks, as this rank has it, without loads
    rows     of each layer, rows that came to each slot of this rank, those of older steps with less weight
    move     number of the move that runs, 0 without one
    ended    number of the last move that has ended
    """

    rank: int
    step: int
    layout: ExpertLayout
    rows: dict[int, tuple[float, ...]]
    move: int = 0
    ended: int = 0


def joined(reports: Sequence[ExpertReport]) -> ExpertLayout | None:
    """Return the layout with the loads of all ranks, in rank order; None if the reports are of different moments."""
    layout = reports[0].layout
    if any(it.step != reports[0].step or it.layout != layout for it in reports):
        return None
    if len(reports) != len(layout.starts) - 1:
        return None
    loads = {}
    for layer, it in layout.layers.items():
        rows_S = [rows for report in reports for rows in report.rows.get(layer, ())]
        if not rows_S:
            rows_S = [0.0] * len(it.slots)
        loads[layer] = np.bincount(it.slots, rows_S, layout.num_experts)
    return layout.with_loads(loads)


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
