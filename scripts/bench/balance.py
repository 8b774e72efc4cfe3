"""Simulates steps under skewed routing: what planning, spare slots and spreading shared experts gain. CPU, no ranks.

    python -m scripts.bench.balance

Writes OUT.json and OUT.md. Experts are chosen by a zipf law. The time of a step is that of the committed timeline of
four H200, of which the grouped products take the time of the busiest rank: that of its rows, or of reading its experts.
A step takes one copy of each expert, or spreads the tokens over all, whichever is faster. Where the popularity changes,
the map is that of a planner that saw the loads of before, until it has read new ones and moved one layer a step.
"""

import argparse
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from kernels.routing.balance import plan_layer, rank_loads
from scripts.bench import ROOT, results
from scripts.bench.results import Found, markdown_table
from workers.step.step_sync import LOAD_STEPS

TIMELINE = ROOT / "docs" / "results" / "gpu-timeline"
EXPONENTS, RANKS, SPARE = (0.5, 1.0, 1.5), (4, 8, 16, 32, 64), (0, 1, 2)
EXPERTS, TOP_K, LAYERS, MEASURED_RANKS = 128, 8, 48, 4
WATERFILL_TOKENS = 1024  # of a rank
SIMULATED_LAYERS, STEPS, TOKENS_OF_LAW = 3, 10, 20_000
CHANGE_S = 10.0  # seconds from one popularity to the next
WATERFILL = {"DeepSeek-V3, Qwen3.5-35B-A3B": (256, 8), "GLM-4.5-Air": (128, 8)}


class Phase(NamedTuple):
    """Steps of one kind, by the timeline.

    ms        the slowest rank
    gemm_ms   its grouped products
    read_ms   of reading the weights of one expert in all layers
    row_ms    of one (token, expert) pair of a rank in all layers
    """

    name: str
    tokens: int
    ms: float
    gemm_ms: float
    read_ms: float
    row_ms: float

    def busiest_ms(self, rows_R: np.ndarray, read_R: np.ndarray) -> float:
        """Return the time of the grouped products on the busiest rank: by its rows, or by the experts that it reads."""
        return float(np.maximum(rows_R * self.row_ms, read_R * self.read_ms).max())


def main() -> None:
    """Simulate and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    results.add_options(parser, "expert-balance")
    args = parser.parse_args()
    results.measure_or_redraw(args, _simulate, page, lambda found, out: None)


def _simulate(args: argparse.Namespace) -> None:
    found: Found = {**results.origin(0, args.commit), "method": __doc__}
    found |= {"experts": EXPERTS, "top_k": TOP_K, "change_s": CHANGE_S, "load_steps": LOAD_STEPS}
    found["phases"] = [phase._asdict() for phase in phases()]
    found["steps"] = [*_steps()]
    found["waterfill"] = [*_waterfill()]
    results.save(args.out, found)
    results.write(args.out, found, page)


def phases() -> list[Phase]:
    """The phases of the timeline: whole steps while profiled, and the grouped products in them."""
    found = []
    for state in results.load(TIMELINE)["states"]:
        ranks = [rank["device"] for rank in state["ranks"]]
        gemm = max(rank["parts"]["grouped GEMM"]["ms"] for rank in ranks)
        step, tokens = max(rank["step_ms"] for rank in ranks), state["shape"]["tokens"]
        found.append((state["phase"], tokens, step, gemm))
    # Decodes of few tokens read the experts of a rank; prompts multiply.
    read_ms = min(gemm for *_, gemm in found) / (EXPERTS / MEASURED_RANKS)
    row_ms = max(gemm / (tokens * TOP_K) for phase, tokens, _, gemm in found if phase == "prefill")
    return [
        Phase(f"{phase} {tokens}", tokens, step, gemm, read_ms, row_ms)
        for phase, tokens, step, gemm in found
    ]


def law(exponent: float, num_experts: int, top_k: int, generator: np.random.Generator) -> Any:
    """Return the share of tokens that choose each expert, float64 [E], in an order of popularity at random."""
    popular = -exponent * np.log(np.arange(1, num_experts + 1))
    draws = generator.gumbel(size=(TOKENS_OF_LAW, num_experts)) + generator.permutation(popular)
    chosen = np.argpartition(-draws, top_k, axis=1)[:, :top_k]
    return np.bincount(chosen.ravel(), minlength=num_experts) / TOKENS_OF_LAW


def contiguous(num_experts: int, num_ranks: int, spare: int) -> tuple[list[int], np.ndarray]:
    """Return offsets and the map that ranks begin with: spare slots hold the first experts of the next rank."""
    share = num_experts // num_ranks
    slots = np.arange(share + spare)
    present = [(slots + share * rank) % num_experts for rank in range(num_ranks)]
    return (np.arange(num_ranks + 1) * (share + spare)).tolist(), np.concatenate(present)


def _steps() -> Iterator[dict[str, Any]]:
    for exponent, num_ranks, spare in product(EXPONENTS, RANKS, SPARE):
        generator = np.random.default_rng(0)
        layers = [_layer(exponent, num_ranks, spare, generator) for _ in range(SIMULATED_LAYERS)]
        sums = {key: np.mean([layer[key] for layer in layers], axis=0) for key in layers[0]}
        head = {"exponent": exponent, "ranks": num_ranks, "spare": spare}
        rounded = {key: np.round(value, 4).tolist() for key, value in sums.items()}
        yield {**head, **rounded, **_shares(sums)}


def _layer(
    exponent: float, num_ranks: int, spare: int, generator: np.random.Generator
) -> dict[str, Any]:
    """Return the expected load of the busiest rank over the mean by map, and the time of steps by map and phase.

    contiguous, planned, stale   stale: planned for another popularity
    ms_...    of the grouped products, of each phase; ms_even: if all ranks had equal rows and experts
    moved     share of the slots that the plan changes
    """
    before, share_E = (law(exponent, EXPERTS, TOP_K, generator) for _ in range(2))
    starts, present = contiguous(EXPERTS, num_ranks, spare)
    stale = plan_layer(before, starts, present)
    maps = {"contiguous": present, "planned": plan_layer(share_E, starts, stale), "stale": stale}
    found: dict[str, Any] = {"moved": float((maps["planned"] != stale).mean())}
    for key, slots in maps.items():
        loads = rank_loads(share_E, slots, starts)
        found[key] = float(loads.max() / loads.mean())
        times = [_gemm_ms(phase, share_E, starts, slots, generator) for phase in phases()]
        found[f"ms_{key}"] = [busiest for busiest, _ in times]
        found["ms_even"] = [even for _, even in times]
    return found


def _gemm_ms(
    phase: Phase,
    share_E: np.ndarray,
    starts: list[int],
    slots_S: np.ndarray,
    generator: np.random.Generator,
) -> tuple[float, float]:
    """Return the time of the grouped products on the busiest rank, and that of equal ranks, in the mean of steps."""
    num_ranks, times = len(starts) - 1, []
    rank_S = np.repeat(np.arange(num_ranks), np.diff(starts))
    copies_E = [rank_S[slots_S == expert] for expert in range(EXPERTS)]
    for _ in range(STEPS):
        tokens_E = generator.binomial(phase.tokens * num_ranks, share_E)
        rows_R = rank_loads(tokens_E, slots_S, starts)
        read_R = np.bincount(rank_S, tokens_E[slots_S] > 0)
        spread = phase.busiest_ms(rows_R, read_R)
        single = phase.busiest_ms(*_one_copy(tokens_E, copies_E, num_ranks))
        even_R = np.full(num_ranks, tokens_E.sum() / num_ranks)
        read_even_R = np.full(num_ranks, np.count_nonzero(tokens_E) / num_ranks)
        times.append((min(spread, single), phase.busiest_ms(even_R, read_even_R)))
    busiest, even = np.mean(times, axis=0).tolist()
    return busiest, even


def _one_copy(
    tokens_E: np.ndarray, copies_E: list[np.ndarray], num_ranks: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return rows and experts of each rank where all tokens of an expert go to one copy."""
    rows_R, read_R = np.zeros(num_ranks), np.zeros(num_ranks)
    chosen = np.flatnonzero(tokens_E)
    for expert in sorted(chosen.tolist(), key=lambda expert: (len(copies_E[expert]), expert)):
        ranks = copies_E[expert]
        rank = ranks[read_R[ranks].argmin()]
        rows_R[rank] += tokens_E[expert]
        read_R[rank] += 1
    return rows_R, read_R


def _shares(sums: dict[str, Any]) -> dict[str, list[float]]:
    """Return the tokens per second over those of equal loads, by phase: without a plan, planned, and over changes."""
    names = ("share_contiguous", "share_planned", "share_changing")
    found: dict[str, list[float]] = {name: [] for name in names}
    for at, phase in enumerate(phases()):
        rest = phase.ms - phase.gemm_ms
        even, *ms = (
            rest + sums[f"ms_{key}"][at] for key in ("even", "contiguous", "planned", "stale")
        )
        # In the mean half of the interval of readings until the loads are known, and half of the layers' steps.
        late = min(1.0, (LOAD_STEPS / 2 + LAYERS / 2) * ms[2] / (1e3 * CHANGE_S))
        changing = late * ms[2] + (1 - late) * ms[1]
        for name, time in zip(names, (*ms[:2], changing), strict=True):
            found[name].append(round(even / time, 4))
    return found


def _waterfill() -> Iterator[dict[str, Any]]:
    """The rows of the busiest rank, with a shared expert as wide as a routed one, over those where it fills up."""
    for (model, (num_experts, top_k)), num_ranks, spare in product(
        WATERFILL.items(), RANKS[1:], SPARE
    ):
        generator = np.random.default_rng(1)
        share_E = law(1.0, num_experts, top_k, generator)
        starts, present = contiguous(num_experts, num_ranks, spare)
        maps = {"contiguous": present, "planned": plan_layer(share_E, starts, present)}
        row: dict[str, Any] = {"model": model, "ranks": num_ranks, "spare": spare}
        for key, slots in maps.items():
            gains = []
            for _ in range(STEPS):
                tokens_E = generator.binomial(WATERFILL_TOKENS * num_ranks, share_E)
                loads = rank_loads(tokens_E, slots, starts)
                filled = max(loads.max(), loads.mean() + WATERFILL_TOKENS)
                gains.append((loads.max() + WATERFILL_TOKENS) / filled - 1)
            row[f"gain_{key}"] = round(float(np.mean(gains)), 4)
        yield row


def page(found: Found, name: str) -> str:
    """The page of the results."""
    lines = [
        "# Experts under skewed routing, simulated\n",
        f"{results.origin_line(found)} Written by `python -m scripts.bench.balance`: a simulation, "
        "no measurement of ranks.\n",
        f"{found['experts']} experts, top-{found['top_k']}, zipf law with exponent s. Steps are those of "
        "[four H200](gpu-timeline.md), of which the grouped products take the time of the busiest "
        "rank. Spare slots: redundant slots of each rank. Tokens per second are over those of equal "
        "loads: with contiguous experts, planned, and where the popularity of all experts changes "
        f"every {found['change_s']:g} s (loads are read every {found['load_steps']} steps, and one "
        "layer moves a step).\n",
    ]
    for at, phase in enumerate(found["phases"]):
        lines.append(
            f"## {phase['name'].capitalize()} tokens a rank\n\n{_table(found['steps'], at)}"
        )
    lines.append(
        "## Shared experts that fill up\n\nRows of the busiest rank in a prefill of "
        f"{WATERFILL_TOKENS:,} tokens a rank, s = 1, with a shared expert as wide as a routed one: "
        "each rank's own tokens, over tokens that go to the ranks with the fewest rows. Traffic of "
        "these tokens is not counted, so the gain is an upper bound for the experts alone.\n"
    )
    rows = [
        [
            *(it["model"], f"{it['ranks']}", f"{it['spare']}"),
            *(f"{it['gain_contiguous']:.1%}", f"{it['gain_planned']:.1%}"),
        ]
        for it in found["waterfill"]
    ]
    head = ["model", "ranks", "spare slots", "gain, contiguous", "gain, planned"]
    lines.append(markdown_table(head, rows))
    return "\n".join(lines)


def _table(steps: list[Found], phase: int) -> str:
    head = ["s", "ranks", "spare slots", "busiest / mean rows, contiguous", "planned"]
    head += ["tokens/s, contiguous", "planned", "changing", "slots that change"]
    rows = [
        [
            *(f"{it['exponent']}", f"{it['ranks']}", f"{it['spare']}"),
            *(f"{it['contiguous']:.2f}", f"{it['planned']:.2f}"),
            *(f"{it[f'share_{key}'][phase]:.2f}" for key in ("contiguous", "planned", "changing")),
            f"{it['moved']:.0%}",
        ]
        for it in steps
    ]
    return markdown_table(head, rows)


if __name__ == "__main__":
    main()
