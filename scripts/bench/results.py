"""What the reports of the sweeps share: where they were measured, tables in Markdown, and notes that a person added."""

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("triton", "deep_ep", "sgl-deep-ep", "sgl-deep-gemm", "flashinfer-python")
NOTES = "## Notes"


def origin(device: str, num_devices: int, commit: str | None) -> dict[str, Any]:
    """When, where and with what: date, commit, hardware, versions. `commit` as told, else git's."""
    if commit is None:
        command = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU ({platform.machine()})"
    found = {"torch": torch.__version__}
    if device == "cuda":
        found["CUDA"] = str(torch.version.cuda)
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit or "unknown",
        "hardware": f"{num_devices} x {name}",
        "cpus": os.cpu_count(),
        "versions": found,
    }


def origin_line(found: dict[str, Any]) -> str:
    """One sentence of `origin`."""
    versions = ", ".join(f"{name} {number}" for name, number in found["versions"].items())
    return f"{found['hardware']}; {versions}; commit {found['commit']}, {found['date']}."


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Figures to the right, ended by a newline."""
    lines = [head, ["---:"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def save(out: Path, found: dict[str, Any]) -> None:
    """OUT.json."""
    out.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")


def write(
    out: Path,
    found: dict[str, Any],
    text: Callable[[dict[str, Any]], str],
    plot: Callable[[dict[str, Any], Path], None],
) -> None:
    """OUT.md and OUT.png; what an OUT.md that is there has from `## Notes` on stays."""
    page = out.with_suffix(".md")
    notes = kept_notes(page.read_text()) if page.exists() else ""
    page.write_text(text(found) + notes)
    try:
        plot(found, out.with_suffix(".png"))
    except ImportError as error:
        print(f"no plot: {error} (pip install 'phalanx[bench]', then --redraw)", flush=True)


def kept_notes(page: str) -> str:
    """The page's notes with an empty line before them, "" if it has none."""
    begin = page.find(f"\n{NOTES}\n")
    return "" if begin < 0 else page[begin:]


def missing_lines(found: dict[str, str]) -> list[str]:
    """What was not measured, and why."""
    return [f"- not measured: {name}: {reason}" for name, reason in found.items()]
