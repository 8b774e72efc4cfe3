"""Draws a session as one PNG: latencies as distributions, rate and first token over time.

Needs matplotlib, which only the `bench` extra installs; nothing else of the benchmark imports it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cluster.bench.session import ServerRun, Session
from cluster.bench.settings import BenchError
from cluster.bench.stream import Answer

NUM_BINS = 60
DOTS_PER_INCH = 130


def check_matplotlib() -> None:
    """Raise BenchError if matplotlib is missing. Called before the load runs."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BenchError("--plot needs matplotlib: pip install matplotlib") from None


def draw(session: Session, title: str, limits: Mapping[str, float], path: Path) -> None:
    """Write the picture: one colour for each server, dashed lines for the limits of goodput."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    figure.suptitle(title, fontsize=10)
    axes = figure.subplots(2, 2)
    for index, server in enumerate(session.servers):
        style = {"color": f"C{index}", "label": server.target.name}
        good = [[a for a in each.answers if a.ended and not a.error] for each in server.rounds]
        everything = [answer for answers in good for answer in answers]
        _draw_distribution(axes[0, 0], [answer.ttft for answer in everything], style)
        _draw_distribution(axes[0, 1], [answer.tpot for answer in everything], style)
        _draw_rate(axes[1, 0], good, style)
        _draw_first_tokens(axes[1, 1], server, style)
    labels = (
        ("time to first token (ms)", "share of requests"),
        ("time per output token (ms)", "share of requests"),
        ("seconds since the start of the round", "output tok/s"),
        ("request was due after (s)", "time to first token (ms)"),
    )
    for axis, (x_label, y_label) in zip(axes.flat, labels, strict=True):
        axis.set_xlabel(x_label)
        axis.set_ylabel(y_label)
        axis.grid(alpha=0.3)
    for axis, name in ((axes[0, 0], "ttft"), (axes[0, 1], "tpot")):
        axis.set_ylim(0, 1.01)
        if name in limits:
            axis.axvline(limits[name], color="black", linestyle="--", linewidth=1)
    for axis in axes[1]:
        axis.set_ylim(bottom=0)  # after all are drawn: it fixes the upper end too
    axes[0, 0].legend()
    figure.savefig(path, dpi=DOTS_PER_INCH, format="png")


def tokens_over_time(rounds: Sequence[Sequence[Answer]]) -> tuple[np.ndarray, np.ndarray]:
    """Middle of each time bin [B] in seconds, and tok/s in it [B], the mean over the rounds.

    The tokens of an answer are spread evenly over its chunks, because a chunk has no token count.
    """
    times, weights = [], []
    for answers in rounds:
        zero = min((answer.started for answer in answers), default=0.0)
        for answer in answers:
            if answer.chunk_times and answer.completion_tokens:
                share = answer.completion_tokens / len(answer.chunk_times)
                times.append(np.asarray(answer.chunk_times) - zero)
                weights.append(np.full(len(answer.chunk_times), share))
    if not times:
        return np.zeros(0), np.zeros(0)
    end = max(float(np.concatenate(times).max()), 1e-9)
    tokens, edges = np.histogram(
        np.concatenate(times), bins=NUM_BINS, range=(0, end), weights=np.concatenate(weights)
    )
    return (edges[:-1] + edges[1:]) / 2, tokens / (end / NUM_BINS) / len(rounds)


def _draw_distribution(axis: Any, seconds: Sequence[float | None], style: dict[str, str]) -> None:
    values = np.sort([1000 * value for value in seconds if value is not None])
    if len(values):
        axis.step(values, np.arange(1, len(values) + 1) / len(values), where="post", **style)


def _draw_rate(axis: Any, rounds: Sequence[Sequence[Answer]], style: dict[str, str]) -> None:
    seconds, rates = tokens_over_time(rounds)
    axis.plot(seconds, rates, **style)


def _draw_first_tokens(axis: Any, server: ServerRun, style: dict[str, str]) -> None:
    points = []
    for each in server.rounds:
        good = [a for a in each.answers if a.ended and a.error is None and a.ttft is not None]
        zero = min((answer.started for answer in good), default=0.0)
        points += [(answer.started - zero, 1000 * (answer.ttft or 0.0)) for answer in good]
    if points:
        axis.scatter(*zip(*points, strict=True), s=8, alpha=0.6, **style)
