"""What CUDA graphs will take, from the few that are captured to see it; a device of counters stands in for a GPU."""

from types import SimpleNamespace

import pytest

from workers import kv_sizing
from workers.graph_sizes import GraphSizes
from workers.step_sync import GraphMode

POOL, WHOLE, SLICED, OTHERS = 1000, 10, 30, 7


class FakeGraphs:
    """The first capture fills the pool; decodes of eight rows and prompts of more have two forms each."""

    def __init__(self, device):
        self.device, self.captured, self.closed = device, [], False
        self.device.used += OTHERS

    def count(self, keys):
        return sum(
            1 + (k.mode == GraphMode.MIXED or (k.rows >= 8 and not k.microbatch)) for k in keys
        )

    def capture(self, keys):
        before = self.device.used
        for key in keys:
            self.device.used += self.count([key]) * (SLICED if key.microbatch else WHOLE)
            self.device.used += 0 if self.captured else POOL
            self.captured.append(key)
        return self.device.used - before

    def close(self):
        self.closed = True


@pytest.mark.parametrize("num_slices", [0, 2, 3])
def test_all_forms_of_all_sizes_are_counted(monkeypatch, num_slices):
    device = SimpleNamespace(used=500)
    made = []

    def make_graphs(sizes):
        made.append(FakeGraphs(device))
        return made[0]

    cuda = SimpleNamespace(
        empty_cache=lambda: None, mem_get_info=lambda: (10**6 - device.used, 10**6)
    )
    monkeypatch.setattr(kv_sizing, "torch", SimpleNamespace(cuda=cuda))
    microbatches = SimpleNamespace(num_slices=num_slices) if num_slices else None
    runner = SimpleNamespace(make_graphs=make_graphs, microbatches=microbatches)
    found = kv_sizing.graph_bytes(runner, GraphSizes((1, 2, 8), (16, 64)))
    assert made[0].closed
    captured = made[0].captured
    assert captured[0].rows == 64 and len(captured) == 2 + bool(num_slices)
    largest = OTHERS + POOL + 2 * WHOLE + (2 * SLICED if num_slices else 0)
    # Eight graphs of whole steps, all but the decodes of one and two rows in two forms, and seven of slices.
    others = 8 - 1 + num_slices * 7
    assert found == int(1.1 * (largest + others * WHOLE))


def test_no_graphs_take_nothing():
    assert kv_sizing.graph_bytes(SimpleNamespace(), GraphSizes()) == 0
