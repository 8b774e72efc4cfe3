"""Prints the report of `phalanx check --cluster` for people."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from cluster.commands.check_cluster import ClusterReport, NodeReport
from workers.rank.device_memory import size

COLUMNS = ("node", "address", "interface", "free memory", "free GPU memory", "/dev/shm", "clock")


def render_cluster(report: ClusterReport, console: Console) -> None:
    """Print a line a node, the facts that must be equal with a column for each group of equal nodes, and the errors."""
    console.print(_node_table(report.nodes))
    console.print(_fact_table(report.nodes))
    for error in report.errors:
        console.print(f"error: {error}", style="red")
    if not report.errors:
        console.print(f"{len(report.nodes)} node(s), no differences", style="bold")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _node_table(nodes: Sequence[NodeReport]) -> Table:
    table = _table("nodes", *COLUMNS, "checkpoint")
    for node in nodes:
        if node.facts is None or node.checkpoint is None:
            table.add_row(node.name, node.address, *["-"] * 5, "-")
            continue
        gpus = node.facts.free_gpu_memory
        files = node.checkpoint
        table.add_row(
            node.name,
            node.address,
            node.interface,
            size(node.facts.free_memory),
            size(min(gpus)) if gpus else "none",
            size(node.facts.free_shm),
            f"{node.skew_s:+.3f} s" if node.skew_s else "equal",
            f"lacks {len(files.missing)} file(s)" if files.missing else files.digest,
        )
    return table


def _fact_table(nodes: Sequence[NodeReport]) -> Table:
    """Facts as rows; a column for all nodes of equal facts, and one for each other group."""
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for node in nodes:
        if node.facts is not None:
            groups.setdefault(tuple(node.facts.equal.items()), []).append(node.name)
    table = _table("facts", "fact", *(", ".join(names) for names in groups.values()))
    columns = [dict(facts) for facts in groups]
    for name in dict.fromkeys(name for column in columns for name in column):
        values = [column.get(name, "none") for column in columns]
        style = "red" if len(set(values)) > 1 else None
        table.add_row(name, *values, style=style)
    return table
