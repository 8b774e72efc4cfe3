"""Times decode steps of one rank on one GPU: eager, replayed from graphs, and launched ahead, against the floor.

    python scripts/bench_gpu_steps.py --experts 128 --experts 32 --output steps.json

Qwen3-30B-A3B's shapes with random weights and uniform routing; 32 experts are what one of four ranks holds. The same
sequences decode on in every mode, each of which is timed for some steps. Also written: where the host's time goes, and
how long the device is idle between the first and the last kernel of some profiled steps.
"""

import argparse
import cProfile
import json
import pstats
import random
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from workers.config import RankConfig
from workers.engine import Engine
from workers.exchange import LocalExchange
from workers.host_copy import HostCopies
from workers.rank import Rank
from workers.rank_info import Rendezvous
from workers.request import EngineRequest, SamplingParams
from workers.step_sync import PlanConfig

MODEL = Path(__file__).parents[1] / "configs" / "models" / "qwen3-30b-a3b"
MEMORY_BYTES_PER_S = 4.0e12
MODES = {  # graphs, asynchronous
    "eager": (False, False),
    "eager, ahead": (False, True),
    "graph": (True, False),
    "graph, ahead": (True, True),
}


class Waits:
    """Seconds that the host waited for the device's results."""

    def __init__(self) -> None:
        self.seconds = 0.0
        wait = HostCopies.wait

        def timed(copies: HostCopies) -> None:
            started = time.perf_counter()
            wait(copies)
            self.seconds += time.perf_counter() - started

        HostCopies.wait = timed


def start_rank(folder: Path, num_experts: int, num_seqs: int) -> tuple[Rank, dict[str, float]]:
    """One rank with random weights, and the seconds of its stages."""
    shutil.copytree(MODEL, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_experts": num_experts}))
    settings = RankConfig(
        model={
            "path": str(folder),
            "dtype": "bfloat16",
            "max_model_len": 4096,
            "weights": "dummy",
            "routing": {"kind": "uniform"},
        },
        scheduler={"max_num_seqs": num_seqs, "max_num_batched_tokens": 8192},
        cache={"prefix_caching": False},
        kernels={},
        overlap={"mode": "off"},
        num_ranks=1,
        device="cuda",
        threads=4,
        exchange_timeout_s=30,
    )
    rank, seconds = Rank(0, settings), {}
    rank.join_group(Rendezvous("", 0, "alone"), 30)
    for stage in (rank.load, rank.compile_kernels, rank.size_cache, rank.capture_graphs):
        started = time.perf_counter()
        stage()
        torch.cuda.synchronize()
        seconds[stage.__name__] = round(time.perf_counter() - started, 1)
    return rank, seconds


def engine_of(rank: Rank, graphs: bool, asynchronous: bool, before: Engine | None) -> Engine:
    """Another engine over the same sequences."""
    if before is not None:
        before._commit(0)
        before._publish_and_record()
    runner, scheduler = rank._sized
    engine = Engine(
        scheduler,
        runner,
        LocalExchange(),
        PlanConfig(equal_tokens=False),
        epoch=0,
        publish=lambda ingress_id, outputs: None,
        wake_peers=lambda step: None,
        asynchronous=asynchronous,
        graph_sizes=rank._graph_sizes if graphs else None,
    )
    if before is not None:
        engine.open_requests = before.open_requests
    return engine


def fill(engine: Engine, num_seqs: int, chance: random.Random) -> float:
    """Prefill prompts of 1,024 to 1,900 tokens, beside the first decodes; their tokens per second."""
    total = 0
    for index in range(num_seqs):
        prompt = [chance.randrange(150_000) for _ in range(chance.randint(1024, 1900))]
        total += len(prompt)
        params = SamplingParams(max_tokens=2000, temperature=0.0)
        engine.submit(
            EngineRequest(
                request_id=str(index), ingress_id="i", prompt_token_ids=prompt, params=params
            )
        )
    started = time.perf_counter()
    engine.step()
    while engine.scheduler.waiting or any(
        not seq.num_output_tokens for seq in engine.scheduler.running
    ):
        engine.step()
    torch.cuda.synchronize()
    return total / (time.perf_counter() - started)


def time_steps(engine: Engine, waits: Waits, steps: int) -> dict[str, Any]:
    """Milliseconds of a step: by the wall, of the host when it does not wait, and by part."""
    for _ in range(5):
        engine.step()
    torch.cuda.synchronize()
    before, waited = engine.stats.snapshot(), waits.seconds
    started = time.perf_counter()
    for _ in range(steps):
        engine.step()
    wall = time.perf_counter() - started
    after = engine.stats.snapshot()
    parts = {
        name: round(1e3 * (after["step_seconds"][name] - seconds) / steps, 3)
        for name, seconds in before["step_seconds"].items()
    }
    host = wall - (waits.seconds - waited)
    return {
        "step_ms": round(1e3 * wall / steps, 3),
        "host_ms": round(1e3 * host / steps, 3),
        "parts_ms": parts,
    }


def profile_steps(engine: Engine, steps: int) -> dict[str, Any]:
    """What the device did in some steps."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    spans, by_name = [], {}
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            spans.append((event.time_range.start, event.time_range.end))
            by_name.setdefault(event.name[:60], []).append(event.time_range.elapsed_us())
    spans.sort()
    busy, end, gaps = 0.0, spans[0][0], []
    for start, stop in spans:
        if start > end:
            gaps.append(start - end)
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    window = end - spans[0][0]
    top = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:14]
    return {
        "window_ms": round(window / steps / 1e3, 3),
        "idle_ms": round((window - busy) / steps / 1e3, 3),
        "longest_gaps_us": [round(gap, 1) for gap in sorted(gaps)[-steps:]],
        "kernels_ms": {name: round(sum(us) / steps / 1e3, 3) for name, us in top},
        "launches": round(len(spans) / steps),
    }


def host_profile(engine: Engine, steps: int) -> dict[str, float]:
    """Milliseconds of a step by function, those that take most by themselves."""
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        engine.step()
    profiler.disable()
    rows = pstats.Stats(profiler).stats.items()
    top = sorted(rows, key=lambda row: -row[1][2])[:20]
    return {
        f"{Path(file).name}:{line} {name}": round(1e3 * values[2] / steps, 4)
        for (file, line, name), values in top
    }


def floor_ms(rank: Rank) -> dict[str, float]:
    """Reading all weights but the embedding, and all K and V, once."""
    model = rank.model_config
    weights = rank._weight_bytes() - model.vocab_size * model.hidden_size * 2
    tokens = sum(seq.num_computed for seq in rank._sized[1].running)
    kv = tokens * 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * 2
    return {
        "weights": round(1e3 * weights / MEMORY_BYTES_PER_S, 3),
        "kv": round(1e3 * kv / MEMORY_BYTES_PER_S, 3),
        "context": round(tokens / max(1, len(rank._sized[1].running))),
    }


def measure(num_experts: int, num_seqs: int, steps: int, waits: Waits) -> dict[str, Any]:
    """All modes with one model."""
    with tempfile.TemporaryDirectory() as folder:
        rank, stages = start_rank(Path(folder), num_experts, num_seqs)
        found: dict[str, Any] = {"experts": num_experts, "decodes": num_seqs, "stages_s": stages}
        found["kv_blocks"] = rank._sized[1].pool.num_blocks
        found["graphs"] = {"sizes": str(rank._graph_sizes), "bytes": rank._graph_bytes}
        engine = engine_of(rank, True, True, None)
        found["prefill_tokens_per_s"] = round(fill(engine, num_seqs, random.Random(0)))
        found["modes"] = {}
        for name, (graphs, asynchronous) in MODES.items():
            engine = engine_of(rank, graphs, asynchronous, engine)
            found["modes"][name] = time_steps(engine, waits, steps)
            found["modes"][name]["device"] = profile_steps(engine, 6)
            print(num_experts, name, json.dumps(found["modes"][name]), flush=True)
        found["floor_ms"] = floor_ms(rank)
        found["host_ms_by_function"] = host_profile(engine, 50)
        free, total = torch.cuda.mem_get_info()
        found["free_gb"], found["total_gb"] = round(free / 1e9, 1), round(total / 1e9, 1)
        rank.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--experts", type=int, action="append", required=True)
    parser.add_argument("--decodes", type=int, default=128)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    waits = Waits()
    found = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "runs": [
            measure(experts, arguments.decodes, arguments.steps, waits)
            for experts in arguments.experts
        ],
    }
    arguments.output.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
