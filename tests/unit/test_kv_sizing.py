"""What a rank takes and what that leaves for the KV cache; a device of counters stands in for a GPU."""

from types import SimpleNamespace

import pytest
import torch

from cluster.config.errors import ConfigError
from cluster.config.load import load_config
from cluster.config.resolve import resolve_rank_config
from tests.checkpoints.writer import make_checkpoint
from workers.config import CacheConfig
from workers.kv_cache.demand import KVDemand, sizes_that_fit
from workers.rank import kv_sizing
from workers.rank.kv_sizing import OwnBytes, check_longest_request_fits, free_bytes
from workers.runner.graph_sizes import GraphSizes
from workers.step.step_sync import GraphMode

POOL, WHOLE, UBATCHED, BUFFERS = 1000, 10, 30, 7


class FakeGraphs:
    """The first capture fills the pool; decodes of eight rows and prompts of more have two forms each."""

    def __init__(self, device):
        self.device, self.captured, self.closed = device, [], False
        self.device.reserved += BUFFERS

    def count(self, keys):
        return sum(1 + (k.mode == GraphMode.MIXED or (k.rows >= 8 and not k.ubatch)) for k in keys)

    def capture(self, keys):
        before = self.device.reserved
        for key in keys:
            self.device.reserved += self.count([key]) * (UBATCHED if key.ubatch else WHOLE)
            self.device.reserved += 0 if self.captured else POOL
            self.captured.append(key)
        return self.device.reserved - before

    def close(self):
        self.closed = True


@pytest.mark.parametrize("num_ubatches", [0, 2, 3])
def test_all_forms_of_all_sizes_are_counted(monkeypatch, num_ubatches):
    """The device's free memory is not read: it would count other processes."""
    device = SimpleNamespace(reserved=500, cached=90)
    made = []

    def make_graphs(sizes):
        made.append(FakeGraphs(device))
        return made[0]

    def empty_cache():
        device.cached = 0

    cuda = SimpleNamespace(
        empty_cache=empty_cache,
        memory_reserved=lambda: device.reserved + device.cached,
        mem_get_info=lambda: pytest.fail("counts other processes"),
    )
    monkeypatch.setattr(kv_sizing, "torch", SimpleNamespace(cuda=cuda))
    ubatches = SimpleNamespace(num_ubatches=num_ubatches) if num_ubatches else None
    runner = SimpleNamespace(make_graphs=make_graphs, ubatches=ubatches)
    found = kv_sizing.graph_bytes(runner, GraphSizes((1, 2, 8), (16, 64)))
    assert made[0].closed
    captured = made[0].captured
    assert captured[0].rows == 64 and len(captured) == 2 + bool(num_ubatches)
    largest = BUFFERS + POOL + 2 * WHOLE + (2 * UBATCHED if num_ubatches else 0)
    # Eight graphs of whole steps, all but the decodes of one and two rows in two forms, and seven of ubatches.
    others = 8 - 1 + num_ubatches * 7
    assert found == int(1.1 * (largest + others * WHOLE))


class AdapterGraphs(FakeGraphs):
    """Graphs with adapters need temporaries that the pool lacks until the first of them is captured."""

    TEMPORARIES = 400

    def capture(self, keys):
        before = self.device.reserved
        for key in keys:
            if key.adapters and not any(done.adapters for done in self.captured):
                self.device.reserved += self.TEMPORARIES
            super().capture([key])
        return self.device.reserved - before


def test_temporaries_of_adapters_are_counted_once(monkeypatch):
    device, made = SimpleNamespace(reserved=500), []
    cuda = SimpleNamespace(empty_cache=lambda: None, memory_reserved=lambda: device.reserved)
    monkeypatch.setattr(kv_sizing, "torch", SimpleNamespace(cuda=cuda))

    def make_graphs(sizes):
        made.append(AdapterGraphs(device))
        return made[0]

    runner = SimpleNamespace(make_graphs=make_graphs, ubatches=None)
    sizes = GraphSizes((1, 2, 8), (16, 64), adapters=True)
    found = kv_sizing.graph_bytes(runner, sizes)
    captured = [(key.rows, key.adapters) for key in made[0].captured]
    assert captured == [(64, True), (64, False), (16, True), (16, False)]
    largest = BUFFERS + POOL + AdapterGraphs.TEMPORARIES + 4 * WHOLE
    # Sixteen graphs, of which two keys of the largest size were captured first.
    assert found == int(1.1 * (largest + 15 * WHOLE))


@pytest.mark.parametrize("each", [0, -5])
def test_graphs_within_the_memory_of_the_largest_add_nothing(monkeypatch, each):
    """A capture may also free more of torch's memory than it takes."""
    device = SimpleNamespace(reserved=500)

    class Within(FakeGraphs):
        def capture(self, keys):
            super().capture(keys)
            if len(self.captured) == 1:
                return 0
            device.reserved += each - WHOLE * self.count(keys)
            return each

    cuda = SimpleNamespace(empty_cache=lambda: None, memory_reserved=lambda: device.reserved)
    monkeypatch.setattr(kv_sizing, "torch", SimpleNamespace(cuda=cuda))
    runner = SimpleNamespace(make_graphs=lambda sizes: Within(device), ubatches=None)
    found = kv_sizing.graph_bytes(runner, GraphSizes((1, 2, 8), (16, 64)))
    assert found == int(1.1 * (BUFFERS + POOL + 2 * WHOLE))


def test_no_graphs_take_nothing():
    assert kv_sizing.graph_bytes(SimpleNamespace(), GraphSizes()) == 0


GB = 10**9
OWN = OwnBytes(weights=60 * GB, steps=12 * GB, graphs=3 * GB)


def on_gpu(monkeypatch, **counters):
    cuda = SimpleNamespace(
        **{name: lambda *_, found=found: found for name, found in counters.items()}
    )
    monkeypatch.setattr(kv_sizing, "torch", SimpleNamespace(cuda=cuda))


@pytest.mark.parametrize(
    ("free", "reserved", "fraction", "own", "blocks"),
    [
        (100, 0, 0.9, 50, 40),
        (30, 70, 0.9, 50, 40),  # all that is taken is ours
        (80, 0, 0.9, 50, 20),  # others' 20 count, whoever asks
        (10, 70, 0.9, 50, 20),
        (100, 0, 0.5, 50, 0),
        (100, 0, 0.5, 80, -30),
    ],
)
def test_what_is_left_for_blocks(monkeypatch, free, reserved, fraction, own, blocks):
    device = torch.device("cuda")
    memory = {"mem_get_info": (free * GB, 100 * GB), "memory_reserved": reserved * GB}
    on_gpu(monkeypatch, empty_cache=None, **memory)
    assert free_bytes(device, fraction, own * GB) == blocks * GB


SLOT, BLOCK = 30 * (2 * 2**20 + 3 * 8192 * 2), 16 * 10 * 2 * 2 * 256 * 2  # of Qwen3.6-35B-A3B


def split(free: int, **settings: int) -> tuple[int, int]:
    """Blocks and snapshots where a request has up to 32,768 tokens, 4,096 of them usually."""
    sizes = {"block_bytes": BLOCK, "slot_bytes": SLOT, "num_rows": 256}
    return sizes_that_fit(free, CacheConfig(**settings), KVDemand(16), 32768, **sizes)


@pytest.mark.parametrize(
    ("free", "snapshots"),
    [(80 * GB, 394), (60 * GB, 259), (20 * GB, 16), (BLOCK * 2048 + 3 * SLOT, 3), (GB // 2, 0)],
)
def test_memory_is_split_by_the_length_of_a_usual_request(free, snapshots):
    """Each request has a state, the usual one of 4,096 tokens 84 MB of K and V beside 64 MB of states."""
    blocks, found = split(free)
    assert found == snapshots
    assert 0 <= free - blocks * BLOCK - found * SLOT < BLOCK
    if found > 16:
        requests = 256 + found
        assert requests * 256 <= blocks < (requests + 1) * 256 + SLOT // BLOCK + 1
    longer, fewer = split(free, expected_tokens=32768)
    assert fewer <= found and longer >= blocks


@pytest.mark.parametrize(
    ("snapshots", "block_bytes", "slot_bytes", "expected"),
    [
        ("auto", BLOCK, 0, (10 * GB // BLOCK, 0)),
        (7, BLOCK, SLOT, (10 * GB // BLOCK, 7)),  # configured snapshots lie beside
        ("auto", 0, SLOT, (8 * 2048, 16)),
        (7, 0, SLOT, (8 * 2048, 7)),
    ],
)
def test_models_without_states_or_without_blocks(snapshots, block_bytes, slot_bytes, expected):
    found = sizes_that_fit(
        10 * GB,
        CacheConfig(state_snapshots=snapshots),
        KVDemand(16),
        32768,
        block_bytes=block_bytes,
        slot_bytes=slot_bytes,
        num_rows=8,
    )
    assert found == expected


def test_states_that_leave_no_room_are_named(tmp_path):
    folder = make_checkpoint(tmp_path / "hybrid", family="qwen3_next", num_layers=4)
    settings = {"model": {"path": str(folder)}, "cache": {"state_snapshots": 10**8}}
    config = load_config({**settings, "cluster": {"device": "cpu"}})
    with pytest.raises(ConfigError, match=r"GiB of states; .* less of cache\.state_snapshots"):
        resolve_rank_config(config)


def test_weights_steps_and_graphs_are_told_apart(monkeypatch):
    ran = []
    steps = SimpleNamespace(
        sample=lambda *args: ran.append("sample"),
        prefill=lambda runner, scheduler, size: ran.append(size),
        limits=SimpleNamespace(max_num_batched_tokens=64),
    )
    on_gpu(monkeypatch, reset_peak_memory_stats=None, max_memory_allocated=74 * GB)
    monkeypatch.setattr(kv_sizing, "graph_bytes", lambda runner, sizes: 3 * GB)
    found = kv_sizing.own_bytes(
        steps, None, None, GraphSizes(), weight_bytes=60 * GB, kv_bytes=2 * GB
    )
    assert found == OWN and found.total == 75 * GB and ran == ["sample", 64]
    sizes = {"weight_bytes": 60 * GB, "kv_bytes": 2 * GB, "state_bytes": 5 * GB}
    found = kv_sizing.own_bytes(steps, None, None, GraphSizes(), **sizes)
    assert found.states == 5 * GB and found.total == 75 * GB, "states are in the peak"
    assert "states of linear attention 5.0 GB" in str(found)


def test_the_longest_request_must_fit():
    check_longest_request_fits(256, 4096, KVDemand(16), OWN)
    check_longest_request_fits(257, 4097, KVDemand(16), OWN)
    check_longest_request_fits(266, 4096, KVDemand(16, window=128, step_tokens=16), OWN)
    with pytest.raises(ValueError, match="4096 needs 266"):
        check_longest_request_fits(265, 4096, KVDemand(16, window=128, step_tokens=16), OWN)
    for blocks, length in ((256, 4097), (0, 1), (-5, 16)):
        with pytest.raises(ValueError, match=f"room for {max(0, blocks)} KV blocks") as caught:
            check_longest_request_fits(blocks, length, KVDemand(16), OWN)
        for words in (
            f"model.max_model_len {length} needs {-(-length // 16)}",
            "weights take 60.0 GB, buffers and the largest step 12.0 GB, CUDA graphs 3.0 GB",
            "scheduler.max_num_batched_tokens",
            "raise cache.memory_fraction",
        ):
            assert words in str(caught.value)
