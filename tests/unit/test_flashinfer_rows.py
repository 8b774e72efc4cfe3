"""Which rows each of flashinfer's kernels is planned for and given; stand-ins record what they are told."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kernels.attention.base import GraphForm
from kernels.attention.flashinfer import NEW_PROMPT_ROWS, FlashInferAttention
from kernels.attention.flashinfer_decodes import Shape
from kernels.attention.flashinfer_graphs import GraphPlans
from kernels.attention.spec import AttentionSpec

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.5)
MAX_ROWS, MAX_SEQS = 16, 6


class Kernel:
    """A wrapper of flashinfer that remembers its plan, and writes a number of its own to the rows it is for."""

    number = 0.0

    def __init__(self, *_args: Any, backend: str = "fa2", **_buffers: Any):
        self.backend, self.rows = backend, slice(0, 0)
        self._max_total_num_rows = 0

    def reset_workspace_buffer(self, *_buffers: Any) -> None:
        """Nothing is computed."""

    def plan(self, query_starts: torch.Tensor, *_rest: Any, **_options: Any) -> None:
        self.starts = query_starts.tolist()
        self.rows = slice(self.starts[0], self.starts[-1])

    def run(self, q_THd: torch.Tensor, *_new: Any, out: torch.Tensor) -> torch.Tensor:
        out[self.rows] = self.number
        return out


class Paged(Kernel):
    """Reads K and V out of pages."""

    @property
    def number(self) -> float:
        return {"fa2": 2.0, "fa3": 3.0}[self.backend]

    def run(self, q_THd: torch.Tensor, caches: Any, *, out: torch.Tensor) -> torch.Tensor:
        assert caches == ("K", "V")
        return super().run(q_THd, out=out)


class Ragged(Kernel):
    """Reads the new K and V themselves."""

    number = 4.0

    def plan(self, query_starts: torch.Tensor, kv_starts: torch.Tensor, *rest: Any, **options: Any):
        assert torch.equal(query_starts, kv_starts) and options["causal"]
        super().plan(query_starts)

    def run(self, q_THd: torch.Tensor, k_Thd: Any, v_Thd: Any, *, out: torch.Tensor):
        assert len(q_THd) == len(k_Thd) == len(v_Thd) and k_Thd.shape[1] == v_Thd.shape[1] == 2
        return super().run(q_THd, out=out)


FLASHINFER = SimpleNamespace(
    BatchPrefillWithPagedKVCacheWrapper=Paged, BatchPrefillWithRaggedKVCacheWrapper=Ragged
)


def make_batch(seqs: list[tuple[int, int]]) -> SimpleNamespace:
    """(context, new tokens) of each sequence, decodes first."""
    new = np.array([count for _, count in seqs], dtype=np.int32)
    context = np.array([before for before, _ in seqs], dtype=np.int32)
    return SimpleNamespace(
        num_tokens=int(new.sum()),
        num_seqs=len(seqs),
        num_decodes=int((new == 1).sum()),
        query_start_loc_cpu=np.cumsum([0, *new], dtype=np.int32),
        seq_lens_cpu=context + new,
        block_table=torch.zeros(len(seqs), 2, dtype=torch.int64),
        slot_mapping=torch.arange(int(new.sum())),
    )


@pytest.fixture
def plans() -> GraphPlans:
    return GraphPlans(
        FLASHINFER,
        lambda *args: None,
        Shape(SPEC, 16, torch.bfloat16, 66),
        torch.device("cpu"),
        max_rows=MAX_ROWS,
        max_seqs=MAX_SEQS,
        max_blocks=4,
    )


@pytest.mark.parametrize(("form", "number"), [(GraphForm.NEW_PROMPTS, 4.0), (GraphForm.MIXED, 3.0)])
@pytest.mark.parametrize(
    "seqs",
    [
        [(5, 1), (20, 1), (0, 6), (0, 3)],
        [(0, 4), (0, 4)],
        [(3, 1)] * MAX_SEQS,
        [],
    ],
)
def test_rows_of_a_graph(plans: GraphPlans, seqs, form: GraphForm, number: float) -> None:
    batch, full = make_batch(seqs), make_batch([(0, MAX_ROWS)])
    new = tuple(torch.zeros(MAX_ROWS, heads, 8) for heads in (4, 2, 2))
    plans.plan(full, MAX_ROWS, form).run(new, ("K", "V")).fill_(torch.nan)  # of a step before
    out_THd = plans.plan(batch, MAX_ROWS, form).run(new, ("K", "V"))
    expected = [2.0] * batch.num_decodes + [number] * (batch.num_tokens - batch.num_decodes)
    expected += [0.0] * (MAX_ROWS - batch.num_tokens)
    assert out_THd[:, 0, 0].tolist() == expected
    assert plans.slots.tolist() == [*range(batch.num_tokens), *[-1] * (MAX_ROWS - batch.num_tokens)]


def test_rows_of_a_plain_forward() -> None:
    attention = object.__new__(FlashInferAttention)
    attention.spec, attention._graph, attention._layers = SPEC, None, [("K", "V")]
    attention._decode = SimpleNamespace(wrapper=Paged())
    attention._prefill, attention._new_prompts = Paged(backend="fa3"), Ragged()
    attention._shape = Shape(SPEC, 16, torch.bfloat16, 66)
    attention._num_decodes, attention._num_tokens = 2, 9
    attention._decode.wrapper.plan(torch.tensor([0, 2]))
    attention._prefill.plan(torch.tensor([0, 7]))
    attention._plan_new_prompts(np.array([2, 6, 9], dtype=np.int32))
    assert attention._new_prompts.starts == [0, 4, 7]
    for attention._all_new, number in ((True, 4.0), (False, 3.0)):
        out_THd = attention.attend(torch.ones(11, 8, 8), 0)
        assert out_THd.shape == (11, 4, 8)
        assert out_THd[:, 3, 7].tolist() == [2.0] * 2 + [number] * 7 + [0.0] * 2


@pytest.mark.parametrize(
    ("seqs", "form"),
    [
        ([(5, 1), (0, 6)], GraphForm.NEW_PROMPTS),
        ([(5, 1)], GraphForm.NEW_PROMPTS),
        ([(0, 6), (6, 6)], GraphForm.MIXED),
    ],
)
def test_the_form_that_serves_a_batch(seqs, form: GraphForm) -> None:
    attention = object.__new__(FlashInferAttention)
    attention._shape = Shape(SPEC, 16, torch.bfloat16, 66)
    attention._plans = SimpleNamespace(even=lambda batch, num_rows: len(seqs) == 1)
    batch = make_batch(seqs)
    attention._new_prompts = None  # float16
    assert attention.form(batch, NEW_PROMPT_ROWS, prompts=True) == GraphForm.MIXED
    attention._new_prompts = Ragged()
    assert attention.form(batch, NEW_PROMPT_ROWS, prompts=True) == form
    assert attention.form(batch, NEW_PROMPT_ROWS - 1, prompts=True) == GraphForm.MIXED
    even = GraphForm.EVEN_DECODES if len(seqs) == 1 else GraphForm.DECODES
    assert attention.form(batch, 66, prompts=False) == even
