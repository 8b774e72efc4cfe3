"""Times how fast one rank's weights come onto a GPU: read from a checkpoint in the page cache, or drawn there.

    python -m scripts.bench.loading --out docs/results/gpu-loading

The checkpoint has the shape of configs/models/qwen3-30b-a3b with fewer layers, in several files, and is written first.
The baseline copies each tensor out of a mapped file. Random weights are drawn for all layers.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from kernels.routing.expert_map import ContiguousMap
from scripts.bench import ROOT
from scripts.bench.inputs import need_gpus
from scripts.bench.results import add_options, origin, save
from workers.models.registry import load_model_config
from workers.specs.model import ModelConfig
from workers.weights.files import read_headers
from workers.weights.initial_weights import draw_weights
from workers.weights.reader import SlotSource, fill_slots
from workers.weights.slots import WeightSlot
from workers.weights.tensors import rank_weights

MODEL = ROOT / "configs" / "models" / "qwen3-30b-a3b"
NUM_FILES, WRITERS = 16, 4


class Rank:
    """Tensors of the shapes a rank holds: views of one allocation, as a model's fused parameters are."""

    def __init__(self, config: ModelConfig, num_ranks: int, device: torch.device):
        self.expert_map = ContiguousMap(config.num_experts, num_ranks)
        entries = rank_weights(config, self.expert_map, 0)
        sizes = [entry.size for entry in entries]
        parts = torch.empty(sum(sizes), dtype=torch.bfloat16, device=device).split(sizes)
        self.tensors = {
            entry.name: part.view(entry.shape) for entry, part in zip(entries, parts, strict=True)
        }

    def weight_slots(self) -> dict[str, WeightSlot]:
        return {name: WeightSlot.plain(tensor) for name, tensor in self.tensors.items()}


def write(folder: Path, rank: Rank, num_files: int) -> int:
    """Everything the rank holds, in files as a release has them, a few at once; returns the bytes."""
    names = list(rank.tensors)
    share = -(-len(names) // num_files)
    parts = {
        f"model-{number + 1:05d}-of-{num_files:05d}.safetensors": names[first : first + share]
        for number, first in enumerate(range(0, len(names), share))
    }

    def save_part(file: str) -> None:
        save_file({name: rank.tensors[name].cpu() for name in parts[file]}, folder / file)

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(save_part, parts))
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(tensor.nbytes for tensor in rank.tensors.values())


def read_threaded(folder: Path, rank: Rank, device: torch.device, num_threads: int) -> None:
    stored = read_headers(folder)
    slots = rank.weight_slots()
    sources = [SlotSource(slot, [stored[name]]) for name, slot in slots.items()]
    fill_slots(sources, device, num_threads=num_threads)


def read_mapped(folder: Path, rank: Rank) -> None:
    """One thread, a tensor at a time out of the mapped file."""
    stored = read_headers(folder)
    for file in sorted({stored[name].file for name in rank.tensors}):
        with safe_open(file, framework="pt") as content:
            for name, tensor in rank.tensors.items():
                if stored[name].file == file:
                    tensor.copy_(content.get_tensor(name))
    torch.cuda.synchronize()


def speed(call: Callable[[], None], num_bytes: int, repeats: int = 3) -> dict[str, float]:
    """Median seconds of some calls, and GB/s."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    taken = statistics.median(times)
    return {"bytes": num_bytes, "s": round(taken, 3), "gb_s": round(num_bytes / taken / 1e9, 2)}


def measure_reading(config: ModelConfig, folder: Path, device: torch.device) -> dict:
    """All of the checkpoint by some numbers of threads, and out of the mapped file."""
    rank = Rank(config, 1, device)
    for tensor in rank.tensors.values():
        tensor.normal_()
    started = time.perf_counter()
    num_bytes = write(folder, rank, NUM_FILES)
    found: dict = {"write_s": round(time.perf_counter() - started, 1)}
    kept = {name: rank.tensors[name].clone() for name in list(rank.tensors)[::40]}
    for tensor in rank.tensors.values():
        tensor.zero_()
    for threads in (1, 2, 4, 8):
        call = partial(read_threaded, folder, rank, device, threads)
        found[f"threads_{threads}"] = speed(call, num_bytes)
    assert all(torch.equal(rank.tensors[name], tensor) for name, tensor in kept.items())
    found["mapped"] = speed(partial(read_mapped, folder, rank), num_bytes, repeats=1)
    return found


def measure_part(config: ModelConfig, folder: Path, device: torch.device) -> dict:
    """What one of four ranks reads of it."""
    rank = Rank(config, 4, device)
    num_bytes = sum(tensor.nbytes for tensor in rank.tensors.values())
    return speed(partial(read_threaded, folder, rank, device, 8), num_bytes)


def measure_drawing(config: ModelConfig, device: torch.device) -> dict:
    """Random weights of all layers."""
    rank = Rank(config, 1, device)
    num_bytes = sum(tensor.nbytes for tensor in rank.tensors.values())
    where = {"config": config, "expert_map": rank.expert_map, "rank": 0, "device": device}
    return speed(partial(draw_weights, rank, **where), num_bytes, repeats=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=6, help="layers of the written checkpoint")
    parser.add_argument(
        "--folder", default=None, help="where to write it; default: the temporary folder"
    )
    add_options(parser, drawn=False)
    args = parser.parse_args()
    need_gpus(1)
    device = torch.device("cuda", torch.cuda.current_device())
    config = load_model_config(MODEL)
    result = {
        **origin(1, args.commit),
        "layers": args.layers,
        "drawing": measure_drawing(config, device),
    }
    torch.cuda.empty_cache()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        smaller = replace(config, layers=config.layers[: args.layers])
        result["reading"] = measure_reading(smaller, Path(folder), device)
        torch.cuda.empty_cache()
        result["one_rank_of_four"] = measure_part(smaller, Path(folder), device)
    save(args.out, result)
    print(args.out.with_suffix(".json").read_text())


if __name__ == "__main__":
    main()
