"""Ubatches on streams of their own compute side by side, see what earlier ones wrote, and end before the step does."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.pending import Pending, wait_previous_ubatch
from workers.ubatch.wrapper import UBatchWrapper, alternate, forked

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LAYERS, CYCLES = 5, 10_000_000  # some 6 ms of one SM


def in_ubatches(tasks: list[Callable[[], None]]) -> None:
    streams = [torch.cuda.current_stream(), *(torch.cuda.Stream() for _ in tasks[1:])]
    with forked(streams[1:]):
        alternate(tasks, torch.device("cuda", torch.cuda.current_device()), streams)


def captured(run: Callable[[], None]) -> Callable[[], None]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def milliseconds(run: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


@pytest.mark.parametrize("graph", [False, True])
def test_ubatches_compute_side_by_side(graph: bool):
    def sleep() -> None:
        torch.cuda._sleep(CYCLES)
        Pending(lambda: None).wait()
        torch.cuda._sleep(CYCLES)

    def run() -> None:
        in_ubatches([sleep] * 3)

    run = captured(run) if graph else run
    milliseconds(run)  # streams are made when they are first used
    assert milliseconds(run) < 1.5 * milliseconds(sleep), "one after the other would be 3"


def test_a_ubatch_reads_what_earlier_ones_have_written():
    """Each waits for a long time before it writes; the next one reads all that was written before it."""
    cache_LS = torch.zeros(LAYERS, 3, device="cuda")
    found_LS = torch.zeros(LAYERS, 3, device="cuda")

    def ubatch_of(index: int) -> Callable[[], None]:
        def run() -> None:
            for layer in range(LAYERS):
                torch.cuda._sleep(CYCLES // (1 + 4 * index))
                cache_LS[layer, index].fill_(1)
                wait_previous_ubatch()
                found_LS[layer, index] = cache_LS[layer, : index + 1].sum()
                Pending(lambda: None).wait()

        return run

    def run() -> None:
        cache_LS.zero_()
        in_ubatches([ubatch_of(index) for index in range(3)])

    captured(run)()
    assert found_LS.tolist() == [[1, 2, 3]] * LAYERS


class Slow:
    """Gives its rows back after a long time."""

    def with_backends(self, backends: Any) -> "Slow":
        return self

    def forward(self, part: Any) -> torch.Tensor:
        torch.cuda._sleep(CYCLES)
        Pending(lambda: None).wait()
        torch.cuda._sleep(CYCLES)
        return part.input_ids * 2


@pytest.mark.parametrize("graph", [False, True])
def test_what_ubatches_computed_is_there_when_the_step_goes_on(graph: bool):
    device = torch.device("cuda", torch.cuda.current_device())
    ids = torch.zeros(30, dtype=torch.int64, device=device)
    batch = SimpleNamespace(
        input_ids=ids,
        num_rows=len(ids),
        ubatch=lambda start, end: SimpleNamespace(input_ids=ids[start:end]),
    )
    exchange = SimpleNamespace(stream=None)
    backends: list[Any] = [
        SimpleNamespace(stream=stream, all2all=exchange)
        for stream in (None, torch.cuda.Stream(), torch.cuda.Stream())
    ]
    wrapper = UBatchWrapper(Slow(), backends)
    wrapper._planned_rows = len(ids)
    found = torch.empty_like(ids)

    def run() -> None:
        found.copy_(wrapper.forward(batch))

    again = captured(run) if graph else run
    ids.copy_(torch.arange(30))
    again()
    assert found.tolist() == list(range(0, 60, 2))
