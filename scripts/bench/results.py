"""What the measurements share: where they were made, tables in Markdown, and files that keep a person's notes."""

import argparse
import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from cluster.bench import machine
from cluster.experiments import origin as source
from kernels.host import cuda_environment
from scripts.bench import ROOT

NOTES = "## Notes"
FLAT_LIST = re.compile(r"\[\n\s*([^\[\]{}]*?)\n\s*\]")  # strings hold no line breaks in JSON

Found = dict[str, Any]
Page = Callable[[Found, str], str]  # of the results and the name of their files, less suffix
Plot = Callable[[Found, Path], None]  # of the results and the path of their files, less suffix


def add_options(
    parser: argparse.ArgumentParser, name: str | None = None, *, drawn: bool = True
) -> None:
    """Where results go, by default to NAME in docs/results; drawing them again; what was measured."""
    out = None if name is None else ROOT / "docs" / "results" / name
    where = "path of the results, less suffix"
    parser.add_argument("--out", type=Path, default=out, required=out is None, help=where)
    if drawn:
        parser.add_argument("--redraw", action="store_true", help="page and plot of OUT.json alone")
    parser.add_argument(
        "--commit", help="the measured commit where there is no git; a + behind it: with changes"
    )


def measure_or_redraw(
    args: argparse.Namespace,
    measure: Callable[[argparse.Namespace], None],
    page: Page,
    plot: Plot,
) -> None:
    """What the options ask for: `measure`, in an environment to start ranks from, or to draw OUT.json again."""
    if args.redraw:
        write(args.out, load(args.out), page, plot)
        return
    cuda_environment.prepare(os.environ)
    measure(args)


def origin(num_gpus: int, commit: str | None, *, served: bool = False) -> Found:
    """Return the date, the commit, whether the tree was clean, the hardware with the used GPUs, and the versions.

    `served`: a whole server is measured, so the versions include those of its HTTP packages.
    """
    commit = commit or source.commit()
    if commit is None:  # a figure without its commit cannot be repeated
        raise SystemExit("git does not give the measured commit: state it as --commit HASH")
    hardware = machine.hardware()
    hardware["gpus"] = hardware["gpus"][:num_gpus]
    versions = machine.versions() if served else {"python": platform.python_version()}
    return {
        "date": source.now(),
        "commit": commit.removesuffix("+"),
        "clean_tree": not commit.endswith("+"),
        "hardware": hardware,
        "versions": versions | source.compute_versions(),
    }


def devices(found: Found) -> str:
    """`4 x NVIDIA H200`, or the processor."""
    hardware = found["hardware"]
    if isinstance(hardware, str):  # in the oldest results
        return hardware
    gpus = hardware["gpus"]
    return f"{len(gpus)} x {gpus[0].split(',')[0]}" if gpus else hardware["cpu"]


def origin_line(found: Found) -> str:
    """One sentence of `origin`."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    commit = f"commit {found['commit']}, " if "commit" in found else ""  # the oldest have none
    return f"{devices(found)}; {versions}; {commit}{found['date'][:10]}."


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Figures to the right, ended by a newline."""
    lines = [head, ["---:"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def missing_lines(found: dict[str, str]) -> list[str]:
    """What was not measured, and why."""
    return [f"- not measured: {name}: {reason}" for name, reason in found.items()]


def save(out: Path, found: Found) -> None:
    """OUT.json, with lists of plain values on a line of their own."""
    out.parent.mkdir(parents=True, exist_ok=True)
    text = FLAT_LIST.sub(_on_one_line, json.dumps(found, indent=1))
    out.with_suffix(".json").write_text(text + "\n")


def _on_one_line(found: re.Match[str]) -> str:
    return "[" + re.sub(r"\s*\n\s*", " ", found[1]) + "]"


def load(out: Path) -> Found:
    """What was saved."""
    path = out.with_suffix(".json")
    if not path.is_file():
        raise SystemExit(f"{path} is missing: measure first, or name other results by --out")
    return json.loads(path.read_text())


def write(out: Path, found: Found, page: Page, plot: Plot | None = None) -> None:
    """OUT.md and its plot; what an OUT.md that is there has from `## Notes` on stays."""
    path = out.with_suffix(".md")
    notes = kept_notes(path.read_text()) if path.exists() else ""
    path.write_text(page(found, out.stem) + notes)
    try:
        if plot is not None:
            plot(found, out)
    except ImportError as error:
        print(f"no plot: {error} (pip install matplotlib, then --redraw)", flush=True)


def kept_notes(page: str) -> str:
    """The page's notes with an empty line before them, "" if it has none."""
    begin = page.find(f"\n{NOTES}\n")
    return "" if begin < 0 else page[begin:]
