"""Where the time of a step goes: ranks in step, timed, then profiled, each part of the step against its floor.

    python -m scripts.bench.timeline --ranks 4 --out docs/results/gpu-timeline

Writes OUT.json, OUT.md and a picture of each state; `--redraw` makes page and pictures of an OUT.json again. One
process and GPU for each rank, without Ray and HTTP; the model, its random weights and the backends are those of
configs/gpu-bench.yaml. On a CPU it is a dry run of itself:

    python -m scripts.bench.timeline --config configs/local.yaml --ranks 2 --scale 0.1 --lengths 0.1 \\
        --set cluster.device=cpu --set model.weights=dummy --out /tmp/timeline
"""

import argparse
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from cluster.bench import machine
from scripts.bench import ROOT
from scripts.bench.inputs import rank_config
from scripts.bench.processes import add_limits, limits_from_now, run_group
from scripts.bench.results import add_options, measure_or_redraw, origin, save, write
from scripts.bench.roofline import Hardware, Part, step_floor, step_floors
from scripts.bench.step_work import StepShape
from scripts.bench.timeline_ranks import TIMED, State, run_rank
from scripts.bench.timeline_report import draw, page
from workers.config import RankConfig
from workers.models.registry import load_model_config
from workers.rank.process_group import local_rendezvous

STATES = (
    State("decode", 128, 1024, 2048),
    State("decode", 32, 128, 640),
    State("prefill", 8, 1024, 1024),
)


def main() -> None:
    """Command line."""
    measure_or_redraw(parse(), measure, page, draw)


def parse() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "gpu-bench.yaml")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--scale", type=float, default=1.0, help="factor of sequences a rank")
    parser.add_argument("--lengths", type=float, default=1.0, help="factor of their tokens")
    parser.add_argument(
        "--state",
        action="append",
        default=[],
        type=read_state,
        help="in place of the usual ones, e.g. prefill:2:4096:4096, decode:32:128:640 or decode:4:512:768:group",
    )
    parser.add_argument("--set", action="append", default=[], help="setting of the configuration")
    add_limits(parser, patience_s=300, budget_s=400)
    add_options(parser, "gpu-timeline")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> None:
    """All states, in processes; those that were measured until something failed are written all the same."""
    overrides = [f"cluster.ranks={options.ranks}", *options.set]
    config = rank_config(options.config, overrides)
    chosen = options.state or STATES
    states = [scaled(state, options.scale, options.lengths) for state in chosen]
    check(config, states)
    started = time.perf_counter()
    with local_rendezvous() as rendezvous:
        task = (config, states, rendezvous)
        outcome = run_group(run_rank, task, config.num_ranks, limits_from_now(options))
    found = [report["ranks"] for report in outcome.reports if "ranks" in report]
    if found:
        (start,) = (report["start"] for report in outcome.reports if "start" in report)
        report = {
            **origin(config.num_ranks if config.device == "cuda" else 0, options.commit),
            **make_report(config, start, states[: len(found)], found),
            "seconds": round(time.perf_counter() - started, 1),
        }
        save(options.out, report)
        write(options.out, report, page, draw)
        print(options.out.with_suffix(".md").read_text())
    if outcome.failure is not None:
        raise SystemExit(outcome.failure)


def read_state(text: str) -> State:
    """Return the state of `phase:sequences:shortest:longest`, or of the whole group with `:group` behind."""
    phase, *numbers = text.removesuffix(":group").split(":")
    if phase not in TIMED or len(numbers) != 3:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not phase:sequences:shortest:longest[:group]"
        )
    return State(phase, *map(int, numbers), of_group=text.endswith(":group"))


def scaled(state: State, seqs: float, lengths: float) -> State:
    """A smaller state of its kind; a decoding sequence has room for all steps."""
    shortest = max(2, round(state.shortest * lengths))
    longest = max(shortest, round(state.longest * lengths))
    if state.phase == "decode":
        longest = max(longest, shortest + state.steps)
    return replace(state, seqs=max(1, round(state.seqs * seqs)), shortest=shortest, longest=longest)


def check(config: RankConfig, states: list[State]) -> None:
    """End with the setting that a state needs otherwise."""
    for state in states:
        limits = (
            ("scheduler.max_num_seqs", state.seqs, config.scheduler.max_num_seqs),
            ("model.max_model_len", state.longest + 1, int(config.model.max_model_len)),
            (
                "scheduler.max_num_batched_tokens",
                state.seqs * (state.longest if state.phase == "prefill" else 2),
                config.scheduler.max_num_batched_tokens,
            ),
        )
        for key, needed, found in limits:
            if needed > found:
                raise SystemExit(
                    f"{key} is {found}, but needs {needed} for this state: {state.title}"
                )


def make_report(
    config: RankConfig,
    start: dict[str, Any],
    states: list[State],
    found: list[list[dict[str, Any]]],
) -> dict[str, Any]:
    """What all ranks found in each state, and the floors. `start`: backends, and seconds of the stages."""
    model = replace(load_model_config(config.model.folder), dtype=config.model.dtype)
    hardware, rows = Hardware.of(machine.hardware()["gpus"]), []
    for state, of_ranks in zip(states, found, strict=True):
        shape = StepShape(**of_ranks[0]["shape"])
        if state.of_group:
            shape = replace(shape, tokens=state.seqs / config.num_ranks)
        floors = step_floors(model, config.num_ranks, shape, hardware)
        rows.append(
            {
                "title": state.title,
                **asdict(state),
                "shape": asdict(shape),
                "step_floor": floor_figures(step_floor(model, config.num_ranks, shape, hardware)),
                "floors": {part: floor_figures(floor) for part, floor in floors.items()},
                "ranks": of_ranks,
            }
        )
    return {
        "method": __doc__,
        "assumed_hardware": asdict(hardware),
        "model": Path(config.model.path).name,
        "weights": config.model.weights,
        "routing": config.model.routing.kind,
        "num_layers": model.num_layers,
        "ranks": config.num_ranks,
        **start,
        "states": rows,
    }


def floor_figures(floor: Part) -> dict[str, Any]:
    """Milliseconds, and which of the three it is."""
    kinds = {"memory": floor.memory_s, "compute": floor.compute_s, "links": floor.link_s}
    bound = max(kinds, key=lambda kind: kinds[kind]) if floor.floor_s else "-"
    return {"floor_ms": 1e3 * floor.floor_s, "bound": bound}


if __name__ == "__main__":
    main()
