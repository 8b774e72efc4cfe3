"""Simulates many ranks in lockstep under random requests: where the time of a step goes as ranks grow.

Each rank has a fixed number of sequences in flight; an ended sequence is replaced at once. A step of a rank decodes
one token of each sequence and fills the rest of its budget with prompts. In lockstep a step of all ranks takes as long
as that of the rank with the most tokens. Every rank has a core or a GPU of its own.

N ranks, S sequences of a rank.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cluster.bench.lengths import Lengths
from scripts.bench.lockstep_model import StepModel

WARM_SHARE = 0.2  # of the steps, which are not counted: all sequences begin together


@dataclass(frozen=True)
class Traffic:
    """The requests of every rank."""

    sequences: int
    max_tokens: int
    input_len: Lengths
    output_len: Lengths
    steps: int


@dataclass(frozen=True)
class Simulated:
    """The outcome for one number of ranks. Shares are of the time in lockstep, and add up to 1.

    waiting    ranks with fewer tokens wait for the rank with the most
    """

    ranks: int
    step_ms: float
    output_tokens_per_s_per_rank: float
    compute: float
    waiting: float
    exchange: float
    vote: float

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def simulate(model: StepModel, traffic: Traffic, ranks: int, seed: int) -> Simulated:
    """Run `traffic.steps` steps of `ranks` ranks."""
    group = _Group(traffic, ranks, np.random.default_rng([seed, ranks]))
    vote_s = model.vote_us(ranks, False) / 1e6 if ranks > 1 else 0.0
    compute = waiting = exchange = 0.0
    outputs = counted = 0
    for step in range(traffic.steps):
        tokens_N, num_outputs = group.step()
        if step < WARM_SHARE * traffic.steps:
            continue
        own_N = model.compute_ms(ranks, tokens_N, False) / 1e3
        slowest = float(own_N.max())
        compute += float(own_N.mean())
        waiting += slowest - float(own_N.mean())
        if ranks > 1:
            most = np.asarray(tokens_N.max())
            exchange += model.layers * float(model.exchange_us(ranks, most, False)) / 1e6
        outputs += num_outputs
        counted += 1
    vote = vote_s * counted
    total = compute + waiting + exchange + vote
    return Simulated(
        ranks,
        1e3 * total / counted,
        outputs / total / ranks,
        compute / total,
        waiting / total,
        exchange / total,
        vote / total,
    )


class _Group:
    """The sequences of all ranks."""

    def __init__(self, traffic: Traffic, ranks: int, source: np.random.Generator):
        self._traffic, self._source = traffic, source
        shape = ranks, traffic.sequences
        self._prompt_NS = _draw(traffic.input_len, shape, source)
        self._output_NS = _draw(traffic.output_len, shape, source)

    def step(self) -> tuple[np.ndarray, int]:
        """Advance all ranks; return their tokens [N] and the number of output tokens of all."""
        prompt_NS, output_NS = self._prompt_NS, self._output_NS
        decodes_NS = prompt_NS == 0
        budget_N = self._traffic.max_tokens - decodes_NS.sum(1)
        before_NS = prompt_NS.cumsum(1) - prompt_NS  # prompts of the rank's sequences before it
        chunk_NS = np.clip(budget_N[:, None] - before_NS, 0, prompt_NS)
        prompt_NS -= chunk_NS
        sampled_NS = prompt_NS == 0  # decodes, and the last chunks of prompts
        output_NS -= sampled_NS
        ended_NS = output_NS <= 0
        num_ended = int(ended_NS.sum())
        prompt_NS[ended_NS] = _draw(self._traffic.input_len, (num_ended,), self._source)
        output_NS[ended_NS] = _draw(self._traffic.output_len, (num_ended,), self._source)
        return decodes_NS.sum(1) + chunk_NS.sum(1), int(sampled_NS.sum())


def _draw(lengths: Lengths, shape: tuple[int, ...], source: np.random.Generator) -> np.ndarray:
    """Return int64 lengths, drawn as `Lengths.sample` draws one."""
    if lengths.sigma is None:
        return source.integers(lengths.low, lengths.high, shape, endpoint=True)
    values = np.rint(source.lognormal(np.log(lengths.median), lengths.sigma, shape))
    found: np.ndarray = np.clip(values, lengths.low, lengths.high).astype(np.int64)
    return found
