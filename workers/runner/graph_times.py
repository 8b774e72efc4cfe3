"""The times of captured forwards by their rows, measured once at the start: what drafts cost before any is verified."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

from workers.runner.cuda_graphs import StepGraphs
from workers.runner.graph_sizes import GraphKey
from workers.speculation.step_times import Curve, StepSeconds
from workers.step.step_sync import GraphMode


def agreed_times(
    graphs: StepGraphs, kept: StepSeconds | None, gather: Callable[[Any], Sequence[Any]]
) -> StepSeconds | None:
    """Return the times of the slowest rank, or those that ranks have `kept` from the first epoch. Collective.

    None: no rank has any. gather: returns the values of all ranks, as JSON carries them.
    """
    own = kept
    if own is None and not graphs.on_demand:
        own = measure_graphs(graphs)
    ranks = gather(None if own is None else asdict(own))
    found = [StepSeconds.read(fields) for fields in ranks if fields is not None]
    return StepSeconds.slowest(found) if found else None


def measure_graphs(graphs: StepGraphs) -> StepSeconds:
    """Return the times of all kinds of graphs of decodes and of drafts. Collective; the graphs are captured."""
    keys = graphs.keys
    most = graphs.sizes.draft_tokens

    def curve(mode: GraphMode, drafts: int) -> Curve:
        rows = [key.rows for key in keys if (key.mode, key.drafts) == (mode, drafts)]
        return tuple(
            (count, graphs.seconds(GraphKey(mode, count, drafts=drafts))) for count in thinned(rows)
        )

    return StepSeconds(
        decode=curve(GraphMode.DECODE, 0),
        verify=curve(GraphMode.VERIFY, 0),
        first=curve(GraphMode.VERIFY, 1) or curve(GraphMode.DECODE, 1),
        one_draft=curve(GraphMode.DRAFT, 1),
        drafts=curve(GraphMode.DRAFT, most) if most > 1 else (),
        most=max(1, most),
    )


def thinned(rows: Iterable[int]) -> list[int]:
    """Return two of `rows` an octave and the largest, ascending: times between them are interpolated.

    One an octave is too few: 24 rows take 0.4 ms more than 16, 32 rows 1.3 ms more than 24 (Qwen3.6-35B-A3B in FP8,
    H200, docs/results/gpu-step-rows.json), because kernels work in tiles of rows.
    """
    found = sorted(rows)
    return [count for count in found if _is_round(count) or count == found[-1]]


def _is_round(count: int) -> bool:
    """Return whether no bit is set behind the first two."""
    return not count & ((1 << max(0, count.bit_length() - 2)) - 1)
