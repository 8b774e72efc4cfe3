"""The rows that each of flashinfer's kernels is planned for and called with; fake kernels record them."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kernels.attention.base import GraphForm
from kernels.attention.flashinfer import NEW_PROMPT_ROWS, FlashInferAttention
from kernels.attention.flashinfer_decodes import Decodes, PageBuffers, Pages, Shape
from kernels.attention.flashinfer_extends import GraphExtends
from kernels.attention.flashinfer_graphs import GraphPlans
from kernels.attention.flashinfer_plans import EagerPlans
from kernels.interface.attention_spec import AttentionSpec

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=8, scale=0.5)
OTHER = AttentionSpec(num_heads=2, num_kv_heads=1, head_dim=16, scale=0.25)
MAX_ROWS, MAX_SEQS = 16, 6


class Kernel:
    """A wrapper of flashinfer that remembers its plan, and writes a number of its own to the rows it is for."""

    number = 0.0

    def __init__(self, workspace: torch.Tensor, backend: str = "fa2", **_buffers: Any):
        self.workspace, self.backend, self.rows = workspace, backend, slice(0, 0)
        self._backend, self._max_total_num_rows = backend, 0
        self._float_workspace_buffer = self._int_workspace_buffer = workspace
        self._pin_memory_int_workspace_buffer = workspace
        self.num_own_plans = 0

    def reset_workspace_buffer(self, workspace: torch.Tensor, schedule: torch.Tensor) -> None:
        self.workspace, self.schedule = workspace, schedule

    def take(self, num_rows: int) -> None:
        self.rows = slice(0, num_rows)

    def plan(self, query_starts: torch.Tensor, *_rest: Any, **_options: Any) -> None:
        """What the wrapper's own plan does; it loads a module, of which the plan is called from then on."""
        self.num_own_plans += 1
        self._cached_module, self._plan_info = SimpleNamespace(plan=self.plan_module), [0]
        self._take_starts(query_starts)

    def plan_module(self, *arguments: Any) -> list[int]:
        assert len(arguments) == {"fa2": 19, "fa3": 16}[self.backend]
        self.arguments = arguments[3:]
        self._take_starts(arguments[3])
        return [1]

    def _take_starts(self, query_starts: torch.Tensor) -> None:
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
        assert len(q_THd) == len(k_Thd) == len(v_Thd) and k_Thd.shape == v_Thd.shape
        return super().run(q_THd, out=out)


FLASHINFER = SimpleNamespace(
    BatchDecodeWithPagedKVCacheWrapper=Paged,
    BatchPrefillWithPagedKVCacheWrapper=Paged,
    BatchPrefillWithRaggedKVCacheWrapper=Ragged,
    fast_decode_plan=None,
)


def without_flashinfer(specs: list[AttentionSpec]) -> FlashInferAttention:
    """An attention whose package is a fake, bound to nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", FLASHINFER)
        return FlashInferAttention(specs, 16)


def make_batch(seqs: list[tuple[int, int]]) -> SimpleNamespace:
    """(context, new tokens) of each sequence, decodes first."""
    new = np.array([count for _, count in seqs], dtype=np.int32)
    context = np.array([before for before, _ in seqs], dtype=np.int32)
    return SimpleNamespace(
        num_tokens=int(new.sum()),
        num_seqs=len(seqs),
        num_single_rows=int((new == 1).sum()),
        query_start_loc_cpu=np.cumsum([0, *new], dtype=np.int32),
        seq_lens_cpu=context + new,
        block_table=torch.zeros(len(seqs), 2, dtype=torch.int64),
        slot_mapping=torch.arange(int(new.sum())),
        behind=None,
    )


def make_plans(*specs: AttentionSpec) -> GraphPlans:
    return GraphPlans(
        FLASHINFER,
        lambda *args: None,
        [Shape(spec, 16, torch.bfloat16, 66) for spec in specs],
        torch.device("cpu"),
        max_rows=MAX_ROWS,
        max_seqs=MAX_SEQS,
        max_blocks=4,
    )


def new_rows(spec: AttentionSpec, rows: int) -> tuple[torch.Tensor, ...]:
    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    return tuple(torch.ones(rows, count, spec.head_dim) for count in heads)


@pytest.mark.parametrize("specs", [(SPEC,), (SPEC, OTHER)])
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
def test_rows_of_a_graph(seqs, form: GraphForm, number: float, specs) -> None:
    plans, batch, full = make_plans(*specs), make_batch(seqs), make_batch([(0, MAX_ROWS)])
    for planned, spec in zip(plans.plan(full, MAX_ROWS, form), specs, strict=True):
        planned.run(new_rows(spec, MAX_ROWS), ("K", "V")).fill_(torch.nan)  # of a step before
    expected = [2.0] * batch.num_single_rows + [number] * (batch.num_tokens - batch.num_single_rows)
    expected += [0.0] * (MAX_ROWS - batch.num_tokens)
    for planned, spec in zip(plans.plan(batch, MAX_ROWS, form), specs, strict=True):
        out_THd = planned.run(new_rows(spec, MAX_ROWS), ("K", "V"))
        assert out_THd.shape == (MAX_ROWS, spec.num_heads, spec.head_dim)
        assert out_THd[:, 0, 0].tolist() == expected
    assert plans.slots.tolist() == [*range(batch.num_tokens), *[-1] * (MAX_ROWS - batch.num_tokens)]


@pytest.mark.parametrize("specs", [(SPEC,), (SPEC, OTHER)])
@pytest.mark.parametrize("seqs", [[(5, 1), (20, 4), (7, 2)], [(9, 4)] * 4, [(3, 1)] * 9, []])
def test_rows_of_a_graph_of_drafts(seqs, specs) -> None:
    """One kernel has the rows of all sequences, of which there may be more than in graphs of prompts."""
    plans, batch, full = make_plans(*specs), make_batch(seqs), make_batch([(0, 1)] * MAX_ROWS)
    assert plans.takes_drafts(MAX_ROWS) and not plans.takes_drafts(2**22)
    for planned, spec in zip(plans.plan(full, MAX_ROWS, GraphForm.DRAFTS), specs, strict=True):
        planned.run(new_rows(spec, MAX_ROWS), ("K", "V")).fill_(torch.nan)  # of a step before
    small = plans.plan(make_batch([(8, 3)]), 4, GraphForm.DRAFTS)
    kernels = [planned._kernel.wrapper for planned in small]
    for planned, spec in zip(plans.plan(batch, MAX_ROWS, GraphForm.DRAFTS), specs, strict=True):
        out_THd = planned.run(new_rows(spec, MAX_ROWS), ("K", "V"))
        assert out_THd.shape == (MAX_ROWS, spec.num_heads, spec.head_dim)
        assert out_THd[:, 0, 0].tolist() == [2.0] * batch.num_tokens + [0.0] * (
            MAX_ROWS - batch.num_tokens
        )
        kernel = planned._kernel.wrapper
        assert len(kernel.starts) == MAX_ROWS + 1 and kernel.num_own_plans == 1
        kernels.append(kernel)
    assert len({kernel.workspace.data_ptr() for kernel in kernels}) == 1
    assert {kernel._max_total_num_rows for kernel in kernels} == {4, MAX_ROWS}


def test_lengths_of_drafts_that_only_the_device_has() -> None:
    """Pages are those of the longest lengths; a sequence may end before its last page."""
    plans, batch = make_plans(SPEC), make_batch([(5, 1), (20, 4), (15, 3)])
    batch.behind = torch.tensor([0, 3, 3])
    plans.plan(batch, MAX_ROWS, GraphForm.DRAFTS)
    buffers, _ = plans._drafts[MAX_ROWS]
    found = buffers.of(MAX_ROWS)
    assert found["paged_kv_last_page_len"][:4].tolist() == [6, 5, -1, 0]
    assert found["paged_kv_indptr"][:5].tolist() == [0, 1, 3, 5, 5]


@pytest.mark.parametrize("backend", ["fa2", "fa3"])
def test_later_plans_of_a_graph_call_the_module_alone(backend: str) -> None:
    """With what the wrapper's own plan computes of its arguments; the lists were shipped to its buffers."""
    buffers = PageBuffers(6, 20, torch.device("cpu"))
    shape = Shape(SPEC, 16, torch.bfloat16, 66)
    kernel = GraphExtends(Paged(torch.empty(1), backend), shape, causal=True)
    kernel.wrapper._max_total_num_rows = MAX_ROWS
    for lens, starts in ([5], [0, 1]), ([16, 33, 1], [2, 3, 7, 8]):
        pages = Pages(np.array(lens, np.int32), 16, 4, np.array(starts, np.int32))
        pages.ship(buffers.pages, buffers.lengths)
        kernel.plan(pages, chunk=2)
    assert kernel.wrapper.num_own_plans == 1 and kernel.wrapper._plan_info == [1]
    query_starts, page_starts, key_lens, *rest = kernel.wrapper.arguments
    assert query_starts.tolist() == buffers.query_starts(4).tolist() == [2, 3, 7, 8, 8]
    given = buffers.of(4)
    assert page_starts.tolist() == given["paged_kv_indptr"].tolist() == [0, 1, 4, 5, 5]
    assert given["paged_kv_last_page_len"].tolist() == [16, 1, 1, 0]
    assert key_lens.tolist() == [16, 33, 1, 0]
    numbers = [MAX_ROWS, 4, 4, 2, 16, True, 8, 8, True, -1]
    assert rest == numbers + ([2, False, 0] if backend == "fa2" else [])
    assert all(it.dtype == torch.int32 for it in (query_starts, page_starts, key_lens))


def test_shapes_have_schedules_of_their_own() -> None:
    """A schedule is read at replay, after the plans of all shapes: it must not be overwritten by another shape's."""
    plans = make_plans(SPEC, OTHER)
    planned = plans.plan(make_batch([(5, 1), (0, 6)]), MAX_ROWS, GraphForm.MIXED)
    kernels = [it.wrapper for plan in planned for it in (plan._decodes, plan._prompts)]
    assert len({kernel.schedule.data_ptr() for kernel in kernels}) == 4
    assert len({kernel.workspace.data_ptr() for kernel in kernels}) == 1


def test_decodes_are_even_in_every_shape() -> None:
    """Whole sequences are read by fewer blocks of threads where more KV heads share the GPU."""
    many, few = (
        Shape(spec, 16, torch.bfloat16, blocks) for spec, blocks in ((SPEC, 4), (OTHER, 66))
    )
    lens = make_batch([(900, 1), (100, 1)])
    plans = make_plans(SPEC, OTHER)
    for graphs, shape in zip(plans._of_shape, (many, few), strict=True):
        graphs._shape = shape
    verdicts = [graphs.even(lens.seq_lens_cpu, 2) for graphs in plans._of_shape]
    assert verdicts == [True, False] and not plans.even(lens, 2)
    plans._of_shape.pop()
    assert plans.even(lens, 2)


@pytest.mark.parametrize(("all_new", "number"), [(True, 4.0), (False, 3.0)])
def test_rows_of_a_plain_forward(monkeypatch, all_new: bool, number: float) -> None:
    monkeypatch.setattr(Decodes, "plan", lambda self, pages, rows, *_: self.wrapper.take(rows))
    shape = Shape(SPEC, 16, torch.bfloat16, 66)
    plans = EagerPlans(FLASHINFER, shape, torch.empty(2**20), hopper=True)
    batch = make_batch([(5, 1), (20, 1), (0, 4), (0, 3)])
    pages = Pages(batch.seq_lens_cpu, 16)
    pages.ship(torch.empty(pages.total, dtype=torch.int32))
    plans.plan(batch, pages, all_new=all_new)
    assert (plans._new_prompts if all_new else plans._prefill).starts == [0, 4, 7]
    out_THd = plans.run(new_rows(SPEC, 11), ("K", "V"))
    assert out_THd.shape == (11, 4, 8)
    assert out_THd[:, 3, 7].tolist() == [2.0] * 2 + [number] * 7 + [0.0] * 2
    plans.plan_nothing()
    assert not plans.run(new_rows(SPEC, 3), ("K", "V")).any()


class Recorded:
    """A plan that remembers the layers it is run for, by their caches."""

    def __init__(self) -> None:
        self.ran: list[Any] = []

    def run(self, new: Any, caches: Any) -> torch.Tensor:
        self.ran.append((caches, [tuple(rows.shape[1:]) for rows in new]))
        return new[0]


def test_each_layer_runs_the_plan_of_its_spec() -> None:
    attention = without_flashinfer([SPEC, OTHER, SPEC])
    attention._layers = ["first", "second", "third"]
    attention._planned = planned = [Recorded(), Recorded()]
    for layer, spec in enumerate(attention.specs):
        qkv_THd = torch.zeros(5, spec.num_heads + 2 * spec.num_kv_heads, spec.head_dim)
        assert attention.attend(qkv_THd, layer).shape == (5, spec.num_heads, spec.head_dim)
    assert planned[0].ran == [
        ("first", [(4, 8), (2, 8), (2, 8)]),
        ("third", [(4, 8), (2, 8), (2, 8)]),
    ]
    assert planned[1].ran == [("second", [(2, 16), (1, 16), (1, 16)])]


@pytest.mark.parametrize(
    ("seqs", "form"),
    [
        ([(5, 1), (0, 6)], GraphForm.NEW_PROMPTS),
        ([(5, 1)], GraphForm.NEW_PROMPTS),
        ([(0, 6), (6, 6)], GraphForm.MIXED),
    ],
)
def test_the_form_that_serves_a_batch(seqs, form: GraphForm) -> None:
    attention = without_flashinfer([SPEC])
    attention._graphs = SimpleNamespace(even=lambda batch, num_rows: len(seqs) == 1)
    batch = make_batch(seqs)
    assert attention.form(batch, NEW_PROMPT_ROWS, prompts=True) == GraphForm.MIXED, "float16"
    attention._has_new_prompts = True
    assert attention.form(batch, NEW_PROMPT_ROWS, prompts=True) == form
    assert attention.form(batch, NEW_PROMPT_ROWS - 1, prompts=True) == GraphForm.MIXED
    even = GraphForm.EVEN_DECODES if len(seqs) == 1 else GraphForm.DECODES
    assert attention.form(batch, 66, prompts=False) == even
