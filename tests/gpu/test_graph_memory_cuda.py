"""Bytes of CUDA graphs as a rank counts them, while another process takes memory of the same GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.backends.select import probe
from tests.devices import take_gpu
from tests.gpu.test_cuda_graphs import checkpoint, configure
from tests.gpu.test_memory_cuda import GIB, MIB
from workers.rank.epoch import Epoch
from workers.rank.kv_sizing import graph_bytes
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous
from workers.runner.cuda_graphs import StepGraphs
from workers.runner.graph_sizes import GraphSizes
from workers.runner.model_runner import ModelRunner

MISSING = probe("cuda").get("attention.flashinfer") if torch.cuda.is_available() else "needs a GPU"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

__all__ = ["checkpoint"]  # a fixture

TAKEN = GIB  # by the other process, at each call
# What captures may reserve more or less than those before: cuBLAS' workspaces, which a pool keeps.
NOISE = 128 * MIB


def take_when_called(pipe: Connection) -> None:
    """Take TAKEN bytes more at each message, in a process of its own, until the pipe closes."""
    take_gpu(0)
    torch.zeros(1, device="cuda")
    pipe.send("ready")
    taken = []
    while True:
        try:
            pipe.recv()
        except EOFError:
            return
        taken.append(torch.zeros(TAKEN, dtype=torch.uint8, device="cuda"))
        torch.cuda.synchronize()
        pipe.send(len(taken))


@contextmanager
def neighbour() -> Iterator[Callable[[], int]]:
    """Yield a function that has another process take TAKEN bytes, and returns how often it did."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=take_when_called, args=(there,))
    process.start()
    there.close()
    try:
        assert here.recv() == "ready"

        def take() -> int:
            here.send("take")
            return int(here.recv())

        yield take
    finally:
        here.close()
        process.join()


def counted(runner: ModelRunner, sizes: GraphSizes) -> tuple[int, int]:
    """Return the bytes that size the KV cache, and those that a start reports for its largest graph."""
    runner.graphs = None
    of_all = graph_bytes(runner, sizes)
    runner.graphs = None
    graphs = runner.make_graphs(sizes)
    of_largest = graphs.capture([max(sizes.whole_steps(), key=lambda key: key.rows)])
    graphs.close()
    return of_all, of_largest


def test_memory_of_another_process_is_not_counted(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_gpu(0)
    epoch = Epoch(RankProcess(0, configure(checkpoint)), Rendezvous("", 0, "alone"), 30)
    try:
        epoch.load()
        epoch.start_engine(lambda ingress, outputs: None, lambda step: None)
        runner, sizes = epoch.runner, epoch.graph_sizes
        assert sizes
        runner.close()
        alone = counted(runner, sizes)
        capture_all, times = StepGraphs._capture_all, []
        with neighbour() as take:

            def capture_in_a_crowd(*args: Any, **options: Any) -> None:
                times.append(take())
                capture_all(*args, **options)

            monkeypatch.setattr(StepGraphs, "_capture_all", capture_in_a_crowd)
            free, _ = torch.cuda.mem_get_info()
            crowded = counted(runner, sizes)
            left, _ = torch.cuda.mem_get_info()
        assert times == [1, 2, 3], "graph_bytes captures twice"
        assert free - left > 2 * TAKEN, "the device's free memory shows the other process"
        print(f"bytes of graphs: {alone} alone, {crowded} beside another process")
        assert all(found > 0 for found in alone)
        for found, expected in zip(crowded, alone, strict=True):
            assert abs(found - expected) < NOISE
    finally:
        epoch.process.close()
