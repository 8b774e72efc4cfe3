"""Examines each engine configuration of an experiment on this machine, before anything starts. Imports torch."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from cluster.commands.check import check
from cluster.config.api_keys import ApiKeyError
from cluster.config.errors import ConfigError, Problem
from cluster.experiments.cells import Cell
from cluster.experiments.workload_section import StepWorkload
from kernels.backends.select import BackendChoiceError
from workers.runner.graph_sizes import GraphsUnavailableError

CAUSES = (ApiKeyError, BackendChoiceError, ConfigError, GraphsUnavailableError)


@dataclass
class MachineReport:
    """Cells that cannot run here, and conditions that only this machine lacks, such as GPUs.

    devices, resolved   by engine: the device, and the configuration without `auto`
    """

    problems: list[Problem] = field(default_factory=list)
    lacking: list[Problem] = field(default_factory=list)
    devices: dict[str, str] = field(default_factory=dict)
    resolved: dict[str, dict[str, Any]] = field(default_factory=dict)


def check_cells(cells: Sequence[Cell]) -> MachineReport:
    """Resolve the configuration of each engine; an error names the first cell that has it."""
    report = MachineReport()
    for cell in cells:
        if cell.engine in report.devices:
            continue
        report.devices[cell.engine] = "cpu"
        try:
            found = check(cell.config, num_api_keys=0)
        except CAUSES as error:
            report.problems.append(Problem(f"cell {cell.index} ({cell.name})", str(error)))
            continue
        report.resolved[cell.engine] = found.config
        device = str(found.config["cluster"]["device"])
        report.devices[cell.engine] = device
        if device == "cuda" and cell.config.cluster.ray_address is None:
            report.lacking += _missing_gpus(cell)
    for cell in cells:
        if isinstance(cell.workload, StepWorkload) and cell.engine in report.resolved:
            report.problems += _too_large(cell, cell.workload, report.resolved[cell.engine])
    return report


def _too_large(cell: Cell, workload: StepWorkload, config: dict[str, Any]) -> list[Problem]:
    """Return the problem of a step that the limits or the KV cache do not allow."""
    limits, cache = config["scheduler"], config["cache"]
    seqs, budget = limits["max_num_seqs"], limits["max_num_batched_tokens"]
    if workload.phase == "decode":
        bounds = {
            "scheduler.max_num_seqs": seqs,
            "half of scheduler.max_num_batched_tokens": budget // 2,
        }
    else:
        bounds = {
            "scheduler.max_num_batched_tokens": budget,
            "of scheduler.max_num_seqs prompts": seqs * (config["model"]["max_model_len"] - 2),
        }
        if cache["num_blocks"] != "auto":
            bounds["half of the KV cache"] = cache["num_blocks"] * cache["block_size"] // 2
    name = min(bounds, key=lambda bound: bounds[bound])
    if workload.tokens <= bounds[name]:
        return []
    most = f"a {workload.phase} step has at most {bounds[name]} ({name})"
    return [Problem(f"cell {cell.index} ({cell.name})", f"{workload.tokens} tokens; {most}")]


def _missing_gpus(cell: Cell) -> list[Problem]:
    import torch

    needed, found = cell.config.cluster.ranks_per_node, torch.cuda.device_count()
    if found >= needed:
        return []
    text = f"needs {needed} GPU(s), this machine has {found}"
    return [Problem(f"cell {cell.index} ({cell.name})", text)]
