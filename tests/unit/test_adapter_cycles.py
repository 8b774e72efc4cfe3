"""Adapters that come and go under traffic with aborts: each answer is of its own adapter, and no memory stays."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.adapter_case import chosen, make_adapter, merge, weight_shapes
from tests.distributed.engine_harness import make_request, rank_config
from tests.unit.model_case import OneRank, make_batch, small_checkpoint
from workers.adapters.layout import AdapterLayout
from workers.adapters.pools import AdapterPools
from workers.adapters.store import AdapterStore
from workers.lora_config import LoadedAdapter, LoraConfig
from workers.models.registry import load_model_config
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous
from workers.wire.request import EngineRequest

torch.set_num_threads(1)
MANY = 200
PROMPT, NUM_TOKENS = [9, 4, 2, 7, 1, 8, 3, 6, 5], 4


class Scene:
    """One rank without peers; `answers` by request id, `expected` by number of the adapter, 0 for none."""

    def __init__(self, folder: Path, max_loras: int):
        base = small_checkpoint(folder / "base", num_layers=2)
        modules = chosen(weight_shapes(base), ("q_proj", "v_proj", "o_proj", "down_proj"))
        self.folders = [make_adapter(folder / f"{n}", modules, seed=n, alpha=20) for n in range(3)]
        paths = [base, *(merge(base, it, folder / f"merged-{it.name}") for it in self.folders)]
        self.expected = [greedy(path) for path in paths]
        assert len({tuple(tokens) for tokens in self.expected}) == 4
        config = rank_config(
            base,
            1,
            lora={"max_loras": max_loras, "targets": ["attention", "experts"]},
            scheduler={"max_num_seqs": 3, "max_num_batched_tokens": 12, "async_scheduling": True},
            model={"max_model_len": 32},
            cache={"num_blocks": 24, "block_size": 4},
        )
        self.process = RankProcess(0, config)
        epoch = Epoch(self.process, Rendezvous("", 0, "cycles"), timeout_s=60)
        epoch.load()
        self.answers: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        epoch.start_engine(self._publish, lambda step: None)
        self.engine = epoch.engine
        assert self.process.adapters is not None
        self.store = self.process.adapters

    def _publish(self, _ingress_id: str, outputs: list[Any]) -> None:
        for output in outputs:
            assert output.error is None, output
            self.answers.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.ended.add(output.request_id)

    def submit(self, name: str, adapter: int) -> None:
        request = make_request(name, PROMPT, max_tokens=NUM_TOKENS)
        self.engine.submit(EngineRequest(**{**vars(request), "adapter": adapter}))

    def stage(self, number: int, place: int) -> None:
        adapter = LoadedAdapter(id=number, name=f"a{number}", path=str(self.folders[place]))
        self.store.begin(adapter)()


def greedy(path: Path) -> list[int]:
    rank, ids = OneRank(path), PROMPT[:]
    for _ in range(NUM_TOKENS):
        ids.append(int(torch.argmax(rank.logits(make_batch([ids], [0]))[-1])))
    return ids[len(PROMPT) :]


@pytest.fixture(params=[1, 2], ids=lambda count: f"{count}-slots")
def scene(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Scene]:
    """With two slots, adapters come in several pieces."""
    if request.param == 2:
        monkeypatch.setattr("workers.adapters.pools.PIECE_BYTES", 2**15)
    made = Scene(tmp_path, request.param)
    assert (made.store.pools.num_pieces > 2) == (request.param == 2)
    yield made
    made.process.close()


@pytest.mark.parametrize("cycles", [12, pytest.param(MANY, marks=pytest.mark.exhaustive)])
def test_answers_are_of_their_own_adapter(scene: Scene, cycles: int) -> None:
    """Each cycle loads an adapter; its requests and those of the one before overlap, and one of them is aborted.

    The prompt is the same, so a wrong adapter, or blocks of another one in the prefix cache, would show.
    """
    pool, wanted, resident = scene.store.pools.pool.data_ptr(), {}, []
    for cycle in range(cycles):
        resident.append(psutil.Process().memory_info().rss)
        number, place = 1000 + cycle, cycle % 3
        scene.stage(number, place)
        for kind, adapter, expected in (
            ("own", number, place + 1),
            ("cut", number, None),
            ("base", 0, 0),
        ):
            name = f"{kind}-{cycle}"
            scene.submit(name, adapter)
            if expected is not None:
                wanted[name] = scene.expected[expected]
        for step in range(4 + cycle % 3):
            scene.engine.step()
            if step == cycle % 4:
                scene.engine.abort(f"cut-{cycle}")
        before = f"own-{cycle - 1}"
        while cycle and before not in scene.ended:
            scene.engine.step()
        scene.store.drop(number - 1)
        assert len(scene.store) == 1
    while not scene.engine.step().sleeps:
        pass
    assert {name: scene.answers[name] for name in wanted} == wanted
    scene.engine.scheduler.check_integrity()
    assert scene.store.pools.pool.data_ptr() == pool
    if cycles >= MANY:
        growth = max(resident[-20:]) - max(resident[: cycles // 2])
        assert growth < 20 * scene.store.pools.slot_bytes, "100 adapters left no memory behind"
    slots = scene.engine.scheduler.adapters
    assert slots is not None and slots.num_loads >= cycles // 2
    assert scene.engine.scheduler.adapter_vote(None)["adapter_slots"] == 0


def test_an_adapter_that_is_dropped_while_it_is_read_is_not_kept(tmp_path: Path) -> None:
    """Another rank may have failed meanwhile; before the thread begins, too."""
    base = small_checkpoint(tmp_path / "base", num_layers=1)
    folder = make_adapter(tmp_path / "a", chosen(weight_shapes(base), ("q_proj",)))
    layout = AdapterLayout.of(load_model_config(base), LoraConfig(max_loras=1))
    store = AdapterStore(AdapterPools(layout, 1, device=torch.device("cpu"), dtype=torch.float32))
    adapter = LoadedAdapter(id=7, name="a", path=str(folder))
    read = store.begin(adapter)
    store.drop(7)
    digest = read()
    assert 7 not in store and len(store) == 0
    assert store.begin(adapter)() == digest and 7 in store
