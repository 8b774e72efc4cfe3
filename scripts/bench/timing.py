"""Times calls that belong together: as CUDA graphs where that is possible, in turns, the slowest rank's median."""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

Run = Callable[[], object]
WARM_UPS = 2


def add_layer_options(
    parser: argparse.ArgumentParser, *, tokens: Sequence[int], rounds: int
) -> None:
    """One MoE layer, by default Qwen3-30B-A3B's, and how often it is timed."""
    parser.add_argument("--tokens", nargs="+", type=int, default=tokens, help="of each rank")
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=rounds, help="runs whose median counts")


def parse_layer_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """All options, with `dtype` for the device; tokens in order."""
    args = parser.parse_args()
    args.tokens = sorted(set(args.tokens))
    args.dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    return args


def repeated(call: Callable[[int], object], times: int, *, graph: bool) -> Run:
    """`call(0)` to `call(times - 1)` in a row, run once to compile what it needs, then a CUDA graph if asked for."""

    def calls() -> None:
        for index in range(times):
            call(index)

    calls()
    if not graph:
        return calls
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, capture_error_mode="thread_local"):
        calls()
    return captured.replay


def alternate(
    runs: dict[str, Run], rounds: int, times: int, device: torch.device, digits: int = 1
) -> dict[str, float]:
    """Name to median microseconds of one of a run's `times` calls; the runs take turns, because clocks drift.

    Of several ranks all must call this with the same names; the slowest one's median counts.
    """
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(WARM_UPS + rounds):
        for name, run in runs.items():
            found[name].append(_seconds(run, device) * 1e6 / times)
    medians = [statistics.median(seconds[WARM_UPS:]) for seconds in found.values()]
    slowest = torch.tensor(medians, device=device)
    if dist.is_initialized():
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return dict(zip(found, (round(us, digits) for us in slowest.tolist()), strict=True))


def _seconds(run: Run, device: torch.device) -> float:
    """Of one run, from when all ranks are there."""
    together = torch.zeros(1, device=device)
    if device.type == "cpu":
        if dist.is_initialized():
            dist.all_reduce(together)
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin
    torch.cuda.synchronize()
    if dist.is_initialized():
        dist.all_reduce(together)  # on the device: its streams start together, not its hosts
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
