"""A new all-to-all is its file and one line of the registry: it is configured, chosen, sized, shared and built."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.all2all.local import LocalAllToAll
from kernels.backends import select
from kernels.backends.memory import backend_memory
from kernels.backends.ubatch import build_ubatch_backends
from kernels.interface import registry
from kernels.interface.backend import BackendShape
from kernels.interface.config import KernelsConfig
from kernels.interface.context import BackendContext
from kernels.routing.expert_map import ContiguousMap
from tests.unit.test_kernels_select import CPU
from workers.config import OverlapConfig
from workers.overlap.cache import software
from workers.overlap.policy import configured


class Toy(LocalAllToAll):
    """Serves two ranks that never need each other."""

    name = "toy"
    auto = "the newest"
    no_overlap_reason = None
    sm_choices = (2, 4)

    @classmethod
    def unsupported_reason(cls, shape: BackendShape) -> str | None:
        return None if shape.num_ranks == 2 else f"it serves two ranks, not {shape.num_ranks}"

    @classmethod
    def auto_reason(cls, shape: BackendShape) -> str | None:
        return cls.auto

    @classmethod
    def kept_bytes(cls, shape: BackendShape) -> int:
        return 1000 * shape.max_num_tokens

    @classmethod
    def step_bytes(cls, shape: BackendShape) -> int:
        return 7

    @classmethod
    def shared_memory_slots(cls, shape: BackendShape) -> tuple[int, ...]:
        return (shape.max_num_tokens,)

    @classmethod
    def build(cls, context: BackendContext) -> "Toy":
        toy = cls(context.permutation(torch.int64))
        toy.max_num_tokens = context.shape.max_num_tokens
        return toy


class SharedToy(Toy):
    """A toy of which one instance serves all ubatches."""

    name = "shared_toy"
    ubatch_shareable = True


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    toys = {toy.name: f"{__name__}.{toy.__name__}" for toy in (Toy, SharedToy)}
    names = toys | registry.ALL2ALL
    monkeypatch.setitem(registry.SEAMS, "all2all", names)


def selected(name: str = "toy", **changes: Any) -> select.Selection:
    # The names that YAML may hold are read from the registry at import, before this test adds its own.
    config = KernelsConfig.model_construct(all2all=name, grouped_gemm="reference", attention="sdpa")
    return select.select(config, select.probe("cpu"), replace(CPU, **changes))


CONTEXT = BackendContext(
    shape=CPU,
    device=torch.device("cpu"),
    rank=0,
    group=None,
    shared_memory=None,
    expert_map=ContiguousMap(4, 2),
    block_size=4,
)


def test_it_is_chosen_by_name_and_by_auto_and_refused_with_its_reason():
    assert selected().all2all == select.Choice("toy", "named in the configuration")
    assert selected("auto").all2all == select.Choice("toy", "auto: the newest")
    with pytest.raises(select.BackendChoiceError, match="it serves two ranks, not 3"):
        selected(num_ranks=3)
    with pytest.raises(select.BackendChoiceError, match="auto, toy, shared_toy, shm"):
        selected("local")


@pytest.mark.parametrize(("name", "per_ubatch"), [("toy", 8000), ("shared_toy", 0)])
def test_its_memory_is_counted(name: str, per_ubatch: int):
    alone = backend_memory(selected(name), CPU)
    assert alone.kept == 16000 and alone.step > 7
    of_the_gemm = backend_memory(selected("shm"), CPU).step
    assert alone.step == of_the_gemm + 7
    assert backend_memory(selected(name), CPU, num_ubatches=2).ubatches == 2 * per_ubatch


def test_it_is_built_for_whole_steps_and_for_ubatches():
    backends = select.build(selected(), CONTEXT)
    assert isinstance(backends.all2all, Toy) and backends.all2all.max_num_tokens == 16
    ubatches = build_ubatch_backends(selected(), CONTEXT, backends, 3)
    assert [ubatch.all2all.max_num_tokens for ubatch in ubatches] == [6, 6, 6]
    assert len({id(ubatch.all2all) for ubatch in (backends, *ubatches)}) == 4


def test_it_is_shared_by_ubatches():
    selection = selected("shared_toy")
    whole = select.build(selection, CONTEXT)
    ubatches = build_ubatch_backends(selection, CONTEXT, whole, 2)
    assert all(ubatch.all2all is whole.all2all for ubatch in ubatches)
    assert all(ubatch.grouped_gemm is whole.grouped_gemm for ubatch in ubatches)
    assert len({id(ubatch.attention) for ubatch in (whole, *ubatches)}) == 3


def test_what_a_rank_reads_of_it(monkeypatch: pytest.MonkeyPatch):
    found = selected().all2all_class
    assert found.shared_memory_slots(CPU) == (16,) and not found.needs_process_group
    assert configured(OverlapConfig(), found)[1] == {"decode", "prefill"}
    before = software(())
    monkeypatch.setattr(Toy, "distributions", ("torch",))
    assert software(()) != before, "measured again after an upgrade of its package"
