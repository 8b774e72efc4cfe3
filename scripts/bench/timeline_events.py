"""What a profiled step did: kernels by part of the step, gaps between them, what the host did meanwhile. Plain data.

Reads the traces that torch.profiler exports. Times are microseconds.
"""

import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scripts.bench.step_work import StepPart

# Annotations of the host; the profiled loop makes them.
PREFIX = "phalanx "
STEP, EXCHANGE, SAMPLE = "step", "exchange", "sample"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
# Rows that copy engines move to other GPUs; smaller copies are no exchange.
BETWEEN_GPUS, EXCHANGED_BYTES = r"Memcpy (PtoP|DtoD)", 2**19
PACKS_ROWS = r"pack_rows|weighted_sum"  # the kernels that make what they move

ALL2ALL_PARTS = (StepPart.DISPATCH, StepPart.COMBINE)

# The first that is found in a kernel's name.
RULES: tuple[tuple[StepPart, str], ...] = (
    (
        StepPart.COPIES,
        r"^Mem(cpy|set)|direct_copy_kernel|FillFunctor|CatArrayBatchedCopy|_copy_pieces|_step_back",
    ),
    (
        StepPart.QK_NORM,
        r"\b_norm_rotate|_store_(fp8|kv|latents)|QKRMSNorm|ApplyRotary|AppendPagedKV",
    ),
    (
        StepPart.ATTENTION,
        r"(Prefill|Decode|POD)With\w*KVCache|MergeState|AttentionSum|_list_pages|flash_fwd|fmha"
        r"|_expand_keys|expand_fp8|read_latents|_merge_attention|merge_chunks|paged_attention"
        r"|(paged|latent|shared|warp)_decode",
    ),
    (
        StepPart.LINEAR_ATTENTION,
        r"\b_(advance|convolve|couple|gated_norm|scan)\b|token_gates|move_states|store_tails",
    ),
    (StepPart.NORMS, r"_add_rms_norm|RMSNorm"),
    (StepPart.ROUTING, r"_route_(top_k|groups)|_forced_route"),
    (StepPart.COMBINE, r"push_sums|weighted_sum|deep_ep::.*combine|nccl.*ReduceScatter"),
    (
        StepPart.DISPATCH,
        r"push_rows|pack_rows|deep_ep::.*(dispatch|layout)|nccl.*(AllGather|SendRecv)",
    ),
    (StepPart.EXPERT_ORDER, r"permute_pairs|count_pairs|scan_counts|scatter_(rows|fp8)"),
    (
        StepPart.DENSE,
        r"quantise_rows|skinny_(linear|fp8)|expand_four_bit|lora_(expand|shrink|tiles)|sm90_fp8_gemm.*GemmType\)0",
    ),
    (
        StepPart.GROUPED,
        r"grouped_gemm(_fp8)?_kernel|GroupProblemShape|deep_gemm::|sm90_(bf16|fp8)_gemm",
    ),
    (StepPart.ACTIVATION, r"gated_(activation|sum)|silu|[Gg]elu"),
    (StepPart.SAMPLING, r"_penalise|_enter_draws|_mark_invalid|ArgMax|Sampling"),
    (StepPart.DENSE, r"nvjet|cublas|gemm|gemv|splitKreduce|cutlass"),
)


@dataclass(frozen=True)
class Span:
    """Something that ran.

    row     stream of a kernel; 0 for the host
    step    which of the profiled ones launched it
    phase   of the host, innermost, when it was launched, or itself
    part    of a kernel
    """

    name: str
    start: float
    end: float
    row: int
    step: int
    phase: str
    part: StepPart = StepPart.OTHER


@dataclass(frozen=True)
class Trace:
    """The profiled steps of one rank: what ran on the device, and the host's phases."""

    device: list[Span]
    host: list[Span]


def part_of(name: str, phase: str = "") -> StepPart:
    """The part of a step that a kernel of this name belongs to, if it was launched in this phase of the host."""
    if phase == EXCHANGE:
        return StepPart.VOTES
    for part, pattern in RULES:
        # What is drawn from logits takes all sorts of small kernels.
        if phase == SAMPLE and part != StepPart.COPIES:
            return StepPart.SAMPLING
        if re.search(pattern, name):
            return part
    return StepPart.OTHER


def read_trace(path: Path) -> Trace:
    """A trace of torch.profiler. On a machine without GPUs the outermost operators stand in for kernels."""
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    by_category = defaultdict(list)
    for event in events:
        by_category[event.get("cat")].append(event)
    marks = [e for e in by_category["user_annotation"] if e["name"].startswith(PREFIX)]
    steps = sorted((e for e in marks if e["name"] == PREFIX + STEP), key=lambda e: e["ts"])
    assert steps, f"{path} holds no step"
    host = _Host(marks, [step["ts"] for step in steps])
    launches = sorted(
        (e for category in ON_DEVICE for e in by_category[category]), key=lambda e: e["ts"]
    )
    if not launches:
        ops = _outermost(by_category["cpu_op"], steps[0]["tid"])
        return Trace([host.span(op, op["ts"], 0) for op in ops], host.spans)
    called = {
        call["args"]["correlation"]: call["ts"]
        for category in CALLS
        for call in by_category[category]
        if "correlation" in call.get("args", {})
    }
    device, when = [], steps[0]["ts"]
    for event in launches:
        # What was launched by no call that was seen came with what ran before it.
        when = called.get(event["args"].get("correlation"), when)
        device.append(host.span(event, when, int(event["args"].get("stream", 0))))
    moved = [event["args"].get("bytes", 0) for event in launches]
    return Trace(_with_rows_moved(device, moved), host.spans)


def _with_rows_moved(device: Sequence[Span], moved: Sequence[int]) -> list[Span]:
    """Copies between GPUs belong to the exchange whose rows they move; `moved` bytes each.

    Exchanges are carried out in the order in which their rows were packed or summed, each by as many copies.
    """
    ways = [
        StepPart.DISPATCH if "pack_rows" in span.name else StepPart.COMBINE
        for span in device
        if re.search(PACKS_ROWS, span.name)
    ]
    copies = [
        index
        for index, (span, size) in enumerate(zip(device, moved, strict=True))
        if size >= EXCHANGED_BYTES and re.match(BETWEEN_GPUS, span.name)
    ]
    found = list(device)
    for number, index in enumerate(copies if ways else ()):
        way = ways[number * len(ways) // len(copies)]
        found[index] = replace(found[index], part=way)
    return found


class _Host:
    """Which step and phase the host was in."""

    def __init__(self, marks: Sequence[dict[str, Any]], step_starts: Sequence[float]):
        self._step_starts = step_starts
        self._marks = sorted(marks, key=lambda e: e["ts"])
        self._starts = [mark["ts"] for mark in self._marks]
        self.spans = [
            Span(
                _phase(mark), *_times(mark), row=0, step=self._step(mark["ts"]), phase=_phase(mark)
            )
            for mark in self._marks
        ]

    def span(self, event: dict[str, Any], called: float, row: int) -> Span:
        phase = self._phase(called)
        part = part_of(event["name"], phase)
        return Span(event["name"], *_times(event), row, self._step(called), phase, part)

    def _step(self, when: float) -> int:
        return max(0, bisect_right(self._step_starts, when) - 1)

    def _phase(self, when: float) -> str:
        """Of the marks that hold this moment, the one that began last."""
        for index in range(bisect_right(self._starts, when) - 1, -1, -1):
            mark = self._marks[index]
            if when <= mark["ts"] + mark["dur"]:
                return _phase(mark)
            if mark["name"] == PREFIX + STEP:
                break
        return ""


def _phase(mark: dict[str, Any]) -> str:
    return mark["name"].removeprefix(PREFIX)


def _times(event: dict[str, Any]) -> tuple[float, float]:
    return event["ts"], event["ts"] + event["dur"]


def _outermost(ops: Iterable[dict[str, Any]], thread: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for op in sorted((op for op in ops if op["tid"] == thread), key=lambda e: (e["ts"], -e["dur"])):
        if not found or op["ts"] >= sum((found[-1]["ts"], found[-1]["dur"])):
            found.append(op)
    return found


def step_ends(device: Sequence[Span]) -> list[float]:
    """When the device had done all of each step."""
    ends: defaultdict[int, float] = defaultdict(float)
    for span in device:
        ends[span.step] = max(ends[span.step], span.end)
    return [ends[step] for step in sorted(ends)]


def find_gaps(
    spans: Iterable[Span], begin: float, end: float
) -> list[tuple[float, Span | None, Span | None]]:
    """(length, span before, span after) of each time between begin and end in which none of the spans ran."""
    found, reached, last = [], begin, None
    for span in sorted(spans, key=lambda s: s.start):
        if span.end <= begin and (last is None or span.end > last.end):
            last = span
        if span.end <= begin or span.start >= end:
            continue
        if span.start > reached:
            found.append((span.start - reached, last, span))
        if span.end > reached:
            reached, last = span.end, span
    if end > reached:
        found.append((end - reached, last, None))
    return found


def summarise(trace: Trace) -> dict[str, Any]:
    """Milliseconds of a step by part, and gaps; the first step fills the device and is left out.

    step_ms = sum of all parts + gaps_ms - overlap_ms, in which more than one kernel ran.
    """
    ends = step_ends(trace.device)
    assert len(ends) >= 2, f"profile two steps or more, found {len(ends)}"
    begin, end, steps = ends[0], ends[-1], len(ends) - 1
    spans = [span for span in trace.device if span.step > 0]
    parts: defaultdict[str, list[float]] = defaultdict(list)
    names: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for span in spans:
        parts[span.part].append(span.end - span.start)
        names[span.name, span.part].append(span.end - span.start)
    gaps = find_gaps(trace.device, begin, end)
    idle = sum(length for length, _, _ in gaps)
    total = sum(map(sum, parts.values()))
    per_step = 1e-3 / steps
    top = sorted(names.items(), key=lambda item: -sum(item[1]))[:40]
    longest = sorted(gaps, key=lambda gap: -gap[0])[:5]
    return {
        "step_ms": (end - begin) * per_step,
        "gaps_ms": idle * per_step,
        "num_gaps": len(gaps) / steps,
        "overlap_ms": (total + idle - (end - begin)) * per_step,
        "covered_share": covered_share(spans),
        "parts": {
            part: {"ms": sum(us) * per_step, "kernels": len(us) / steps}
            for part, us in parts.items()
        },
        "longest_gaps": [
            {"us": us, "after": _label(before), "before": _label(after)}
            for us, before, after in longest
        ],
        "kernels": [
            {"name": name[:100], "part": part, "ms": sum(us) * per_step, "count": len(us) / steps}
            for (name, part), us in top
        ],
    }


def covered_share(spans: Sequence[Span]) -> float | None:
    """Return the share of the time of dispatches and combines in which other kernels run; None without any of both."""
    in_flight = _disjoint(s for s in spans if s.part in ALL2ALL_PARTS)
    computing = _disjoint(s for s in spans if s.part not in (*ALL2ALL_PARTS, StepPart.VOTES))
    if not in_flight:
        return None
    total = sum(end - begin for begin, end in in_flight)
    covered = sum(
        max(0.0, min(end, other_end) - max(begin, other_begin))
        for begin, end in in_flight
        for other_begin, other_end in computing
    )
    return covered / total


def _disjoint(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return the time of the spans as intervals in order, without overlaps."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted((span.start, span.end) for span in spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _label(span: Span | None) -> str:
    return "nothing" if span is None else span.part


def one_step(trace: Trace) -> dict[str, Any]:
    """What is drawn: a step in the middle, from the end of the one before to its own. Times count from its start.

    device   [name, part, stream, start, end] of each kernel in it
    host     [phase, start, end]
    """
    ends = step_ends(trace.device)
    middle = max(1, len(ends) // 2)
    begin, end = ends[middle - 1], ends[middle]

    def inside(spans: Iterable[Span]) -> list[Span]:
        return [span for span in spans if span.end > begin and span.start < end]

    def times(span: Span) -> tuple[float, float]:
        return round(span.start - begin, 2), round(span.end - begin, 2)

    return {
        "us": round(end - begin, 2),
        "device": [
            [span.name[:60], span.part, span.row, *times(span)] for span in inside(trace.device)
        ],
        "host": [[span.phase, *times(span)] for span in inside(trace.host)],
    }
