"""Speed with LoRA adapters on GPUs: a server without LoRA, and one with random adapters, of which requests use some.

The same load over HTTP four times: without LoRA, with LoRA that no request uses, with one adapter for all requests, and
with all adapters in turn. Then the longest gap of open streams while one adapter more than there are slots comes into a
slot, see `adapter_swaps`. The adapters have the largest rank and change every module of the chosen targets:

    python -m scripts.bench.gpu_adapters --targets attention,experts --out /tmp/adapters

On a CPU with a small checkpoint it is a dry run of itself:

    python -m scripts.bench.gpu_adapters --config configs/local.yaml --ranks 1 --set cluster.device=cpu --lora 2 \\
        --load 4/16/8 --swap 2/400/6 --out /tmp/adapters
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from scripts.bench import results
from scripts.bench.adapter_swaps import SwapLoad, measure_swaps
from scripts.bench.gpu_serving import (
    START_TIMEOUT_S,
    add_server_options,
    find_ranks,
    made_at,
    make_loads,
    model_settings,
    run_load,
    three,
)
from scripts.bench.servers import ServerProcess, free_port, phalanx, resolved
from workers.adapters.layout import AdapterLayout
from workers.lora_config import LoraConfig
from workers.models.registry import load_model_config


def main() -> None:
    """Command line."""
    options = parse()
    if not options.redraw:
        with tempfile.TemporaryDirectory(prefix="phalanx-adapters-") as folder:
            measure(options, Path(folder))
    results.write(options.out, results.load(options.out), page)
    print(options.out.with_suffix(".md").read_text())


def parse() -> argparse.Namespace:
    """Options, with those that were left out filled in."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--lora", type=int, default=8, help="adapters, which all run at once")
    parser.add_argument("--rank", type=int, default=16, help="of the adapters")
    parser.add_argument("--targets", default="attention", help="lora.targets, with commas")
    parser.add_argument(
        "--load", type=three, default=(64, 128, 512), metavar="FLIGHT/IN/OUT", help="the load"
    )
    parser.add_argument(
        "--swap",
        type=three,
        default=(16, 4000, 40),
        metavar="STREAMS/TOKENS/REQUESTS",
        help="streams beside swaps, the tokens of each, and requests for adapters",
    )
    add_server_options(parser)
    results.add_options(parser, "gpu-adapters")
    options = parser.parse_args()
    find_ranks(parser, options)
    options.lengths, options.loads, options.scale = 1.0, [], 1.0
    options.load = [options.load]
    return options


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Measure both servers, and save the results behind each load."""
    with model_settings(options) as (model, published):
        settings = [f"cluster.ranks={options.ranks}", *model, *options.set]
        names = [f"adapter-{number}" for number in range(options.lora + 1)]
        found = resolved(options.config, settings)
        lora = LoraConfig(
            max_loras=options.lora, max_rank=options.rank, targets=options.targets.split(",")
        )
        write_adapters(found["config"]["model"]["path"], lora, [folder / name for name in names])
        adapters = [{"name": name, "path": str(folder / name)} for name in names]
        with_lora = [
            *(f"lora.max_loras={options.lora}", f"lora.max_rank={options.rank}"),
            f"lora.targets={json.dumps(options.targets.split(','))}",
            f"lora.adapters={json.dumps(adapters)}",
        ]
        log = options.log or folder / "server.log"
        report = {"method": __doc__, "published_tokenizer": published, "loads": {}, "swaps": {}}
        report |= {"rank": options.rank, "targets": options.targets}
        report["swap"] = dict(zip(("streams", "tokens", "requests"), options.swap, strict=True))
        serve(options, settings, log, report, {"without LoRA": []})
        uses = {"no adapter": [], "1 adapter": names[:1]}
        uses[f"{options.lora} adapters"] = names[: options.lora]
        log = log.with_suffix(".lora.log")
        serve(options, [*settings, *with_lora], log, report, uses, names)


def write_adapters(model: str, lora: LoraConfig, folders: list[Path]) -> None:
    """Write random adapters of every module, in bfloat16. All have the weights of the first: their speed is equal.

    Modules with equal shapes have the same random values, which each module begins at another place.
    """
    shapes = AdapterLayout.of(load_model_config(model), lora).module_shapes()
    source, drawn, tensors = torch.Generator().manual_seed(0), {}, {}
    for number, (name, (rows, columns)) in enumerate(shapes.items()):
        for part, shape in (("A", (lora.max_rank, columns)), ("B", (rows, lora.max_rank))):
            if (part, shape) not in drawn:
                drawn[part, shape] = torch.randn(shape, generator=source).bfloat16() / columns**0.5
            values = drawn[part, shape].roll(number)
            tensors[f"base_model.model.model.{name}.lora_{part}.weight"] = values
    for folder in folders:
        folder.mkdir()
        weights = folder / "adapter_model.safetensors"
        if folder == folders[0]:
            save_file(tensors, weights)
        else:
            weights.hardlink_to(folders[0] / weights.name)
        written = {"peft_type": "LORA", "r": lora.max_rank, "lora_alpha": lora.max_rank}
        (folder / "adapter_config.json").write_text(json.dumps(written))


def serve(
    options: argparse.Namespace,
    settings: list[str],
    log: Path,
    report: dict[str, Any],
    uses: dict[str, list[str]],
    swapped: Sequence[str] = (),
) -> None:
    """Start a server, run the load once for each of `uses`, names of models in turn, stop it.

    report    gets the results, and is saved behind each
    swapped   adapters of which one more is used than there are slots
    """
    found, port = resolved(options.config, settings), free_port()
    command = phalanx("serve", options.config, [f"serve.port={port}", *settings])
    name = found["config"]["serve"]["model_name"]
    server = ServerProcess(command, port, name, log, START_TIMEOUT_S)
    try:
        (load,) = make_loads(options)
        named = {**found["config"]["model"], "path": Path(found["config"]["model"]["path"]).name}
        report |= made_at(options, {"resolved": found})
        report["resolved"] = {**found, "config": {**found["config"], "model": named}}
        report["start_to_first_answer_s"] = round(server.start_s, 2)
        for use, models in uses.items():
            report["loads"][use] = run_load(server, replace(load, models=tuple(models)), found)
            results.save(options.out, report)
        if swapped:
            report["swaps"] = measure_swaps(server.url, name, swapped, SwapLoad(*options.swap))
            results.save(options.out, report)
    finally:
        server.stop()


def page(report: dict[str, Any], _name: str) -> str:
    """All of the .md but its notes."""
    rates = {use: load["result"]["output_tokens_per_s"] for use, load in report["loads"].items()}
    base = rates["without LoRA"]
    first = report["loads"]["without LoRA"]
    rows = [[use, f"{rate:,.0f}", f"{rate / base:.3f}"] for use, rate in rates.items()]
    config = report["resolved"]["config"]
    lines = [
        "# Speed with LoRA adapters",
        "",
        f"{results.origin_line(report)} {report['ranks']} rank(s).",
        f"Model {config['model']['path']}, weights {config['model']['weights']}; adapters of rank "
        f"{report['rank']} on {report['targets']}; {first['in_flight']} in flight, "
        f"{first['input_len']} / {first['output_len']} tokens, through HTTP.",
        "",
        results.markdown_table(["requests use", "output tok/s", "of without LoRA"], rows),
        "",
        f"Longest gap of {report['swap']['streams']} open streams around each of "
        f"{report['swap']['requests']} requests for an adapter:",
        "",
        results.markdown_table(
            ["request for", "median, ms", "longest, ms", "copies into slots"],
            [
                [kind, f"{it['median_ms']:.2f}", f"{it['longest_ms']:.2f}", str(it["slot_loads"])]
                for kind, it in report["swaps"].items()
            ],
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
