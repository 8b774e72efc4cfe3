"""timeline.py: kernels to parts by name, gaps and sums of made-up traces, and a dry run on a CPU."""

import argparse
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.config.load import load_config
from cluster.config.resolve import resolve_rank_config
from scripts.bench import ROOT, timeline, timeline_report
from scripts.bench.processes import Outcome
from scripts.bench.results import load
from scripts.bench.step_work import StepPart
from scripts.bench.timeline_events import (
    Span,
    covered_share,
    find_gaps,
    one_step,
    part_of,
    read_trace,
    summarise,
)
from scripts.bench.timeline_ranks import Loop, State
from workers.rank.epoch import Epoch
from workers.rank.process import RankProcess
from workers.rank.rank_info import Rendezvous

FLASHINFER = (
    "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<(flashinfer"
)
NAMES = {
    FLASHINFER: StepPart.ATTENTION,
    "void flashinfer::PrefillWithKVCacheKernel<flashinfer::AttentionKernelTraits<true": StepPart.ATTENTION,
    "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0": StepPart.ATTENTION,
    "void flashinfer::PersistentVariableLengthMergeStatesKernel<8u, 16u, 8u, 4u": StepPart.ATTENTION,
    "void flashinfer::MergeStatesKernel<8u, 16u, __nv_bfloat16": StepPart.ATTENTION,
    "nvjet_sm90_tst_64x32_64x16_1x2_h_bz_TNT": StepPart.DENSE,
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16": StepPart.DENSE,
    "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize96x64x32": StepPart.DENSE,
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::"
    "kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<cute::tuple<int, int, int> >": StepPart.GROUPED,
    "void deep_gemm::sm90_bf16_gemm_impl<(cute::UMMA::Major)0": StepPart.GROUPED,
    "void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 128u, (deep_gemm::GemmType)0": StepPart.DENSE,
    "void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 128u, (deep_gemm::GemmType)1": StepPart.GROUPED,
    "grouped_gemm_fp8_kernel": StepPart.GROUPED,
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": StepPart.DISPATCH,
    "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL": StepPart.COMBINE,
    "void deep_ep::intranode::dispatch<4, 768, 8192>": StepPart.DISPATCH,
    "void deep_ep::intranode::combine<__nv_bfloat16, 4, 768, 4096>": StepPart.COMBINE,
    "Memcpy HtoD (Pinned -> Device)": StepPart.COPIES,
    "Memset (Device)": StepPart.COPIES,
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda": StepPart.COPIES,
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>": (
        StepPart.SAMPLING
    ),
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add": StepPart.OTHER,
}


@pytest.mark.parametrize(("name", "part"), NAMES.items())
def test_parts_of_libraries_kernels(name: str, part: StepPart) -> None:
    assert part_of(name) == part


def test_every_triton_kernel_has_a_part() -> None:
    launched = {
        name
        for path in (ROOT / "kernels").rglob("*.py")
        for name in re.findall(r"^ *(\w+)\[.*\]\($", path.read_text(), re.M)
    }
    assert {"grouped_gemm_kernel", "_add_rms_norm", "push_rows_kernel", "_store_kv"} <= launched
    unknown = sorted(name for name in launched if part_of(name) == StepPart.OTHER)
    assert not unknown, f"timeline_events.RULES: to which part of a step do {unknown} belong?"
    assert part_of("push_rows_kernel") == StepPart.DISPATCH
    assert part_of("weighted_sum_kernel") == part_of("push_sums_kernel") == StepPart.COMBINE
    assert part_of("permute_pairs_few_kernel") == StepPart.EXPERT_ORDER


def test_who_launched_a_kernel_counts() -> None:
    small = "void at::native::vectorized_elementwise_kernel<4, at::native::AbsFunctor<float>"
    assert part_of(small, "sample") == StepPart.SAMPLING
    assert part_of("Memcpy DtoH (Device -> Pinned)", "sample") == StepPart.COPIES
    assert part_of("ncclDevKernel_AllGather_RING_LL", "exchange") == StepPart.VOTES


def span(start: float, end: float, name: str = "kernel") -> Span:
    return Span(name, start, end, row=7, step=0, phase="")


def test_gaps_between_spans_that_overlap() -> None:
    a, b, inside, c = span(0, 10), span(5, 20), span(12, 15), span(30, 40)
    gaps = find_gaps([c, inside, b, a, span(60, 70)], 8, 50)
    assert gaps == [(10, b, c), (10, c, None)]
    assert find_gaps([a, c], 10, 30) == [(20, a, None)]


class Maker:
    """A made-up trace: host phases, calls, and kernels that calls launched."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def add(self, category: str, name: str, start: float, length: float, **args: Any) -> None:
        event = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": length, "tid": 1}
        self.events.append(event | {"args": args})

    def phase(self, name: str, start: float, length: float) -> None:
        self.add("user_annotation", f"phalanx {name}", start, length)

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps({"traceEvents": self.events}))
        return path


def replayed(layers: int, steps: int) -> Maker:
    """Steps of 1000 us on the host, whose graphs run 400 us later: per layer 10 kernels one after the other."""
    made = Maker()
    kernels = (
        *(("_add_rms_norm", 2), ("nvjet_sm90_tst", 3), ("_norm_rotate", 1), (FLASHINFER, 6)),
        *(("nvjet_sm90_tst", 2), ("_forced_route", 1), ("push_rows_kernel", 2)),
        *(("permute_pairs_few_kernel", 1), ("grouped_gemm_kernel", 8), ("push_sums_kernel", 3)),
    )
    for step in range(steps):
        at = 1000.0 * step
        made.phase("step", at, 900)
        made.phase("schedule", at + 1, 20)
        made.phase("exchange", at + 25, 50)
        made.phase("launch", at + 80, 200)
        made.add("cuda_runtime", "cudaGraphLaunch", at + 90, 30, correlation=10 * step)
        made.phase("sample", at + 150, 100)
        made.add("cuda_driver", "cuLaunchKernelEx", at + 160, 5, correlation=10 * step + 1)
        made.phase("wait", at + 300, 580)
        now = at + 400
        for _ in range(layers):
            for name, length in kernels:
                made.add("kernel", name, now, length, stream=7, correlation=10 * step)
                now += length + 1
        made.add("kernel", "at::native::small", now, 4, stream=7, correlation=10 * step + 1)
        made.add("gpu_memcpy", "Memcpy DtoH", now + 2, 4, stream=9, correlation=10 * step + 1)
    return made


def test_covered_share_of_kernels() -> None:
    def kernel(part: StepPart, start: float, end: float) -> Span:
        return replace(span(start, end), part=part)

    spans = [
        kernel(StepPart.DISPATCH, 0, 10),
        kernel(StepPart.DENSE, 4, 7),
        kernel(StepPart.ATTENTION, 6, 9),
        kernel(StepPart.VOTES, 0, 2),  # votes are no compute
        kernel(StepPart.COMBINE, 20, 30),
        kernel(StepPart.GROUPED, 25, 40),
    ]
    assert covered_share(spans) == (5 + 5) / 20
    assert covered_share(spans[1:4]) is None


def test_a_step_by_part(tmp_path: Path) -> None:
    trace = read_trace(replayed(layers=3, steps=4).write(tmp_path / "trace.json"))
    found = summarise(trace)
    parts = found["parts"]
    assert found["step_ms"] == pytest.approx(1.0)
    assert parts["attention"] == {"ms": pytest.approx(0.018), "kernels": 3}
    assert parts["dense GEMM"] == {"ms": pytest.approx(0.015), "kernels": 6}
    assert parts["sampling"] == {"ms": pytest.approx(0.004), "kernels": 1}
    assert parts["copies"] == {"ms": pytest.approx(0.004), "kernels": 1}
    assert found["overlap_ms"] == pytest.approx(0.002)  # the copy beside the last kernel
    busy = 3 * 29e-3 + 8e-3 - 2e-3
    assert found["gaps_ms"] == pytest.approx(1.0 - busy)
    total = sum(part["ms"] for part in parts.values())
    assert total + found["gaps_ms"] - found["overlap_ms"] == pytest.approx(found["step_ms"])
    longest = found["longest_gaps"][0]
    assert (longest["after"], longest["before"]) == ("copies", "norms")


def test_rows_moved_between_gpus_belong_to_their_exchange(tmp_path: Path) -> None:
    made = Maker()
    for step in range(2):
        made.phase("step", 1000.0 * step, 900)
    kernels = [
        *(("pack_rows_kernel", 7, 0), ("Memcpy PtoP", 9, 8_000_000)),
        # another ubatch's sums and rows are made while the first one's rows are on their way
        *(("pack_rows_kernel", 7, 0), ("weighted_sum_kernel", 7, 0), ("Memcpy PtoP", 9, 8_000_000)),
        *(("Memcpy PtoP", 9, 8_000_000), ("_add_rms_norm", 7, 0), ("Memcpy PtoP", 9, 8_000_000)),
        *(("Memcpy PtoP", 9, 7_000_000), ("Memcpy PtoP", 9, 7_000_000), ("Memcpy DtoD", 7, 64)),
    ]
    for step in range(2):
        for index, (name, stream, size) in enumerate(kernels):
            category = "gpu_memcpy" if size else "kernel"
            made.add("cuda_runtime", "call", 1000 * step + index, 1, correlation=100 * step + index)
            args = {"stream": stream, "correlation": 100 * step + index, "bytes": size}
            made.add(category, name, 1000 * step + 50 + 10 * index, 5, **args)
    parts = summarise(read_trace(made.write(tmp_path / "trace.json")))["parts"]
    assert {part: found["kernels"] for part, found in parts.items()} == {
        "dispatch": 6,
        "combine": 3,
        "copies": 1,
        "norms": 1,
    }


def test_a_layer_is_cut_out_from_norm_to_norm(tmp_path: Path) -> None:
    trace = read_trace(replayed(layers=4, steps=3).write(tmp_path / "trace.json"))
    drawing = one_step(trace)
    assert drawing["us"] == pytest.approx(1000)
    begin, end = timeline_report.layer_bounds(drawing, 4)
    assert end - begin == pytest.approx(29 + 10)
    inside = [s[1] for s in drawing["device"] if begin <= s[3] < end]
    assert len(inside) == 10 and inside[0] == "norms" and inside[-1] == "combine"


def test_what_exceeds_the_floor_and_who_is_slow() -> None:
    def rank(attention: float, dispatch: float) -> dict[str, Any]:
        parts = {"attention": {"ms": attention}, "dispatch": {"ms": dispatch}}
        return {"device": {"parts": parts, "gaps_ms": 0.3, "step_ms": 10.0}}

    floors = {"attention": {"floor_ms": 4.0}, "dispatch": {"floor_ms": 0.5}}
    state = {"ranks": [rank(5.0, 2.0), rank(6.0, 1.0)], "floors": floors}
    assert timeline_report.slowest_rank(state) == 1
    assert timeline_report.excesses(state) == [
        ("dispatch", 1.5),
        ("attention", 1.0),
        ("gaps", 0.3),
    ]


def test_kinds_of_layers_have_the_sums_of_their_parts() -> None:
    def device(*ms: float) -> dict[str, Any]:
        names = ("linear attention", "dispatch", "grouped GEMM")
        parts = zip(names, ms, strict=True)
        return {"parts": {name: {"ms": value, "kernels": 30} for name, value in parts}}

    floors = {name: {"floor_ms": 1.0} for name in ("attention", "linear attention", "grouped GEMM")}
    assert timeline_report.kind_rows(floors, device(2, 0.5, 1.5), device(3, 1, 1)) == [
        "| of it delta nets | 2.000 | 3.000 | 1.000 | 50% | | 30 |",
        "| of it experts | 2.000 | 2.000 | 1.000 | 50% | | 60 |",
    ]


def test_a_dry_run_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ("cluster.ranks=1", "cluster.device=cpu", "model.weights=dummy")
    config = resolve_rank_config(load_config(ROOT / "configs" / "local.yaml", overrides))
    states = [State("decode", 2, 4, 90), State("prefill", 2, 20, 20)]
    timeline.check(config, states)
    epoch = Epoch(RankProcess(0, config), Rendezvous("", 0, "alone"), 30)
    epoch.load()
    backends = epoch.start_engine(lambda ingress, outputs: None, lambda step: None).backends
    try:
        loop = Loop(epoch, tmp_path / "trace.json")
        found = [loop.measure(state) for state in states]
        assert not epoch.engine.scheduler.has_work
    finally:
        epoch.process.close()
    for state, measured in zip(states, found, strict=True):
        assert sum(measured["kinds"].values()) == measured["steps"]
        phases = {phase for phase, _, _ in measured["drawing"]["host"]}
        assert phases >= {"step", "schedule", "exchange", "launch", "build", "plan", "sample"}
        assert measured["shape"]["tokens"] == state.seqs * (20 if state.phase == "prefill" else 1)
        assert measured["device"]["parts"]["other"]["kernels"] > 0
    reports = [
        {"stage": "weights"},
        {"start": {"backends": backends, "stages_s": {}}},
        *({"state": state.title, "ranks": [it]} for state, it in zip(states, found, strict=True)),
    ]
    monkeypatch.setattr(timeline, "run_group", lambda *args: Outcome(reports, None))
    options = argparse.Namespace(
        state=states,
        config=ROOT / "configs" / "local.yaml",
        set=overrides,
        ranks=1,
        scale=1.0,
        lengths=1.0,
        patience=1.0,
        budget=1.0,
        commit="abc",
        out=tmp_path / "timeline",
    )
    timeline.measure(options)
    page = (tmp_path / "timeline.md").read_text()
    assert "| gaps |" in page and "1. " in page
    for name in ("timeline-decode-2.png", "timeline-prefill-40.png"):
        assert name in page and (tmp_path / name).stat().st_size > 10_000
    del reports[-1]
    monkeypatch.setattr(timeline, "run_group", lambda *args: Outcome(reports, "rank 0: died"))
    with pytest.raises(SystemExit, match="rank 0: died"):
        timeline.measure(options)
    assert [state["phase"] for state in load(options.out)["states"]] == ["decode"]


def test_states_of_the_command_line() -> None:
    assert timeline.read_state("prefill:2:4096:4096") == State("prefill", 2, 4096, 4096)
    for text in ("prefill", "sleep:1:2:3", "decode:1:2"):
        with pytest.raises(argparse.ArgumentTypeError, match=text):
            timeline.read_state(text)


def test_states_that_do_not_fit_name_the_setting() -> None:
    config = resolve_rank_config(load_config(ROOT / "configs" / "local.yaml"), num_gpus=0)
    with pytest.raises(SystemExit, match=r"scheduler.max_num_seqs is 16, but needs 128"):
        timeline.check(config, [State("decode", 128, 10, 90)])
