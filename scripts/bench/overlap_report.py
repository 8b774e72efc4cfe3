"""Tables of what overlap.py measured. Plain figures in, Markdown out."""

import statistics
from collections.abc import Iterator
from typing import Any

from scripts.bench.results import Found, origin_line

RESIDENT = "resident"  # the step without an all-to-all
NOISE = 0.02
FORMS = ("whole_ms", "ubatched_ms")
HIDDEN = (
    "resident: the same step without an all-to-all. most possible: the whole step over the resident whole step, which "
    "would be gained if all that the all-to-all adds were hidden and cutting cost nothing. hidden: 1 - (time that the "
    "all-to-all adds to the step in ubatches) / (time that it adds to the whole step), each beyond `resident` in the "
    "same form; - where it adds less than 2 %."
)
HEAD = (
    *("all-to-all", "tokens a rank", "whole (ms)", "in ubatches (ms)", "whole / in ubatches"),
    *("most possible", "hidden", "SMs", "rounds"),
)


def medians(step: Found) -> dict[str, float]:
    """Milliseconds of both forms."""
    return {form: statistics.median(step[form]) for form in FORMS}


def shares(step: dict[str, float], resident: dict[str, float]) -> tuple[float, float | None]:
    """Return the most possible gain, and the hidden share; None where the all-to-all adds less than NOISE."""
    most = step["whole_ms"] / resident["whole_ms"]
    added = [step[form] - resident[form] for form in FORMS]
    if 1 - 1 / most < NOISE:
        return most, None
    return most, 1 - added[1] / added[0]


def steps(group: Found) -> dict[str, dict[int, dict[str, float]]]:
    """Medians by all-to-all and tokens, of those that were measured."""
    return {
        name: {step["tokens"]: medians(step) for step in figures["steps"]}
        for name, figures in group["all2alls"].items()
        if "steps" in figures
    }


def best(group: Found, tokens: int) -> dict[str, tuple[float, str]]:
    """Form to the shortest time of any all-to-all and its name; empty if none was measured."""
    found = {name: of[tokens] for name, of in steps(group).items() if tokens in of}
    found.pop(RESIDENT, None)
    return {form: min((of[form], name) for name, of in found.items()) for form in FORMS if found}


def page(report: Found, name: str) -> str:
    """All of the .md but its notes."""
    lines = [
        "# Steps whole and in ubatches, by all-to-all and grouped GEMM",
        "",
        f"{origin_line(report)} {report['ranks']} ranks. Model {report['model']}, {report['layers']} layers, random "
        "weights, uniform routing. Times are the slowest rank's, medians over rounds of alternating forms, each the "
        f"median of three steps. {HIDDEN}",
        "",
    ]
    for group in report["groups"]:
        lines += [f"## {group['phase']}, {group['gemm']}", "", *_table(group), "", *_best(group)]
        lines += [*_notes(group), ""]
    return "\n".join(lines)


def _table(group: Found) -> Iterator[str]:
    found = steps(group)
    yield f"| {' | '.join(HEAD)} |"
    yield "|---|" + "---:|" * (len(HEAD) - 1)
    for name, sizes in found.items():
        limit = group["all2alls"][name].get("comm_sms")
        rounds = len(group["all2alls"][name]["steps"][0]["whole_ms"])
        for tokens, step in sizes.items():
            cells = [name, f"{tokens:,}", *(f"{step[form]:.3f}" for form in FORMS)]
            cells.append(f"{step['whole_ms'] / step['ubatched_ms']:.3f}")
            most, hides = "-", "-"
            if name != RESIDENT and tokens in found.get(RESIDENT, {}):
                ratio, share = shares(step, found[RESIDENT][tokens])
                most = f"{ratio:.3f}"
                hides = "-" if share is None else f"{100 * share:.0f} %"
            cells += [most, hides, str(limit or "-"), str(rounds)]
            yield f"| {' | '.join(cells)} |"


def _best(group: Found) -> Iterator[str]:
    sizes = sorted({tokens for of in steps(group).values() for tokens in of})
    for tokens in sizes:
        found = best(group, tokens)
        if not found:
            continue
        (whole, whole_name), (cut, cut_name) = (found[form] for form in FORMS)
        yield (
            f"- {tokens:,} tokens: best whole ({whole_name}, {whole:.3f} ms) over best in ubatches "
            f"({cut_name}, {cut:.3f} ms): **{whole / cut:.3f}**"
        )


def _notes(group: Found) -> Iterator[str]:
    for name, figures in group["all2alls"].items():
        if "by_comm_sms" in figures:
            tried = ", ".join(f"{sms}: {ms:.3f}" for sms, ms in figures["by_comm_sms"].items())
            yield f"- {name}, largest step in ubatches by SMs of the all-to-all (ms): {tried}"
        for form, gpus in figures.get("clocks", {}).items():
            read = "; ".join(_clock(gpu) for gpu in gpus)
            yield f"- {name}, largest step {form}: {read}"
        if "missing" in figures:
            yield f"- {name}: {figures['missing']}"


def _clock(gpu: dict[str, Any]) -> str:
    return f"{gpu['gpu_mhz']:.0f} MHz at {gpu['gpu_watts']:.0f} W" if gpu else "no readings"
