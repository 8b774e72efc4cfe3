"""Simulates more ranks than an experiment measured: fits a model to its cells, writes simulation.json, .md and .png.

`python -m scripts.bench.lockstep FOLDER --held-back 16 128`
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cluster.bench.lengths import Lengths
from cluster.experiments import drawing
from cluster.experiments.comparison import Results
from cluster.experiments.report import markdown_table, number, read_results
from cluster.experiments.results_folder import write_json
from scripts.bench.lockstep_model import Error, Point, StepModel, split
from scripts.bench.lockstep_simulation import Simulated, Traffic, simulate

DATA, PAGE, PLOT = "simulation.json", "simulation.md", "simulation.png"
METRICS = ("step_ms", "exchange_us", "empty_step_us")
Errors = dict[str, Error]


def main() -> None:
    """Simulate more ranks than the cells of a folder of results have."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("folder", type=Path, help="results of an experiment over cluster.ranks and workload.tokens")
    add("--ranks", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64, 128, 256])
    held_back = "values of workload.tokens that the fit does not see; its error is measured there"
    add("--held-back", type=int, nargs="+", required=True, help=held_back)
    add("--steps", type=int, default=1000, help="steps of each simulation")
    add("--sequences", type=int, default=16, help="sequences of each rank, always in flight")
    add("--max-tokens", type=int, default=512, help="tokens of one step on a rank")
    add("--input-len", default="lognormal:128:0.8:1024", help="prompts, in tokens")
    add("--output-len", default="lognormal:64:0.6:512", help="answers, in tokens")
    args = parser.parse_args()
    if args.max_tokens < args.sequences or min(args.ranks) < 2:
        parser.error("expected --max-tokens of at least --sequences, and --ranks of 2 or more")
    try:
        page = simulate_folder(args.folder, read_results(args.folder), vars(args))
    except ValueError as error:
        parser.error(str(error))
    (args.folder / PAGE).write_text(page + "\n", encoding="utf-8")
    print(f"wrote {args.folder / PAGE}")


def simulate_folder(folder: Path, results: Results, settings: Mapping[str, Any]) -> str:
    """Write the data and the plot of a simulation to `folder`; return the page.

    Raises ValueError where the results do not suffice for the fit.
    """
    others = set(results.head.get("axes", ())) - {"cluster.ranks", "workload.tokens"}
    if others:
        raise ValueError(f"one model is fitted to all cells, but they differ in {sorted(others)}")
    points = measured_points(results)
    seen, held = split(points, settings["held_back"])
    sizes = {point.tokens for point in seen}
    if not held or not {1} < {point.ranks for point in seen} or len(sizes) < 3:
        raise ValueError("the fit needs results of one rank, three sizes, and held back sizes")
    if len({point.ranks for point in seen}) < 3:
        raise ValueError("the fit needs results of two numbers of ranks above 1")
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
    write_json(folder / DATA, data)
    if drawing.has_matplotlib():
        _draw(results, points, model, outcomes, folder / PLOT)
    return _page(settings, errors, outcomes)


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


def _page(settings: Mapping[str, Any], errors: Errors, outcomes: Sequence[Simulated]) -> str:
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
        "# Simulated ranks\n\n"
        "A model of steps and all-to-alls, fitted to the cells of [the experiment](summary.md) "
        f"except those of {held} tokens. Its error there:\n\n"
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


if __name__ == "__main__":
    main()
