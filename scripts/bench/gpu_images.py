"""Images on one GPU, without Ray and HTTP: the shapes of Qwen3.6-35B-A3B in FP8 with its vision tower, random weights.

    python -m scripts.bench.gpu_images --out docs/results/gpu-images

Writes OUT.json and OUT.md: the tower alone as a share of the GPU's rate; requests with one image each against the tower
alone and text alone; the first token of an image that the rank has seen before; gaps between tokens of text beside
images and beside prompts of text as long as theirs, each without and with limits of prompts beside decodes. On a CPU
with a small model it is a dry run of itself:

    python -m scripts.bench.gpu_images --small --set cluster.device=cpu --out /tmp/images
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from scripts.bench.image_engine import Client, ImageMaker, start
from scripts.bench.image_report import page
from scripts.bench.inputs import rank_config
from scripts.bench.released_shapes import QWEN3_6_VISION, model_folder, with_tower
from scripts.bench.results import Found, add_options, load, origin, save, write
from scripts.bench.roofline import Hardware
from scripts.make_checkpoint import make_checkpoint
from workers.models.vision.tower import VisionTower
from workers.specs.vision import VisionSpec

SMALL_TOWER = QWEN3_6_VISION | {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "num_position_embeddings": 16,
}
BATCH = 8
PER_SECOND = 2.0
"""Requests beside streams."""
FIXED_LIMIT = 256
"""Prompt tokens beside decodes, where the limit is a number."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a small model, images and loads")
    parser.add_argument("--layers", type=int, help="of the text part; by default all")
    parser.add_argument("--set", action="append", default=[], help="setting for Phalanx")
    parser.add_argument("--side", type=int, help="pixels a side of an image; by default 1024")
    parser.add_argument("--seconds", type=float, help="of each row of streams; by default 12")
    parser.add_argument("--target-ms", type=float, default=18.0, help="scheduler.target_itl_ms")
    add_options(parser, "gpu-images")
    options = parser.parse_args()
    if not options.redraw:
        run(options)
    write(options.out, load(options.out), page)
    print(options.out.with_suffix(".md").read_text())


def run(options: argparse.Namespace) -> None:
    """Start the engine and measure."""
    side = options.side or (64 if options.small else 1024)
    with tempfile.TemporaryDirectory(prefix="phalanx-bench-") as folder:
        model = write_model(Path(folder), options)
        yaml = Path(folder) / "config.yaml"
        yaml.write_text(json.dumps({"model": {"path": str(model), "weights": "dummy"}}))
        length = "512" if options.small else "4096"
        settings = [f"model.max_model_len={length}", *options.set, "cluster.ranks=1"]
        config = rank_config(yaml, settings)
        num_gpus = int(config.device == "cuda")
        report = origin(num_gpus, options.commit)
        shapes = "A small model" if options.small else "Qwen3.6-35B-A3B's shapes in FP8"
        report["load"] = {"model": shapes, "side": side, "layers": options.layers}
        report["load"]["settings"] = options.set
        with start(config) as (epoch, client):
            tower = epoch.model.vision
            assert tower is not None, "the model has a vision tower"
            images = ImageMaker(tower.spec, side)
            measure(client, tower, images, options, report)


def write_model(parent: Path, options: argparse.Namespace) -> Path:
    """Return the folder of the model."""
    if options.small:
        folder = make_checkpoint(parent / "small", family="qwen3_5_moe_text", weights=False)
        return with_tower(folder, SMALL_TOWER, [3, 3, 2])
    folder = model_folder("qwen3.6-35b-a3b", options.layers, parent, "fp8")
    return with_tower(folder, QWEN3_6_VISION, [11, 11, 10])


def measure(
    client: Client,
    tower: VisionTower,
    images: ImageMaker,
    options: argparse.Namespace,
    report: Found,
) -> None:
    """Measure all parts; each is printed, and saved in the report."""
    rate = Hardware.of(report["hardware"]["gpus"]).flops
    small, seconds = options.small, options.seconds or (2.0 if options.small else 12.0)
    text, output = (16, 8) if small else (256, 128)
    in_flight, streams = (4, 4) if small else (32, 64)
    turns, count = (1, 3) if small else (4, 20)
    parts: dict[str, Callable[[], Found]] = {
        "tower": lambda: tower_alone(tower, images, rate, turns=1 if small else 10),
        "one_image_each": lambda: one_image_each(client, images, in_flight, text, output, turns),
        "same_image": lambda: same_image(client, images, text, count),
        "streams": lambda: text_streams(client, images, streams, text, seconds, options.target_ms),
    }
    for name, part in parts.items():
        report[name] = part()
        print(json.dumps({name: report[name]}, indent=1), flush=True)
        save(options.out, report)


def flops(spec: VisionSpec, num_patches: int, num_images: int) -> float:
    """Return the FLOPs of products and attention of `num_images` images of `num_patches` patches each."""
    joined = spec.hidden_size * spec.merged
    merger = 2 * (joined**2 + joined * spec.output_size) / spec.merged
    patch = 2 * spec.patch_dim * spec.hidden_size
    blocks = spec.depth * spec.patch_flops(num_patches)
    return num_images * num_patches * (blocks + merger + patch)


def tower_alone(tower: VisionTower, images: ImageMaker, rate: float, turns: int) -> Found:
    """The tower's forward of BATCH images, pixels on the device."""
    grid = images.grid
    pixels_NP = torch.randint(
        256, (BATCH * grid[1] * grid[2], tower.spec.patch_dim), dtype=torch.uint8
    ).to(tower.device)

    def run() -> float:
        wait(tower.device)
        started = time.perf_counter()
        tower.forward(pixels_NP, [grid] * BATCH)
        wait(tower.device)
        return time.perf_counter() - started

    run()
    spent = [run() for _ in range(turns)]
    work = flops(tower.spec, grid[1] * grid[2], BATCH)
    median = statistics.median(spent)
    return {
        "images": BATCH,
        "tflops": work / 1e12,
        "ms": [round(1e3 * it, 3) for it in spent],
        "rate_tflops_per_s": rate / 1e12,
        "share_of_rate": round(work / median / rate, 4),
    }


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def one_image_each(
    client: Client, images: ImageMaker, in_flight: int, text: int, output: int, turns: int
) -> Found:
    """Closed loops: requests with an image, text of equal length, and images alone through the encoder."""
    count, length = 2 * in_flight, text + images.num_tokens
    found: dict[str, list[float]] = {"with_image": [], "text": [], "encoder": []}
    for turn in range(turns + 1):  # the first one warms up
        loops: dict[str, Callable[[], float]] = {
            "with_image": lambda: client.loop(count, in_flight, text, output, images.new),
            "text": lambda: client.loop(count, in_flight, length, output),
            "encoder": lambda: client.encode([images.new() for _ in range(count)]),
        }
        for name, run in loops.items():
            spent = run()
            if turn:
                found[name].append(count / spent)
    rates = {name: statistics.median(values) for name, values in found.items()}
    sum_alone = 1 / (1 / rates["encoder"] + 1 / rates["text"])
    return {
        "in_flight": in_flight,
        "text_tokens": text,
        "image_tokens": images.num_tokens,
        "output_tokens": output,
        "requests_per_s": {name: [round(it, 3) for it in values] for name, values in found.items()},
        "of_sum_alone": round(rates["with_image"] / sum_alone, 4),
    }


def text_streams(
    client: Client, images: ImageMaker, streams: int, text: int, seconds: float, target_ms: float
) -> Found:
    """Gaps between the tokens of text streams: alone, and beside requests under each limit of prompts."""
    limits: dict[str, dict[str, float]] = {
        "as configured": {},
        f"target_itl_ms {target_ms:g}": {"target_itl_ms": target_ms},
        f"at most {FIXED_LIMIT} tokens": {"max_prefill_tokens_with_decodes": FIXED_LIMIT},
    }
    length = text + images.num_tokens
    requests: dict[str, Callable[[], str]] = {
        "text": lambda: client.submit(length, 1),
        "images": lambda: client.submit(text, 1, images.new()),
    }
    quiet = row("-", "nothing", client.gaps(streams, text, seconds))
    rows = [quiet]
    for limit, settings in limits.items():
        client.limit(**settings)
        for beside, send in requests.items():
            gaps, first_tokens = client.beside(
                send, PER_SECOND, lambda: client.gaps(streams, text, seconds)
            )
            rows.append(row(limit, beside, gaps, first_tokens))
    for it in rows:
        it["p99_of_quiet"] = round(it["p99_ms"] / quiet["p99_ms"], 4)
    return {"streams": streams, "per_second": PER_SECOND, "prompt_tokens": length, "rows": rows}


def row(limit: str, beside: str, gaps: list[float], first_tokens: Sequence[float] = ()) -> Found:
    """Return the percentiles of gaps, and the median first token of the requests beside them."""
    shares = {"p50_ms": 0.5, "p97_ms": 0.97, "p99_ms": 0.99, "max_ms": 1.0}
    found: Found = {"limit": limit, "beside": beside}
    found |= {name: percentile(gaps, share) for name, share in shares.items()}
    if first_tokens:
        found["first_token_ms"] = percentile(list(first_tokens), 0.5)
    return found


def percentile(seconds: list[float], share: float) -> float:
    """Return a percentile in milliseconds."""
    return round(1e3 * sorted(seconds)[int(share * (len(seconds) - 1))], 3)


def same_image(client: Client, images: ImageMaker, text: int, count: int) -> Found:
    """First tokens, one request at a time: of an image seen before behind other text, and of text of equal length."""
    image = images.new()
    client.first_token(client.submit(text, 1, image))
    order = ["image", "text"] * count
    random.Random(0).shuffle(order)
    found: dict[str, list[float]] = {"image": [], "text": []}
    for kind in order:
        length = text + (images.num_tokens if kind == "text" else 0)
        name = client.submit(length, 1, image if kind == "image" else None)
        found[kind].append(client.first_token(name))
    medians = {kind: statistics.median(times) for kind, times in found.items()}
    return {
        "ms": {kind: [round(1e3 * it, 3) for it in times] for kind, times in found.items()},
        "of_text": round(medians["image"] / medians["text"], 4),
    }


if __name__ == "__main__":
    main()
