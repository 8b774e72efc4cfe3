"""Ubatches take turns in a fixed order, lose no error, and compute what one forward computes."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kernels.all2all.base import AllToAll
from kernels.attention.base import GraphForm
from kernels.attention.flashinfer_decodes import prompts_are_new
from kernels.backends.select import Backends
from kernels.grouped_gemm.reference import ReferenceGroupedGemm
from kernels.pending import Pending, can_yield_ubatch
from tests.unit.model_case import (
    BLOCK_SIZE,
    BLOCKS_PER_SEQ,
    OneRank,
    make_batch,
    small_checkpoint,
)
from workers.step.forward_batch import ForwardBatch
from workers.ubatch.wrapper import UBatchWrapper, alternate, sm_split


class Log(list):
    """What happened, in order; `task` makes a ubatch that says what it does."""

    def task(self, name: str, num_exchanges: int, fail_at: int | None = None):
        def run() -> str:
            try:
                for number in range(num_exchanges):
                    self.append(f"{name} sends {number}")
                    got = Pending(lambda number=number: number).wait()
                    if got == fail_at:
                        raise RuntimeError(f"{name} fails at {number}")
                    self.append(f"{name} has {number}")
            finally:
                self.append(f"{name} ends")
            return name

        return run


def test_ubatches_take_turns_at_each_exchange():
    log = Log()
    assert alternate([log.task("a", 2), log.task("b", 2)]) == ["a", "b"]
    assert log == [
        "a sends 0",
        "b sends 0",
        "a has 0",
        "a sends 1",
        "b has 0",
        "b sends 1",
        "a has 1",
        "a ends",
        "b has 1",
        "b ends",
    ]


@pytest.mark.parametrize("num_ubatches", [1, 2, 3, 5])
def test_ubatch_i_reaches_every_exchange_first(num_ubatches):
    log = Log()
    names = [str(i) for i in range(num_ubatches)]
    assert alternate([log.task(name, 4) for name in names]) == names
    for number in range(4):
        senders = [entry.split()[0] for entry in log if entry.endswith(f"sends {number}")]
        assert senders == names


def test_a_result_that_is_there_changes_no_turn():
    log = []

    def run(name):
        pending = Pending(lambda: name)
        log.append(pending.wait())
        log.append(pending.wait())
        log.append(Pending.ready(name).wait())

    alternate([lambda: run("a"), lambda: run("b")])
    assert log == ["a", "a", "a", "b", "b", "b"]


def test_outside_a_step_wait_only_waits():
    assert not can_yield_ubatch()
    assert Pending(lambda: 3).wait() == 3


@pytest.mark.parametrize("failing", ["a", "b", "c"])
@pytest.mark.parametrize("at", [0, 2])
def test_an_error_unwinds_the_others_and_is_raised(failing, at):
    log = Log()
    tasks = [log.task(name, 3, at if name == failing else None) for name in "abc"]
    with pytest.raises(RuntimeError, match=f"{failing} fails at {at}"):
        alternate(tasks)
    assert sorted(entry for entry in log if entry.endswith("ends")) == [
        "a ends",
        "b ends",
        "c ends",
    ]
    assert log[:3] == ["a sends 0", "b sends 0", "c sends 0"]
    assert not can_yield_ubatch()
    assert alternate([log.task("d", 1), log.task("e", 1)]) == ["d", "e"]


def test_an_error_before_others_begin_leaves_them_alone():
    log = Log()
    with pytest.raises(RuntimeError, match="early"):
        alternate([_raises("early"), log.task("b", 1)])
    assert log == []


def test_an_exchange_that_fails_raises_in_its_own_ubatch():
    def failing():
        Pending(_raises("lost a peer")).wait()

    log = Log()
    with pytest.raises(RuntimeError, match="lost a peer"):
        alternate([failing, log.task("b", 2)])
    assert log == ["b sends 0", "b ends"]


def test_what_unwinding_raises_is_noted_and_waits_for_nobody():
    def stubborn():
        try:
            Pending(lambda: 1).wait()
        finally:
            Pending(_raises("nobody answers")).wait()

    def late():
        Pending(lambda: 1).wait()
        raise ValueError("the first error")

    with pytest.raises(ValueError, match="the first error") as raised:
        alternate([late, stubborn])
    assert any("nobody answers" in note for note in raised.value.__notes__)


def test_ubatches_are_not_cut_again():
    with pytest.raises(AssertionError, match="cannot be cut again"):
        alternate([lambda: alternate([lambda: 1])])


def test_a_context_manager_around_a_wait_is_refused():
    def careless():
        with torch.inference_mode():
            Pending(lambda: 1).wait()

    with pytest.raises(AssertionError, match="context manager"):
        alternate([careless, lambda: None])
    assert not torch.is_inference_mode_enabled()


def _raises(message: str):
    def run():
        raise RuntimeError(message)

    return run


class PassedOn(AllToAll):
    """Another exchange whose results always come by `Pending`, so that ubatches alternate on one rank too."""

    name = "passed_on"

    def __init__(self, inner: AllToAll, log: list[str], own: str):
        self.inner, self.log, self.own = inner, log, own
        self.num_sms: list[int | None] = []

    def dispatch(self, x_TD, topk_idx_TK, topk_weights_TK):
        self.log.append(f"{self.own} dispatches")
        pending = self.inner.dispatch(x_TD, topk_idx_TK, topk_weights_TK)
        return Pending(pending.result)

    def combine(self, y_RD, handle):
        self.log.append(f"{self.own} combines")
        pending = self.inner.combine(y_RD, handle)
        return Pending(pending.result)

    def set_num_sms(self, num_sms):
        self.num_sms.append(num_sms)


def ubatch_backends(rank: OneRank, count: int, log: list[str]) -> list[Backends]:
    """Exchange and attention of each ubatch, over the rank's own caches."""
    found = []
    for index in range(count):
        attention = type(rank.attention)(rank.attention.specs, rank.attention.block_size)
        attention.bind(rank.attention.kv_caches)
        all2all = PassedOn(rank.backends.all2all, log, str(index))
        found.append(Backends(all2all, rank.backends.grouped_gemm, attention))
    return found


BATCHES = {
    "extend": ([list(range(20)), list(range(50, 67)), [3, 4]], [0, 8, 30], 0),
    "decode": ([[5], [6], [7], [8], [9]], [3, 40, 1, 17, 8], 0),
    "mixed": ([[5], [6], list(range(30))], [3, 40, 9], 0),
    "straddles_every_cut": ([list(range(41))], [11], 0),
    "padding_fills_a_ubatch": ([[5], [6]], [1, 2], 9),
    "padding_alone": ([], [], 6),
    "one_token_each": ([[1], [2], [3]], [4, 5, 6], 0),
}


@pytest.mark.parametrize("num_ubatches", [2, 3])
@pytest.mark.parametrize("name", BATCHES)
def test_ubatches_compute_what_one_forward_does(tmp_path: Path, name: str, num_ubatches: int):
    rank = OneRank(small_checkpoint(tmp_path))
    with torch.inference_mode():
        check_ubatches(rank, make_batch(*BATCHES[name]), num_ubatches)


def check_ubatches(rank: OneRank, batch: ForwardBatch, num_ubatches: int) -> None:
    generator = torch.Generator().manual_seed(3)
    for cache in rank.attention.kv_caches:
        cache.copy_(torch.randn(cache.shape, generator=generator))
    caches = [cache.clone() for cache in rank.attention.kv_caches]
    rank.attention.plan(batch)
    expected_TD = rank.model.forward(batch)
    written = [cache.clone() for cache in rank.attention.kv_caches]
    for cache, before in zip(rank.attention.kv_caches, caches, strict=True):
        cache.copy_(before)

    log: list[str] = []
    wrapper = UBatchWrapper(rank.model, ubatch_backends(rank, num_ubatches, log))
    wrapper.plan(batch)
    found_TD = wrapper.forward(batch)
    real = slice(batch.num_tokens)
    torch.testing.assert_close(found_TD[real], expected_TD[real], atol=2e-5, rtol=0)
    assert found_TD.shape == expected_TD.shape
    for cache, expected in zip(rank.attention.kv_caches, written, strict=True):
        torch.testing.assert_close(cache, expected, atol=1e-5, rtol=0)
    numbers = [str(i) for i in range(num_ubatches)]
    one_layer = [f"{i} {does}" for does in ("dispatches", "combines") for i in numbers]
    assert log == one_layer * rank.config.num_layers
    assert caches[0].shape[1:3] == (8 * BLOCKS_PER_SEQ, BLOCK_SIZE)


class Product(ReferenceGroupedGemm):
    """An expert product that notes its limits."""

    def __init__(self):
        self.num_sms: list[int | None] = []

    def set_num_sms(self, num_sms):
        self.num_sms.append(num_sms)


@pytest.mark.parametrize("fails", [False, True])
def test_sms_are_divided_and_given_back(tmp_path: Path, fails: bool):
    product = Product()
    backends = [Backends(PassedOn(None, [], "0"), product, None) for _ in range(2)]
    try:
        with sm_split(backends, 20, 132):
            assert [own.all2all.num_sms for own in backends] == [[20], [20]]
            assert set(product.num_sms) == {112}
            if fails:
                raise KeyError
    except KeyError:
        assert fails
    assert [own.all2all.num_sms for own in backends] == [[20, None], [20, None]]
    assert product.num_sms[-1] is None


def test_without_a_split_nobody_is_limited():
    product = Product()
    with sm_split([Backends(PassedOn(None, [], "0"), product, None)], None, 132):
        pass
    assert product.num_sms == []


def test_a_split_leaves_something_to_both():
    for comm_sms in (0, 132):
        with (
            pytest.raises(AssertionError, match=f"{comm_sms} of 132"),
            sm_split([], comm_sms, 132),
        ):
            pass


class TwoForms:
    """Attention that has a form of its own for prompts that are all new, in steps of 8 rows and more."""

    def forms(self, num_rows: int, *, prompts: bool) -> tuple[GraphForm, ...]:
        if not prompts:
            return GraphForm.EVEN_DECODES, GraphForm.DECODES
        return (GraphForm.NEW_PROMPTS, GraphForm.MIXED)[num_rows < 8 :]

    def form(self, batch, num_rows: int, *, prompts: bool) -> GraphForm:
        assert prompts and num_rows == batch.num_rows
        forms = self.forms(num_rows, prompts=True)
        return forms[0] if prompts_are_new(batch) else forms[-1]


@pytest.mark.parametrize(
    ("sequences", "form"),
    [
        ([(8, 0), (8, 0)], GraphForm.NEW_PROMPTS),
        ([(1, 5), (1, 9), (6, 0), (8, 0)], GraphForm.NEW_PROMPTS),
        ([(5, 0), (5, 0), (6, 0)], GraphForm.MIXED),  # the cut goes through one
        ([(8, 0), (8, 3)], GraphForm.MIXED),
        ([(8, 0)], GraphForm.NEW_PROMPTS),  # the rest is padding
        ([], GraphForm.NEW_PROMPTS),
    ],
)
def test_ubatches_share_the_form_that_serves_all(sequences, form):
    backends = SimpleNamespace(attention=TwoForms(), linear_attention=None)
    wrapper = UBatchWrapper(SimpleNamespace(with_backends=lambda own: own), [backends] * 2)
    assert wrapper.forms(17, prompts=True) == (GraphForm.NEW_PROMPTS, GraphForm.MIXED)
    assert wrapper.forms(15, prompts=True) == (GraphForm.MIXED,)
    assert wrapper.forms(64, prompts=False) == (GraphForm.DECODES,)
    new_ids, contexts = [[7] * new for new, _ in sequences], [before for _, before in sequences]
    batch = make_batch(new_ids, contexts, padding=16 - sum(map(len, new_ids)))
    assert wrapper.form(batch, 16, prompts=True) == form
    assert wrapper.form(batch, 16, prompts=False) == GraphForm.DECODES
