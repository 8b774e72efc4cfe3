"""Steps with DummyAttention: the other kernels run, and nothing waits for attention to compile."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.attention.base import Attention
from kernels.attention.dummy import DummyAttention
from kernels.attention.sdpa import SdpaAttention
from kernels.interface.attention_spec import AttentionSpec
from tests.checkpoints.writer import make_checkpoint
from workers.config import RankConfig
from workers.models.decoder import DecoderLM
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import KERNELS, WEIGHTS, Rendezvous
from workers.runner.model_runner import ModelRunner
from workers.step.scheduled_batch import ScheduledBatch

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.5)


class FusedAttention(SdpaAttention):
    """Does all that comes after the QKV projection, as flashinfer does."""

    fused_store = True


def test_dummy_has_the_form_of_the_replaced_attention() -> None:
    assert DummyAttention(FusedAttention([SPEC], 16)).fused_store
    dummy = DummyAttention(SdpaAttention([SPEC], 16))
    assert not dummy.fused_store and dummy.specs == (SPEC,)


def test_a_dummy_returns_zeros_in_the_shape_of_the_query() -> None:
    dummy = DummyAttention(SdpaAttention([SPEC], 16))
    caches = [torch.full((2, 1, 16, 2, 8), 7.0)]
    dummy.bind(caches)
    dummy.plan(SimpleNamespace(slot_mapping=torch.arange(5)))
    qkv_TMd = torch.randn(6, 8, 8)  # one row of padding
    answers = (
        dummy(qkv_TMd[:, :4], qkv_TMd[:, 4:6], qkv_TMd[:, 6:], 0),
        dummy.attend(qkv_TMd, 0),
    )
    for o_THd in answers:
        assert o_THd.shape == (6, 4, 8) and o_THd.dtype == qkv_TMd.dtype and not o_THd.any()
        assert o_THd.is_contiguous(), "as attention's own answers are"
    assert (caches[0] == 7).all(), "K and V went nowhere"


@pytest.fixture
def epoch(tmp_path: Path) -> Iterator[Epoch]:
    folder = make_checkpoint(tmp_path / "tiny", num_layers=4, hidden_size=32)
    config = RankConfig(
        model={"path": str(folder), "dtype": "float32", "max_model_len": 64},
        scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 16},
        cache={"num_blocks": 16},
        kernels={},
        num_ranks=1,
        device="cpu",
        threads=1,
        vote_timeout_s=5,
    )
    epoch = Epoch(RankProcess(0, config), Rendezvous("", 0, "dummy"), timeout_s=5)
    epoch.run_stage(WEIGHTS, lambda done, total: None)
    yield epoch
    epoch.process.close()


def test_steps_run_before_attention_is_compiled(
    epoch: Epoch, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: Future[None] = Future()
    epoch._attention_compiled = compiled
    layers: set[int] = set()
    attend = DummyAttention.__call__

    def attend_and_look(self: DummyAttention, *args: Any) -> torch.Tensor:
        layers.add(args[3])
        return attend(self, *args)

    monkeypatch.setattr(DummyAttention, "__call__", attend_and_look)
    attention: Attention = epoch.backends.attention
    order: list[str] = []

    def refuse(*args: object) -> None:
        raise AssertionError("attention was used before it was compiled")

    launch = ModelRunner.launch

    def launch_and_look(self: ModelRunner, *args: object) -> object:
        pending = launch(self, *args)
        order.append("step")
        return pending

    def wait(timeout: float | None = None) -> None:
        order.append("attention")

    monkeypatch.setattr(type(attention), "plan", refuse)
    monkeypatch.setattr(type(attention), "__call__", refuse)
    monkeypatch.setattr(ModelRunner, "launch", launch_and_look)
    monkeypatch.setattr(compiled, "result", wait)
    epoch.run_stage(KERNELS, lambda done, total: None)
    assert order.index("attention") == len(order) - 1 > 6, order
    assert epoch._attention_compiled is None
    assert layers == {0, 1}, "the other layers have the same kernels"


def test_few_layers_are_two_of_each_spec() -> None:
    model = object.__new__(DecoderLM)
    model.config, model.layers = SimpleNamespace(layers="abaabbc"), list(range(7))
    assert model.with_few_layers().layers == [0, 1, 2, 4, 6]
    assert model.layers == list(range(7))


def test_the_forward_with_a_dummy_is_finite(epoch: Epoch) -> None:
    runner, scheduler = epoch.make(
        epoch.process.caches.new_manager(8), DummyAttention(epoch.backends.attention)
    )
    hidden: list[torch.Tensor] = []
    forward = runner.model.forward

    def keep(batch: object) -> torch.Tensor:
        hidden.append(forward(batch))
        return hidden[-1]

    runner.model.forward = keep
    epoch.make.warm_up_steps().prefill(runner, scheduler, 16)
    assert [len(rows) for rows in hidden] == [16, 1], "a prefill and a decode"
    assert all(rows.isfinite().all() and rows.any() for rows in hidden)
    assert not epoch.backends.attention.kv_caches, "attention itself was not touched"


def test_a_cut_prompt_goes_on_beside_decodes(epoch: Epoch) -> None:
    """Kernels for it must not compile while requests run."""
    steps = epoch.make.warm_up_steps()
    cache = epoch.process.caches.new_manager(steps.num_blocks)
    runner, scheduler = epoch.make(cache, DummyAttention(epoch.backends.attention))
    rests, launch = [], runner.launch

    def keep(batch: ScheduledBatch, plan: object) -> object:
        computed = [seq.num_computed_tokens for seq in batch.seqs]
        if batch.num_single_rows and computed[-1] and batch.num_new_tokens[-1] > 1:
            rests.append(batch)
        return launch(batch, plan)

    runner.launch = keep
    steps.cut_prompt(runner, scheduler)
    assert len(rests) == 1
