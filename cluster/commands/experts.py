"""`phalanx experts`: the load of a running server's experts, what balancing would gain, a picture, a saved map."""

import json
import os
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
from rich.console import Console
from rich.table import Table

from cluster.commands.server_url import UnreachableError, base_url, no_answer, refusal
from workers.specs.expert_layout import ExpertLayout, LayoutError

TIMEOUT_S = 15.0
SHOWN = 8  # layers of the table: those with the busiest ranks
DOTS_PER_INCH = 120


def fetch(url: str, api_key_env: str) -> list[ExpertLayout]:
    """Return the experts of each group of the server at `url`. Raises UnreachableError."""
    target = f"{base_url(url)}/experts"
    key = os.environ.get(api_key_env)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    try:
        with urlopen(Request(target, headers=headers), timeout=TIMEOUT_S) as answer:
            groups = json.load(answer)["groups"]
        return [ExpertLayout.of_json(group, target) for group in groups]
    except HTTPError as error:
        raise UnreachableError(f"{target}: {refusal(error, api_key_env)}") from error
    except (OSError, HTTPException) as error:
        raise no_answer(target, error) from error
    except (ValueError, KeyError, TypeError) as error:
        reason = str(error) if isinstance(error, LayoutError) else repr(error)
        raise UnreachableError(f"{target} has no map of experts: {reason}") from error


def report(layout: ExpertLayout) -> Table | str:
    """Return what balancing would gain: the load of the busiest rank over that of a rank with equal loads."""
    busiest, even = layout.busiest()
    if not even:
        return "no tokens have reached experts yet"
    planned = layout.planned()
    after, _ = planned.busiest()
    moved = sum(
        slot != other
        for layer, it in layout.layers.items()
        for slot, other in zip(it.slots, planned.layers[layer].slots, strict=True)
    )
    ranks = len(layout.starts) - 1
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("layers", "busiest rank / mean", "balanced", "busiest expert / mean"):
        table.add_column(name, justify="left" if name == "layers" else "right")
    number = sum(any(it.loads) for it in layout.layers.values())
    fewer = 1 - after / busiest
    table.title = (
        f"{layout.num_experts} experts in {layout.starts[-1]} slots of {ranks} rank(s). Balancing moves {moved} "
        f"experts of all layers, and the busiest ranks get {fewer:.1%} fewer rows"
    )
    table.title_justify, table.title_style = "left", ""
    table.add_row(f"all {number}", f"{busiest / even:.3f}", f"{after / even:.3f}", "")
    rows = [(*_of_layer(layout, n), *_of_layer(planned, n), n) for n in layout.layers]
    for now, expert, then, _, layer in sorted(rows, reverse=True)[:SHOWN]:
        if now:
            table.add_row(str(layer), f"{now:.3f}", f"{then:.3f}", f"{expert:.1f}")
    return table


def _of_layer(layout: ExpertLayout, layer: int) -> tuple[float, float]:
    """Return the busiest rank and the busiest expert of a layer over their means; zeros without load."""
    one = ExpertLayout(layout.num_experts, layout.starts, {layer: layout.layers[layer]})
    busiest, even = one.busiest()
    loads = np.array(one.layers[layer].loads)
    return (busiest / even, float(loads.max() / loads.mean())) if even else (0.0, 0.0)


def draw(layout: ExpertLayout, path: Path) -> None:
    """Write the heat map of layers by experts as PNG, with matplotlib."""
    from matplotlib.figure import Figure

    layers = list(layout.layers)
    loads_LE = np.array([it.loads or [0.0] * layout.num_experts for it in layout.layers.values()])
    mean_L1 = loads_LE.mean(axis=1, keepdims=True)
    shares_LE = np.divide(loads_LE, mean_L1, out=np.zeros_like(loads_LE), where=mean_L1 > 0)
    figure = Figure(figsize=(10, max(2.5, 1.2 + 0.12 * len(layers))), layout="constrained")
    panel: Any = figure.subplots()
    image = panel.imshow(shares_LE, aspect="auto", interpolation="nearest", cmap="viridis")
    panel.set_xlabel("expert")
    panel.set_ylabel("layer")
    step = max(1, len(layers) // 12)
    panel.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    panel.set_title("Rows of each expert over the mean of its layer", fontsize=11)
    figure.colorbar(image, ax=panel)
    figure.savefig(path, dpi=DOTS_PER_INCH, format="png")


def show(
    url: str, api_key_env: str, *, png: Path | None, save_map: Path | None, balanced: bool
) -> None:
    """Print the gain for each group, and write the files that are wanted, of the first group.

    Raises UnreachableError, and ValueError for options that cannot work.
    """
    for option, file in (("--png", png), ("--save-map", save_map)):
        if file is not None and not file.absolute().parent.is_dir():
            raise ValueError(f"{option}: folder {file.absolute().parent} does not exist")
    if png is not None and find_spec("matplotlib") is None:
        raise ValueError("--png needs matplotlib, which is not installed: pip install matplotlib")
    if balanced and save_map is None:
        raise ValueError("--balanced chooses the map that --save-map FILE writes; give both")
    layouts = fetch(url, api_key_env)
    if not layouts:
        raise UnreachableError(f"{url} has no group that serves")
    console = Console(highlight=False)
    for layout in layouts:
        console.print(report(layout), soft_wrap=True)
    if png is not None:
        draw(layouts[0], png)
        console.print(f"wrote {png}", soft_wrap=True)
    if save_map is not None:
        (layouts[0].planned() if balanced else layouts[0]).save(save_map)
        console.print(f"wrote {save_map}; experts.map: {save_map} starts with it", soft_wrap=True)
