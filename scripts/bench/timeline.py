"""Where the time of a step goes: ranks in step, timed, then profiled, each part of the step against its floor.

    python -m scripts.bench.timeline --ranks 4 --output docs/results/gpu-timeline.json

Writes the JSON, and tables and pictures beside it. One process and GPU for each rank, without Ray and HTTP; the model,
its random weights and the backends are those of configs/gpu-bench.yaml. On a CPU a dry run of itself:

    python -m scripts.bench.timeline --config configs/local.yaml --ranks 2 --scale 0.1 --lengths 0.1 \\
        --set cluster.device=cpu --set model.weights=dummy --output /tmp/timeline.json
"""

import argparse
import json
import os
import re
import tempfile
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing

from cluster.bench import machine
from cluster.bench.roofline import Hardware, Part, step_floor, step_floors
from cluster.bench.step_work import StepShape
from cluster.config import load_config, resolve_rank_config
from cluster.trace_drawing import check_matplotlib
from kernels.cuda_environment import MULTICAST_OFF, share_compiled_kernels
from scripts.bench import ROOT
from scripts.bench.timeline_ranks import State, run_rank
from scripts.bench.timeline_report import draw, markdown
from workers import process_group
from workers.config import RankConfig
from workers.models.config import load_model_config
from workers.rank_info import Rendezvous

GPU_PACKAGES = ("torch", "triton", "flashinfer-python", "sgl-deep-gemm", "phalanx")
STATES = (
    State("decode", 128, 1024, 2048),
    State("decode", 32, 128, 640),
    State("prefill", 8, 1024, 1024),
)


def main() -> None:
    """Command line."""
    options = parse()
    if options.redraw:
        draw_all(json.loads(options.redraw.read_text()), options.redraw)
        return
    os.environ.update(MULTICAST_OFF)
    share_compiled_kernels(os.environ)
    config = resolve_rank_config(
        load_config(options.config, [f"cluster.ranks={options.ranks}", *options.set])
    )
    states = [scaled(state, options.scale, options.lengths) for state in STATES]
    check(config, states)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="phalanx-timeline-") as folder:
        run_ranks(config, states, Path(folder), options.timeout)
        ranks = [
            json.loads((Path(folder) / f"{rank}.json").read_text())
            for rank in range(config.num_ranks)
        ]
    report = make_report(config, states, ranks)
    report["seconds"] = round(time.perf_counter() - started, 1)
    write(report, options.output)
    draw_all(report, options.output)


def parse() -> argparse.Namespace:
    """Options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "gpu-bench.yaml")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--scale", type=float, default=1.0, help="factor of sequences a rank")
    parser.add_argument("--lengths", type=float, default=1.0, help="factor of their tokens")
    parser.add_argument("--set", action="append", default=[], help="setting of the configuration")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds for everything")
    parser.add_argument(
        "--output", type=Path, default=ROOT / "docs" / "results" / "gpu-timeline.json"
    )
    parser.add_argument("--redraw", type=Path, help="tables and pictures of such a JSON, no more")
    return parser.parse_args()


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
    if config.device == "cuda" and torch.cuda.device_count() < config.num_ranks:
        raise SystemExit(f"{config.num_ranks} ranks need as many GPUs: --ranks")


def run_ranks(config: RankConfig, states: list[State], folder: Path, timeout_s: float) -> None:
    """A process for each rank; when one fails the others are ended, and its traceback is raised."""
    store = process_group.host_store("127.0.0.1")
    rendezvous = Rendezvous("127.0.0.1", store.port, f"timeline-{os.getpid()}")
    context = torch.multiprocessing.spawn(
        run_rank, (config, states, rendezvous, folder), config.num_ranks, join=False
    )
    deadline = time.monotonic() + timeout_s
    try:
        while not context.join(timeout=1.0):
            if time.monotonic() > deadline:
                raise SystemExit(f"the ranks were not done after {timeout_s:g} s (--timeout)")
    finally:
        for process in context.processes:
            process.kill()


def make_report(
    config: RankConfig, states: list[State], ranks: list[dict[str, Any]]
) -> dict[str, Any]:
    """What all ranks found, and the floors."""
    model = replace(load_model_config(config.model.path), dtype=config.model.dtype)
    found = []
    for index, state in enumerate(states):
        of_ranks = [rank["states"][index] for rank in ranks]
        shape = StepShape(**of_ranks[0]["shape"])
        floors = step_floors(model, config.num_ranks, shape)
        found.append(
            {
                "title": state.title,
                **asdict(state),
                "shape": asdict(shape),
                "step_floor": floor_figures(step_floor(model, config.num_ranks, shape)),
                "floors": {part: floor_figures(floor) for part, floor in floors.items()},
                "ranks": of_ranks,
            }
        )
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "method": __doc__,
        "hardware": machine.hardware(),
        "versions": versions(),
        "assumed_hardware": asdict(Hardware()),
        "model": Path(config.model.path).name,
        "weights": config.model.weights,
        "routing": config.model.routing.kind,
        "num_layers": model.num_hidden_layers,
        "ranks": config.num_ranks,
        "backends": ranks[0]["backends"],
        "stages_s": ranks[0]["stages_s"],
        "states": found,
    }


def floor_figures(floor: Part) -> dict[str, Any]:
    """Milliseconds, and which of the three it is."""
    kinds = {"memory": floor.memory_s, "compute": floor.compute_s, "links": floor.link_s}
    bound = max(kinds, key=lambda kind: kinds[kind]) if floor.floor_s else "-"
    return {"floor_ms": 1e3 * floor.floor_s, "bound": bound}


def versions() -> dict[str, str]:
    """Of what the kernels come from."""
    found = {}
    for package in GPU_PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write(report: dict[str, Any], output: Path) -> None:
    """JSON, one line for each kernel that is drawn."""
    output.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1)
    output.write_text(re.sub(r"\[\s+([^\[\]{}]*?)\s+\]", one_line, text) + "\n")


def draw_all(report: dict[str, Any], output: Path) -> None:
    """Beside the JSON: the tables, and a picture of each state."""
    pictures = []
    for state in report["states"]:
        tokens = round(state["shape"]["tokens"])
        pictures.append(output.with_name(f"{output.stem}-{state['phase']}-{tokens}.png"))
    table = markdown(report, [picture.name for picture in pictures])
    output.with_suffix(".md").write_text(table + "\n")
    print(table)
    try:
        check_matplotlib()
    except ValueError as error:
        raise SystemExit(f"no pictures: {error}; then --redraw {output}") from None
    for state, picture in zip(report["states"], pictures, strict=True):
        draw(state, report["num_layers"], picture)


def one_line(found: re.Match[str]) -> str:
    """A list without breaks."""
    return "[" + re.sub(r"\s*\n\s*", " ", found[1]) + "]"


if __name__ == "__main__":
    main()
