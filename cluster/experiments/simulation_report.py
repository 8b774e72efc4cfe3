"""The simulation of a folder: fits the model to its cells, simulates, writes simulation.json, a section and a plot."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.bench.lengths import Lengths
from cluster.experiments import drawing
from cluster.experiments.comparison import Results
from cluster.experiments.exchange_model import Error, Point, StepModel, split
from cluster.experiments.lockstep_simulation import Simulated, Traffic, simulate
from cluster.experiments.report import markdown_table, number
from cluster.experiments.results_folder import disk_errors, write_json

DATA, PLOT = "simulation.json", "simulation.png"
METRICS = ("step_ms", "exchange_us", "empty_step_us")
Errors = dict[str, Error]


def add_simulation(folder: Path, results: Results) -> str:
    """Return the section of summary.md; "" for an experiment without a simulation, and before its runs are there."""
    settings = results.head["simulate"]
    points = measured_points(results)
    if settings is None:
        return ""
    seen, held = split(points, settings["held_back"])
    if not held or len({p.ranks for p in seen}) < 3 or not any(p.ranks == 1 for p in seen):
        return "No simulation: it needs results of one rank, of two other numbers of ranks, and held back sizes."
    facts = results.head["model"]
    shared = {"layers": facts["layers"], "top_k": facts["top_k"], "cores": facts["cores"]}
    model = StepModel.fit(seen, **shared)
    errors = _errors(model, seen, held, shared)
    traffic = Traffic(
        settings["sequences"],
        settings["max_tokens"],
        Lengths.parse(settings["input_len"]),
        Lengths.parse(settings["output_len"]),
        settings["steps"],
    )
    seed = results.head["seed"]
    outcomes = [simulate(model, traffic, ranks, seed) for ranks in (1, *settings["ranks"])]
    data = {
        "model": {"exchange": model.exchange, "compute": model.compute, "vote": model.vote},
        "errors": {name: vars(error) for name, error in errors.items()},
        "simulated": [outcome.to_json() for outcome in outcomes],
    }
    with disk_errors(folder):
        write_json(folder / DATA, data)
    if drawing.has_matplotlib():
        _draw(results, points, model, outcomes, folder / PLOT)
    return _section(settings, errors, outcomes)


def measured_points(results: Results) -> list[Point]:
    """Return a point for each cell with results, by its ranks and tokens."""
    points = []
    for cell in results.cells:
        spreads = [cell.spread(metric) for metric in METRICS]
        ranks, tokens = (cell.settings.get(key) for key in ("cluster.ranks", "workload.tokens"))
        if ranks and tokens and all(spreads):
            medians = [spread.median for spread in spreads if spread is not None]
            points.append(Point(ranks, tokens, *medians))
    return points


def _errors(
    model: StepModel, seen: Sequence[Point], held: Sequence[Point], shared: Mapping[str, Any]
) -> Errors:
    most = max(point.ranks for point in seen)
    fewer = [point for point in seen if point.ranks < most]
    groups = [point for point in held if point.ranks > 1]
    found = {
        "all-to-all, sizes that were held back": model.exchange_error(groups),
        "whole step, sizes that were held back": model.step_error(groups),
    }
    if len({point.ranks for point in fewer}) > 2:
        name = f"all-to-all of {most} ranks, by a fit to fewer ranks"
        largest = [point for point in seen if point.ranks == most]
        found[name] = StepModel.fit(fewer, **shared).exchange_error(largest)
    return found


def _section(settings: Mapping[str, Any], errors: Errors, outcomes: Sequence[Simulated]) -> str:
    rows = [
        [name, f"{100 * error.mean:.0f} %", f"{100 * error.largest:.0f} %", str(error.count)]
        for name, error in errors.items()
    ]
    alone = outcomes[0].output_tokens_per_s_per_rank
    simulated = [
        [
            str(one.ranks),
            number(one.step_ms),
            number(one.output_tokens_per_s_per_rank),
            f"{one.output_tokens_per_s_per_rank / alone:.2f}",
            *(f"{100 * share:.1f} %" for share in (one.compute, one.waiting, one.exchange)),
            f"{100 * one.vote:.2f} %",
        ]
        for one in outcomes
    ]
    heads = ["ranks", "ms a step", "output tok/s a rank", "of one rank"]
    heads += ["compute", "waiting for the slowest", "all-to-all", "vote"]
    held = ", ".join(map(str, settings["held_back"]))
    return (
        "## Simulated ranks\n\n"
        f"A model of steps and all-to-alls, fitted to the cells above except those of {held} tokens. "
        "Its error there:\n\n"
        f"{markdown_table(['predicted', 'mean error', 'largest', 'cells'], rows)}\n\n"
        f"Simulated with it, each rank with a core or a GPU of its own: {settings['sequences']} sequences of a rank, "
        f"prompts {settings['input_len']}, answers {settings['output_len']}, steps of at most "
        f"{settings['max_tokens']} tokens. The model has uniform routing, and does not count the KV cache's length:\n\n"
        f"{markdown_table(heads, simulated)}\n\n![Simulated ranks]({PLOT})"
    )


def _draw(
    results: Results,
    points: Sequence[Point],
    model: StepModel,
    outcomes: Sequence[Simulated],
    path: Path,
) -> None:
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.8), layout="constrained")
    fitted, shares = figure.subplots(1, 2)
    for index, ranks in enumerate(sorted({point.ranks for point in points if point.ranks > 1})):
        own = sorted((p.tokens, p.exchange_us) for p in points if p.ranks == ranks)
        tokens = np.asarray([size for size, _ in own])
        fitted.plot(tokens, [us for _, us in own], "o", color=f"C{index}", label=f"{ranks} ranks")
        fitted.plot(tokens, model.exchange_us(ranks, tokens), "-", color=f"C{index}")
    fitted.set(xscale="log", yscale="log", xlabel="tokens of a rank", ylabel="us")
    fitted.set_title("all-to-all of a layer: measured (dots) and model (lines)", fontsize=10)
    fitted.legend(fontsize=8)
    names = [str(one.ranks) for one in outcomes]
    below = np.zeros(len(outcomes))
    for part in ("compute", "waiting", "exchange", "vote"):
        values = np.asarray([100 * getattr(one, part) for one in outcomes])
        shares.bar(names, values, bottom=below, label=part)
        below += values
    shares.set(xlabel="ranks", ylabel="% of the time")
    shares.set_title("simulated: where the time of a step goes", fontsize=10)
    shares.legend(fontsize=8)
    for panel in (fitted, shares):
        panel.grid(alpha=0.3)
    figure.suptitle(results.head["title"], fontsize=12)
    figure.savefig(path, dpi=drawing.DOTS_PER_INCH, format="png")
