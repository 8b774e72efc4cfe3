"""Served speed on GPUs: starts the server, runs loads over HTTP, compares with the hardware's floors, writes JSON.

Each load keeps a number of requests in flight, all of the same lengths, with random prompts and answers of full
length. The loads are made for four GPUs; with fewer ranks fewer requests are in flight. Run it as
scripts/bench_gpu_serving; on a CPU with a small checkpoint it is a dry run of itself:

    scripts/bench_gpu_serving --config configs/local.yaml --ranks 1 --set cluster.device=cpu --lengths 0.02 \\
        --scale 0.01 --out /tmp/serving
"""

import argparse
import json
import re
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cluster.bench import loop, machine
from cluster.bench.load import Driver
from cluster.bench.metrics import RoundResult
from cluster.bench.settings import Load
from scripts.bench import ROOT, qwen_tokenizer, released_shapes, results
from scripts.bench.gpu_energy import GpuEnergy, used
from scripts.bench.gpu_serving_report import page
from scripts.bench.inputs import names_of, server_config
from scripts.bench.roofline import Hardware, floor_of
from scripts.bench.servers import ServerProcess, free_port, phalanx, resolved
from workers.models.registry import load_model_config

# In flight, input and output tokens. The fourth decodes 128 sequences a rank at 2,048 tokens, the last needs
# model.max_model_len of 33,024.
LOADS = (
    *((512, 1024, 1024), (128, 128, 512), (256, 4096, 8), (512, 1792, 512)),
    (32, 32_768, 256),
    *((4, 512, 256), (16, 512, 256)),
)
LOADS_RANKS = 4
SHAPE = "qwen3-30b-a3b"  # the model folder that gets the published tokenizer
# Counters of a rank; drafts: how many times a sequence had draft tokens in a step.
COUNTERS = ("idle_steps", "preemptions", "drafts", "draft_tokens", "accepted_tokens")
START_TIMEOUT_S = 900.0  # the first start on a machine compiles
STAGE = re.compile(r"^  (\S.*?) +([\d.]+) s$", re.MULTILINE)


def main() -> None:
    """Command line."""
    options = parse()
    if not options.redraw:
        with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder:
            results.save(options.out, measure(options, options.log or Path(folder) / "server.log"))
    results.write(options.out, results.load(options.out), page)
    print(options.out.with_suffix(".md").read_text())


def parse() -> argparse.Namespace:
    """Options, with those that were left out filled in."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scale", type=float, help="factor of requests in flight: ranks / 4")
    parser.add_argument("--lengths", type=float, default=1.0, help="factor of prompts and answers")
    loads = names_of(map(str, range(len(LOADS))))
    parser.add_argument("--loads", type=loads, default="0,1,2", help="which of the loads, from 0")
    parser.add_argument(
        "--load", action="append", type=three, metavar="FLIGHT/IN/OUT", help="in place of --loads"
    )
    parser.add_argument(
        "--against", action="append", default=[], help="setting of a second server, to compare with"
    )
    add_server_options(parser)
    results.add_options(parser, "gpu-serving")
    options = parser.parse_args()
    find_ranks(parser, options)
    options.scale = options.scale or options.ranks / LOADS_RANKS
    return options


def add_server_options(parser: argparse.ArgumentParser) -> None:
    """The options of a server on GPUs and of its model."""
    parser.add_argument("--ranks", type=int, help="default: the GPUs that are here")
    parser.add_argument("--waves", type=int, default=2, help="requests for each one in flight")
    parser.add_argument("--log", type=Path, help="keep the server's output here")
    add_model_options(parser)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options of `model_settings`, beside `ranks`."""
    parser.add_argument("--config", type=Path, default=ROOT / "configs" / "gpu-bench.yaml")
    parser.add_argument("--shape", choices=released_shapes.SHAPES, help="in place of the model")
    parser.add_argument("--layers", type=int, help="of the shape; default: all")
    parser.add_argument(
        "--quantization", choices=released_shapes.QUANTIZATIONS, help="of the shape's checkpoint"
    )
    parser.add_argument("--set", action="append", default=[], help="setting of the server")
    parser.add_argument(
        "--vocabulary", type=Path, help="qwen.tiktoken; default: of an installed dashscope"
    )


def find_ranks(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Set `options.ranks` to the GPUs of this machine if it was left out; end the command if there is none."""
    options.ranks = options.ranks or len(machine.hardware()["gpus"])
    if not options.ranks and not options.redraw:
        parser.error("no GPU was found; --ranks says how many ranks to start")


def three(text: str) -> tuple[int, int, int]:
    """Read a load: requests in flight, input and output tokens."""
    in_flight, input_len, output_len = map(int, text.split("/"))
    return in_flight, input_len, output_len


def measure(options: argparse.Namespace, log: Path) -> dict[str, Any]:
    """Return the report of one server, and of a second one that differs in the settings `--against`."""
    with model_settings(options) as (model, published):
        return measure_with(options, log, model, published)


@contextmanager
def model_settings(options: argparse.Namespace) -> Iterator[tuple[list[str], bool]]:
    """Yield the settings of the model that the options name, and whether they bring the published tokenizer."""
    config = server_config(options.config, [f"cluster.ranks={options.ranks}", *options.set])
    with tempfile.TemporaryDirectory(prefix="phalanx-model-") as folder:
        if options.shape is None:
            tokenizer = published_tokenizer(config.model.folder, options.vocabulary, Path(folder))
            yield tokenizer, bool(tokenizer)
            return
        options.layers = (
            options.layers or released_shapes.SHAPES[options.shape]["num_hidden_layers"]
        )
        shape = released_shapes.model_folder(
            options.shape, options.layers, Path(folder), options.quantization
        )
        yield [f"model.path={shape}"], False


def published_tokenizer(model: Path, vocabulary: Path | None, folder: Path) -> list[str]:
    """Return settings for a model folder with the published tokenizer; none for other models or without a vocabulary.

    The committed folder has a tokenizer of bytes, with which most ids that random weights draw have no text.
    """
    vocabulary = vocabulary or qwen_tokenizer.find_vocabulary()
    if model.name != SHAPE or vocabulary is None:
        return []
    copy = folder / SHAPE  # the folder's name is the model's name
    copy.mkdir()
    return [f"model.path={qwen_tokenizer.model_folder(model, vocabulary, copy)}"]


def measure_with(
    options: argparse.Namespace, log: Path, model: list[str], published: bool
) -> dict[str, Any]:
    """Measure with these settings of the model; published: they bring the published tokenizer."""
    settings = [f"cluster.ranks={options.ranks}", *model, *options.set]
    served = serve(options, settings, log)
    report = {
        "method": __doc__,
        **made_at(options, served),
        "scale": options.scale,
        "published_tokenizer": published,
        **served,
    }
    if options.against:
        other = serve(options, [*settings, *options.against], log.with_suffix(".against.log"))
        report["against"] = {"settings": options.against, **other}
    return report


def made_at(options: argparse.Namespace, served: dict[str, Any]) -> dict[str, Any]:
    """Return where a server was measured, the hardware of its floors, and its ranks and shape."""
    on_cpu = served["resolved"]["config"]["cluster"]["device"] == "cpu"
    origin = results.origin(0 if on_cpu else options.ranks, options.commit, served=True)
    return {
        **origin,
        "assumed_hardware": asdict(Hardware.of(origin["hardware"]["gpus"])),
        "ranks": options.ranks,
        "shape": options.shape and [options.shape, options.layers, options.quantization == "fp8"],
        "quantization": options.quantization,
    }


def serve(
    options: argparse.Namespace,
    settings: list[str],
    log: Path,
    measured: Callable[[list[dict[str, Any]], dict[str, Any]], None] = lambda loads, found: None,
    load_of: Callable[[ServerProcess, Load, dict[str, Any]], dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Start a server, load it with `make_loads`, stop it.

    measured   called behind each load with the loads so far, and with what the server has chosen
    load_of    in place of `run_load`
    """
    found, port = resolved(options.config, settings), free_port()
    command = phalanx("serve", options.config, [f"serve.port={port}", *settings])
    server = ServerProcess(
        command, port, found["config"]["serve"]["model_name"], log, START_TIMEOUT_S
    )
    try:
        print(f"first answer after {server.start_s:.1f} s", file=sys.stderr)
        loads: list[dict[str, Any]] = []
        for load in make_loads(options):
            loads.append((load_of or run_load)(server, load, found))
            measured(loads, found)
    finally:
        stop_s = server.stop()
    output = log.read_text(errors="replace")
    model = found["config"]["model"]
    model["path"] = Path(model["path"]).name
    return {
        "start_to_first_answer_s": round(server.start_s, 2),
        "start_stages_s": {name: float(seconds) for name, seconds in STAGE.findall(output)},
        "stop_s": stop_s and round(stop_s, 2),
        "loads": loads,
        "resolved": found,
    }


def make_loads(options: argparse.Namespace) -> list[Load]:
    """The chosen loads, those of LOADS scaled."""
    chosen = [
        (max(1, round(in_flight * options.scale)), *lengths)
        for in_flight, *lengths in (LOADS[int(index)] for index in options.loads)
    ]
    return [
        Load(
            endpoint="completions",
            requests=options.waves * concurrency,
            concurrency=concurrency,
            input_len=max(1, round(input_len * options.lengths)),
            output_len=max(2, round(output_len * options.lengths)),
            warmup=min(concurrency, 16),
            rounds=1,
            seed=seed,
            temperature=0.0,
            ignore_eos=True,
            prompts="ids",
            vocab_size=256,
            timeout_s=600.0,
        )
        for seed, (concurrency, input_len, output_len) in enumerate(options.load or chosen)
    ]


def run_load(server: ServerProcess, load: Load, resolved: dict[str, Any]) -> dict[str, Any]:
    """One load: what clients saw, where the ranks' time went, and the floor."""
    before = rank_stats(server.url)
    result, joules = loop.run(send(load, server.url, GpuEnergy(range(len(before)))))
    after = rank_stats(server.url)
    lengths = {"input_len": load.input_len, "output_len": load.output_len}
    states = resolved["config"]["cache"]["state_dtype"]
    floor = floor_of(
        load_model_config(resolved["config"]["model"]["path"]),
        len(before),
        in_flight=load.concurrency,
        **lengths,
        max_num_batched_tokens=resolved["config"]["scheduler"]["max_num_batched_tokens"],
        fp8_experts=resolved["backends"]["grouped_gemm"]["name"] == "deepgemm_fp8",
        four_bit=resolved["backends"]["grouped_gemm"]["name"] == "triton_four_bit",
        fp8_cache=resolved["config"]["cache"]["dtype"] == "fp8",
        states=None if states == "auto" else states,
        hardware=Hardware.of(machine.hardware()["gpus"]),
    )
    print(
        f"{load.concurrency} / {load.input_len} / {load.output_len}: "
        f"{result.output_tokens_per_s:,.0f} output tok/s, {result.total_tokens_per_s:,.0f} in all",
        file=sys.stderr,
    )
    return {
        "in_flight": load.concurrency,
        **lengths,
        "requests": load.requests,
        "result": asdict(result),
        "joules": joules,
        "ranks": steps_between(before, after),
        "floor": asdict(floor),
    }


async def send(load: Load, url: str, energy: GpuEnergy) -> tuple[RoundResult, float | None]:
    """Warm up with other prompts, then the round, with the joules that its GPUs use."""
    driver = Driver(load, {})
    (target,) = await driver.prepare({"phalanx": url}, None)
    await driver.run_round(target, -1, load.warmup)
    before = energy.joules()
    result = await driver.run_round(target, 0, load.requests)
    return result, used(before, energy.joules())


def rank_stats(url: str) -> list[dict[str, Any]]:
    """Counters of all ranks."""
    with urllib.request.urlopen(f"{url}/ranks", timeout=30) as answer:
        return json.load(answer)["ranks"]


def steps_between(before: list[dict], after: list[dict]) -> list[dict[str, Any]]:
    """Of each rank: its steps in between, warm-up included, and milliseconds of a step by part."""
    found = []
    for old, new in zip(before, after, strict=True):
        steps = new["steps"] - old["steps"]
        parts = {
            name: 1e3 * (seconds - old["step_seconds"][name]) / max(1, steps)
            for name, seconds in new["step_seconds"].items()
        }
        found.append(
            {
                "steps": steps,
                **{name: new[name] - old[name] for name in COUNTERS},
                "ms_per_step": {name: round(value, 4) for name, value in parts.items()},
            }
        )
    return found


if __name__ == "__main__":
    main()
