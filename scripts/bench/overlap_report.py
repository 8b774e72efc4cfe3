"""Tables and plots of what overlap.py measured. Plain figures in, Markdown and a PNG out."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.bench.results import origin_line
from workers.trace import hidden

RESIDENT = "resident"  # the step without an exchange
NOISE = 0.02
Step = tuple[str, int]  # phase, tokens of a rank


def exchange_share(step: dict[str, Any], resident: dict[str, Any]) -> float:
    """How much of a whole step its exchange adds to it."""
    return 1 - resident["whole_ms"] / step["whole_ms"]


def saved_share(step: dict[str, Any], resident: dict[str, Any]) -> float | None:
    """Return `hidden.saved_share`; None where the all-to-alls add less than 2 % to the whole step, which is noise.

    The all-to-alls add the time beyond the same form of the step without them. So the cost of cutting counts on neither
    side, while the cost of overlap (fewer SMs for the experts, memory shared with copies, a lower clock) counts.
    """
    if exchange_share(step, resident) < NOISE:
        return None
    added = {form: step[form] - resident[form] for form in ("whole_ms", "ubatched_ms")}
    return hidden.saved_share(added["ubatched_ms"], added["whole_ms"])


def measured(report: dict[str, Any]) -> dict[str, dict[Step, dict[str, Any]]]:
    """Steps by exchange and size, of the exchanges that ran."""
    return {
        name: {(step["phase"], step["tokens"]): step for step in figures["steps"]}
        for name, figures in report["backends"].items()
        if "steps" in figures
    }


def page(report: dict[str, Any], name: str) -> str:
    """All of the .md but its notes."""
    lines = [
        "# Ubatches: steps whole and in ubatches, by exchange",
        "",
        f"{origin_line(report)} {report['ranks']} ranks. Model {report['model']}, random weights, uniform routing; "
        f"`scheduler.cuda_graphs: {report['cuda_graphs']}`.",
        "",
        *_steps(report),
        "",
        *_best(report),
        "",
        f"![what ubatches gain by tokens and SMs]({name}.png)",
        "",
        *_comm_sms(report),
        *_clocks(report),
        *_others(report),
    ]
    return "\n".join(lines) + "\n"


def _steps(report: dict[str, Any]) -> Iterator[str]:
    found = measured(report)
    resident = found.get(RESIDENT, {})
    head = ["exchange", "step", "tokens a rank", "whole (ms)", "in ubatches (ms)"]
    head += ["tokens/s in ubatches / whole", "exchange of whole", "saved", "covered"]
    head += ["comm_sms", "rounds"]
    yield f"| {' | '.join(head)} |"
    yield "|---|---|" + "---:|" * 9
    for name, steps in found.items():
        comparable = name != RESIDENT and _product(report, name) == _product(report, RESIDENT)
        limit = report["backends"][name].get("best_comm_sms") or "-"
        for (phase, tokens), step in steps.items():
            shares: list[float | None] = [None, None]
            if comparable and (phase, tokens) in resident:
                both = step, resident[phase, tokens]
                shares = [exchange_share(*both), saved_share(*both)]
            traced = report["backends"][name].get("traced", {})
            at_size = (traced.get("phase"), traced.get("tokens")) == (phase, tokens)
            shares.append(traced["covered"] if at_size else None)
            cells = [
                *(name, phase, f"{tokens:,}"),
                *(f"{step[key]:.2f}" for key in ("whole_ms", "ubatched_ms")),
                f"{step['whole_ms'] / step['ubatched_ms']:.3f}",
                *("-" if share is None else f"{100 * share:.0f} %" for share in shares),
                *(str(limit), str(len(step["all_whole_ms"]))),
            ]
            yield f"| {' | '.join(cells)} |"


def _best(report: dict[str, Any]) -> Iterator[str]:
    """Of all exchanges, the fastest whole step against the fastest in ubatches."""
    found = {name: steps for name, steps in measured(report).items() if name != RESIDENT}
    sizes = {size: None for steps in found.values() for size in steps}
    yield "Best of all exchanges with overlap against best without:"
    yield ""
    yield "| step | tokens a rank | best whole | ms | best in ubatches | ms | tokens/s with / without overlap |"
    yield "|---|---:|---|---:|---|---:|---:|"
    for phase, tokens in sizes:
        best = {}
        for form in ("whole_ms", "ubatched_ms"):
            best[form] = min(
                (steps[phase, tokens][form], name)
                for name, steps in found.items()
                if (phase, tokens) in steps
            )
        (whole, without), (ubatched, with_overlap) = best.values()
        yield (
            f"| {phase} | {tokens:,} | {without} | {whole:.2f} | {with_overlap} | {ubatched:.2f} "
            f"| {whole / ubatched:.3f} |"
        )


def _comm_sms(report: dict[str, Any]) -> Iterator[str]:
    swept = {name: f["comm_sms"] for name, f in report["backends"].items() if "comm_sms" in f}
    if not swept:
        return
    limits = list(next(iter(next(iter(swept.values())).values())))
    yield "Prefills in ubatches (ms) by SMs of the exchange:"
    yield ""
    yield "| exchange | tokens a rank | " + " | ".join(limits) + " |"
    yield "|---|" + "---:|" * (1 + len(limits))
    for name, sizes in swept.items():
        for tokens, figures in sizes.items():
            cells = (f"{figures[limit]:.2f}" for limit in limits)
            yield f"| {name} | {int(tokens):,} | {' | '.join(cells)} |"
    yield ""


def _clocks(report: dict[str, Any]) -> Iterator[str]:
    rows = [
        (name, tokens, form, gpus)
        for name, figures in report["backends"].items()
        for tokens, forms in figures.get("clocks", {}).items()
        for form, gpus in forms.items()
        if all(gpus)
    ]
    if not rows:
        return
    yield "Clock of the SMs and power of each rank's GPU while such prefills run:"
    yield ""
    yield "| exchange | tokens a rank | form | MHz | W |"
    yield "|---|---:|---|---|---|"
    for name, tokens, form, gpus in rows:
        clocks, powers = (", ".join(f"{gpu[key]:.0f}" for gpu in gpus) for key in ("mhz", "watts"))
        yield f"| {name} | {int(tokens):,} | {form} | {clocks} | {powers} |"
    yield ""


def _others(report: dict[str, Any]) -> Iterator[str]:
    """Handing over, backends, and what is missing."""
    for name, figures in report["backends"].items():
        if "missing" in figures:
            yield f"- {name}: not measured: {figures['missing']}"
            continue
        backends = ", ".join(f"{family} {kind}" for family, kind in figures["backends"].items())
        cost = figures["yield_ubatch"]
        if figures["failure"] is not None:
            backends += f"; stopped early: {figures['failure']}"
        yield (
            f"- {name}: {backends}; {figures['seconds']:.0f} s in all; {cost['us_a_hand_over']:.2f} us to hand over, "
            f"{cost['ms_a_step']:.3f} ms for the {cost['hand_overs_a_step']} of a step of {cost['layers']} layers"
        )
    yield ""
    yield (
        "Times are the slowest rank's, medians over rounds of alternating forms, each the median of three steps. "
        f"`{RESIDENT}` is the same step without an exchange: the rows of all ranks lie there already. Exchange of "
        f"whole = what the exchange adds to a whole step, beyond `{RESIDENT}`. {hidden.SAVED}, added being the "
        f"time beyond `{RESIDENT}` in the same form; - where it adds less than 2 %, or where the grouped GEMM differs. "
        f"{hidden.COVERED} (rank 0, the largest prefill, from recorded spans)."
    )


def _product(report: dict[str, Any], name: str) -> str | None:
    """Which grouped GEMM a backend ran with: times compare only where it is the same."""
    return report["backends"].get(name, {}).get("backends", {}).get("grouped_gemm")


def plot(report: dict[str, Any], out: Path) -> None:
    """Gain by tokens for both phases, and milliseconds by SMs of the exchange."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5), layout="constrained")
    prefill, decode, sms = figure.subplots(1, 3)
    for axis, phase in ((prefill, "prefill"), (decode, "decode")):
        for name, steps in measured(report).items():
            points = [
                (tokens, step["whole_ms"] / step["ubatched_ms"])
                for (kind, tokens), step in steps.items()
                if kind == phase
            ]
            style = {"ls": "--", "color": "grey"} if name == RESIDENT else {"marker": "o", "ms": 4}
            axis.plot(*zip(*points, strict=True), label=name, **style) if points else None
        axis.axhline(1, color="black", lw=0.8)
        axis.set(
            xscale="log", xlabel="tokens a rank", ylabel="tokens/s in ubatches / whole", title=phase
        )
        sizes = report["sizes"][phase]
        axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        _legend(axis)
    for name, figures in report["backends"].items():
        for tokens, by_limit in figures.get("comm_sms", {}).items():
            limits = [limit for limit in by_limit if limit != "none"]
            values = [by_limit[limit] for limit in limits]
            (line,) = sms.plot(
                [int(n) for n in limits], values, marker="o", ms=4, label=f"{name}, {int(tokens):,}"
            )
            sms.axhline(by_limit["none"], color=line.get_color(), ls=":", lw=1)
    sms.set(
        xlabel="SMs of the exchange (dotted: no limit)",
        ylabel="ms in ubatches",
        title="prefill by comm_sms",
    )
    sms.set_ylim(bottom=0)
    sms.grid(alpha=0.3)
    _legend(sms)
    figure.savefig(out.with_suffix(".png"), dpi=120)


def _legend(axis: Any) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8)
