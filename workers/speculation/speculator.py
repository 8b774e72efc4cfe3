"""Speculation on one rank: which sequences draft how many tokens in a step. Knows nothing of memory and schedules.

Sequences and their drafts are chosen by this rank alone, because a drafter without collectives changes only the number
of the rank's tokens, which each rank votes anyway.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from workers.config import SpeculationConfig
from workers.speculation.depth import Acceptance, choose_depths
from workers.speculation.drafter import Drafter, Guesses
from workers.speculation.model_drafter import ModelDrafter
from workers.speculation.ngram import NGramDrafter
from workers.speculation.step_times import DraftCosts
from workers.step.sequence import Sequence


class Speculator:
    """Belongs to the thread of the step loop.

    A sequence of an asynchronous engine waits for its last token only while it speculates. The guesses of the drafter
    are compared with the tokens also where they are not drafted, so that a sequence begins again without a trial.
    """

    def __init__(self, drafter: Drafter, config: SpeculationConfig):
        self._drafter, self._most, self._adaptive = (
            drafter,
            config.num_draft_tokens,
            config.adaptive,
        )
        self._synthetic = config.accept_lengths is not None
        self.uses_model = config.uses_model
        self._acceptance: dict[Sequence, Acceptance] = {}
        self._costs = DraftCosts()
        self._least = 0.0  # acceptance from which drafts pay

    def committed(
        self,
        seq: Sequence,
        drafts: tuple[int, ...] | None = None,
        verified: tuple[int, int] = (0, 0),
    ) -> None:
        """Read the new tokens of `seq`, and decide whether its next step waits for them.

        drafts     of a draft model, that follow the new tokens
        verified   accepted drafts, of so many that the step verified
        """
        acceptance = self._acceptance.get(seq)
        if acceptance is None:
            acceptance = self._acceptance[seq] = Acceptance()
        guesses = self._drafter.committed(seq)
        if self._synthetic:  # the tokens are not those of accepted drafts
            accepted, drafted = verified
            guesses = Guesses(accepted, int(accepted < drafted))
        acceptance.count(*guesses)
        if drafts:
            self._drafter.drafted(seq, drafts)
        pays = not self._adaptive or acceptance.share >= self._least
        seq.speculates = pays and self._drafter.has_drafts(seq)

    def drafts(
        self, seqs: list[Sequence], num_decodes: int, budget: int
    ) -> Iterator[tuple[Sequence, tuple[int, ...]]]:
        """Yield sequences with the drafts to verify in the next step, `budget` at most together.

        seqs         sequences that take drafts
        num_decodes  sequences that decode in the step, these among them
        """
        if not num_decodes:
            return
        # With a draft for each sequence, tokens rise by the share of right guesses.
        costs = self._costs.expected(num_decodes, max(1, num_decodes))
        self._least = float(costs[-1]) - 1
        most = min(self._most, budget)
        found = [(seq, drafts) for seq in seqs if (drafts := self._drafter.propose(seq, most))]
        if not found:
            return
        available_S = np.array([len(drafts) for _, drafts in found])
        if self._adaptive:
            depths = choose_depths(
                np.array([self._acceptance[seq].share for seq, _ in found]),
                available_S,
                num_decodes,
                self._costs.expected(num_decodes, min(budget, int(available_S.sum()))),
            )
            if not depths.any():
                self._costs.relax()
        else:
            left_S = budget - available_S.cumsum() + available_S
            depths = available_S.clip(max=left_S.clip(min=0))
        for (seq, drafts), depth in zip(found, depths.tolist(), strict=True):
            if depth:
                yield seq, drafts[:depth]

    def draft_steps(self, seqs: Iterable[Sequence]) -> int:
        """Return how many tokens a draft model is to draft of each of these sequences behind the next step."""
        return self._most if any(seq.speculates for seq in seqs) else 1

    def observe(self, rows: int, num_drafts: int, seconds: float) -> None:
        """Count a step without prompts: rows of the busiest rank, and drafts of this rank."""
        self._costs.observe(rows, num_drafts, seconds)

    def forget(self, seq: Sequence) -> None:
        """Free what is kept of a sequence that has ended."""
        self._acceptance.pop(seq, None)
        self._drafter.forget(seq)


def make_speculator(config: SpeculationConfig) -> Speculator | None:
    """Return the speculation of a rank in an epoch; None: off."""
    if config.method == "off":
        return None
    if config.uses_model:
        return Speculator(ModelDrafter(), config)
    return Speculator(NGramDrafter(), config)
