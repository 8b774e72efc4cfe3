"""Images on one GPU, without Ray and HTTP: the shapes of Qwen3.6-35B-A3B in FP8 with its vision tower, random weights.

    python -m scripts.bench.gpu_images --out docs/results/gpu-images

Writes OUT.json: the tower alone as a share of the GPU's rate; requests with one image each against the tower alone and
text alone; gaps between tokens of text beside images; the first token of an image that the rank has seen before. On a
CPU with a small model it is a dry run of itself:

    python -m scripts.bench.gpu_images --small --set cluster.device=cpu --out /tmp/images
"""

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from scripts.bench.image_engine import Client, ImageMaker, start
from scripts.bench.inputs import rank_config
from scripts.bench.released_shapes import QWEN3_6_VISION, model_folder, with_tower
from scripts.bench.results import Found, add_options, origin, save
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


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a small model, images and loads")
    parser.add_argument("--layers", type=int, help="of the text part; by default all")
    parser.add_argument("--set", action="append", default=[], help="setting for Phalanx")
    parser.add_argument("--side", type=int, help="pixels a side of an image; by default 1024")
    parser.add_argument("--seconds", type=float, help="of the streams; by default 30")
    add_options(parser, "gpu-images", drawn=False)
    options = parser.parse_args()
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
        report["load"] = {"side": side, "layers": options.layers, "settings": options.set}
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
    small, seconds = options.small, options.seconds or (2.0 if options.small else 30.0)
    text, output = (16, 8) if small else (256, 128)
    in_flight, streams = (4, 4) if small else (32, 64)
    turns, count = (1, 3) if small else (4, 20)
    parts: dict[str, Callable[[], Found]] = {
        "tower": lambda: tower_alone(tower, images, rate, turns=1 if small else 10),
        "one_image_each": lambda: one_image_each(client, images, in_flight, text, output, turns),
        "streams": lambda: text_streams(client, images, streams, text, seconds, per_second=2.0),
        "same_image": lambda: same_image(client, images, text, count),
    }
    for name, part in parts.items():
        report[name] = part()
        print(json.dumps({name: report[name]}, indent=1), flush=True)
        save(options.out, report)


def flops(spec: VisionSpec, num_patches: int, num_images: int) -> float:
    """Return the FLOPs of products and attention of `num_images` images of `num_patches` patches each."""
    dim, width, joined = spec.hidden_size, spec.intermediate_size, spec.hidden_size * spec.merged
    block = 2 * (4 * dim**2 + 2 * dim * width) + 4 * num_patches * dim
    merger = 2 * (joined**2 + joined * spec.output_size) / spec.merged
    patch = 2 * spec.patch_dim * dim
    return num_images * num_patches * (spec.depth * block + merger + patch)


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
    client: Client,
    images: ImageMaker,
    streams: int,
    text: int,
    seconds: float,
    per_second: float,
) -> Found:
    """Gaps between the tokens of text streams, without images and beside some."""
    quiet = client.gaps(streams, text, seconds)
    ended = threading.Event()

    def send() -> None:
        while not ended.wait(1 / per_second):
            client.submit(text, 1, images.new())

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    busy = client.gaps(streams, text, seconds)
    ended.set()
    sender.join()
    p99 = {name: percentile(gaps, 0.99) for name, gaps in (("quiet", quiet), ("busy", busy))}
    return {
        "streams": streams,
        "images_per_s": per_second,
        "p50_ms": {"quiet": percentile(quiet, 0.5), "busy": percentile(busy, 0.5)},
        "p99_ms": p99,
        "p99_of_quiet": round(p99["busy"] / p99["quiet"], 4),
    }


def percentile(seconds: list[float], share: float) -> float:
    """Return a percentile in milliseconds."""
    return round(1e3 * sorted(seconds)[int(share * (len(seconds) - 1))], 3)


def same_image(client: Client, images: ImageMaker, text: int, count: int) -> Found:
    """First tokens, one request at a time: of an image seen before behind other text, and of text of equal length."""
    image = images.new()
    client.first_token(text, image)
    order = ["image", "text"] * count
    random.Random(0).shuffle(order)
    found: dict[str, list[float]] = {"image": [], "text": []}
    for kind in order:
        length = text + (images.num_tokens if kind == "text" else 0)
        found[kind].append(client.first_token(length, image if kind == "image" else None))
    medians = {kind: statistics.median(times) for kind, times in found.items()}
    return {
        "ms": {kind: [round(1e3 * it, 3) for it in times] for kind, times in found.items()},
        "of_text": round(medians["image"] / medians["text"], 4),
    }


if __name__ == "__main__":
    main()
