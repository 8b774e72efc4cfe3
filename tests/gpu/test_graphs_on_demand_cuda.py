"""Graphs after a rebuild on GPUs: captured once each, in steps or while the ranks idle, with tokens of float32."""

import gc
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.backends.select import probe
from tests.devices import need_gpus, take_gpu
from tests.distributed.engine_harness import Event
from tests.gpu.pools import Pools
from tests.gpu.test_cuda_graphs import Answers, check_answers, checkpoint, configure, traffic
from workers.config import RankConfig
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.process_group import local_rendezvous
from workers.rank.rank_info import GRAPHS, Rendezvous, start_stages
from workers.runner.graph_sizes import GraphKey

MISSING = probe("cuda").get("attention.flashinfer") if torch.cuda.is_available() else "needs a GPU"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(MISSING is not None, reason=str(MISSING))]

__all__ = ["checkpoint"]  # a fixture

IDLE_S = 60.0
DEVICE_BOUND = 64 << 20  # bytes: the allocators' noise


@dataclass
class Life(Answers):
    """One rank in an epoch that captured all graphs at its start, and in the epoch of a rebuild.

    at_start       keys after the start, of each epoch
    in_steps       captures of the second epoch's steps
    while_idle     captures of the second epoch's idle ranks
    device_bytes   of the GPU in use at the end of each epoch, with all graphs. Memory that torch keeps free does not
                   count: a workspace of cuBLAS may lie in a segment that a larger tensor has left
    stage_s        seconds of the stage of graphs, of each epoch
    """

    at_start: list[set[GraphKey]] = field(default_factory=list)
    in_steps: Counter[Any] = field(default_factory=Counter)
    while_idle: Counter[Any] = field(default_factory=Counter)
    device_bytes: list[int] = field(default_factory=list)
    stage_s: list[float] = field(default_factory=list)


def live_twice(
    rank: int,
    _num_ranks: int,
    _info: Any,
    config: RankConfig,
    rendezvous: Rendezvous,
    events: list[Event],
) -> Life:
    """Serve half of the events in a first epoch and the other half in the epoch of a rebuild."""
    take_gpu(rank)
    life, process = Life(), RankProcess(rank, config)
    try:
        for number in range(2):
            name = f"{rendezvous.name}-{number}"
            epoch = Epoch(process, replace(rendezvous, name=name, epoch=number), 60)
            for stage in start_stages(config.device):
                epoch.run_stage(stage, lambda done, total: None)
            epoch.start_engine(life.publish, lambda step: None)
            graphs = epoch.runner.graphs
            assert graphs is not None
            life.at_start.append(graphs.captured())
            captures = count_captures(graphs)
            serve(epoch, [event for event in events if event.rank == rank][number::2])
            if number:
                life.in_steps += captures
                captures.clear()
                idle(epoch)
                life.while_idle += captures
            else:
                assert not captures
            assert graphs.num_postponed == 0
            gc.collect()
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info()
            kept_free = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
            life.device_bytes.append(total - free - kept_free)
            life.stage_s.append(epoch.seconds[GRAPHS])
            epoch.close()
    finally:
        process.close()
    return life


def count_captures(graphs: Any) -> Counter[Any]:
    found: Counter[Any] = Counter()
    capture = graphs._capture

    def counted(key: GraphKey, form: Any, *, run: bool) -> Any:
        found[key, form] += 1
        return capture(key, form, run=run)

    graphs._capture = counted
    return found


def serve(epoch: Epoch, events: list[Event]) -> None:
    """Step until all requests have ended, without the captures of idle ranks."""
    for event in events:
        assert event.request is not None
        epoch.engine.submit(event.request)
    while epoch.engine.step().run:
        pass


def idle(epoch: Epoch) -> None:
    """Run the loop without requests until no graph is missing."""
    graphs: Any = epoch.runner.graphs
    deadline = time.monotonic() + IDLE_S

    def stop() -> None:
        while graphs._postponed and time.monotonic() < deadline:
            time.sleep(0.01)
        epoch.engine.stop()

    stopping = threading.Thread(target=stop)
    stopping.start()
    epoch.run()
    stopping.join()
    assert not graphs._postponed


@pytest.mark.parametrize(
    ("num_ranks", "all2all", "overlap"),
    [(1, "local", "off"), (2, "copy_engine", "on"), (2, "allgather", "off")],
)
def test_graphs_of_a_rebuild(
    pools: Pools, checkpoint: Path, num_ranks: int, all2all: str, overlap: str
):
    need_gpus(num_ranks)
    # More sequences than there are, so that no step wants the graphs of the most decodes.
    config = configure(checkpoint, num_ranks, all2all, overlap, max_num_seqs=64)
    events = [event for event in traffic(random.Random(3), 80, num_ranks) if event.request]
    with local_rendezvous() as rendezvous:
        lives = pools.run(
            live_twice,
            num_ranks,
            config,
            rendezvous,
            events,
            with_group=False,
            timeout_s=150,
        )
    check_answers(checkpoint, events, lives)
    for life in lives:
        print(f"graphs: {life.stage_s[0]:.2f} s at the start, {life.stage_s[1]:.2f} s in a rebuild")
        print(f"{len(life.in_steps)} in steps, {len(life.while_idle)} while idle")
        all_keys, first = life.at_start
        captured = life.in_steps + life.while_idle
        assert set(captured.values()) == {1}, "each graph is captured once"
        assert life.in_steps and life.while_idle
        assert {key for key, _ in captured} == all_keys - first
        modes = {(key.mode, key.ubatch) for key in all_keys}
        assert len(first) == len(modes) < len(all_keys)
        assert life.device_bytes[1] - life.device_bytes[0] < DEVICE_BOUND, life.device_bytes
    assert len({tuple(life.in_steps) for life in lives}) == 1, "ranks capture in one order"
