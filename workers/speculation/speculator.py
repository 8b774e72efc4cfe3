"""Speculation on one rank: which sequences draft how many tokens in a step. Knows nothing of memory and schedules.

Sequences and their drafts are chosen by this rank alone, because a drafter without collectives changes only the number
of the rank's tokens, which each rank votes anyway.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from workers.config import SpeculationConfig
from workers.speculation.depth import (
    DECAY_OF_ALL,
    Acceptance,
    choose_depths,
    choose_passes,
    least_share,
)
from workers.speculation.drafter import Drafter
from workers.speculation.model_drafter import ModelDrafter
from workers.speculation.ngram import NGramDrafter
from workers.speculation.step_times import DraftCosts, StepSeconds, StepSize
from workers.speculation.synthetic import SyntheticGuesses
from workers.step.drafts import Drafts
from workers.step.sequence import Sequence

CHOOSE_EVERY = 8
"""Steps from one choice of the draft model's passes to the next, which takes the time of several choices of drafts."""

PROBE_EVERY = 8
"""Steps from one draft to the next while no drafts pay: a draft costs the draft model's head, of whole logits."""


class Speculator:
    """Belongs to the thread of the step loop.

    A sequence of an asynchronous engine waits for its last token only while it speculates. The guesses of the drafter
    are compared with the tokens also where they are not drafted, so that a sequence begins again without a trial.
    """

    def __init__(
        self, drafter: Drafter, config: SpeculationConfig, measured: StepSeconds | None = None
    ):
        """Take the seconds of steps, if they were measured at the start."""
        self._drafter, self._most, self._adaptive = (
            drafter,
            config.num_draft_tokens,
            config.adaptive,
        )
        lengths = config.accept_lengths
        self._synthetic = None if lengths is None else SyntheticGuesses(lengths)
        self.uses_model = config.uses_model
        self._acceptance: dict[Sequence, Acceptance] = {}
        self._of_all = Acceptance(decay=DECAY_OF_ALL)
        self._costs = DraftCosts(measured)
        self._least = 0.0  # acceptance from which drafts pay
        self._passes = config.num_draft_tokens if config.uses_model else 0
        self._num_choices = 0

    def committed(
        self,
        seq: Sequence,
        drafts: Drafts | None = None,
        verified: tuple[int, int] = (0, 0),
    ) -> None:
        """Read the new tokens of `seq`, and decide whether its next step waits for them.

        drafts     of a draft model, that follow the new tokens
        verified   accepted drafts, of so many that the step verified
        """
        acceptance = self._acceptance.get(seq)
        if acceptance is None:
            acceptance = self._acceptance[seq] = Acceptance(self._of_all.share)
        guesses = self._drafter.committed(seq)
        if self._synthetic is not None:
            guesses = self._synthetic.counted(guesses, verified)
        acceptance.count(*guesses)
        self._of_all.count(*guesses)
        if drafts:
            self._drafter.drafted(seq, drafts)
        seq.speculates = self._pays(seq) and self._drafter.has_drafts(seq)

    def _pays(self, seq: Sequence) -> bool:
        """Return whether a draft of `seq` is expected to pay; it may have none."""
        acceptance = self._acceptance.get(seq)
        share = self._of_all.share if acceptance is None else acceptance.share
        return not self._adaptive or share >= self._least

    def drafts(
        self, seqs: list[Sequence], num_decodes: int, budget: int
    ) -> Iterator[tuple[Sequence, tuple[int, ...]]]:
        """Yield sequences with the drafts to verify in the next step, `budget` at most together.

        seqs         sequences that take drafts
        num_decodes  sequences that decode in the step, these among them
        """
        if not num_decodes:
            return
        costs_N = self._costs.expected(num_decodes, num_decodes * self._most, self._passes)
        self._least = least_share(costs_N[num_decodes - 1 :: num_decodes])
        most = min(self._most, budget)
        found = [(seq, drafts) for seq in seqs if (drafts := self._drafter.propose(seq, most))]
        if not found:
            self._costs.relax()
            return
        available_S = np.array([len(drafts) for _, drafts in found])
        if self._adaptive:
            acceptance_S = np.array([self._acceptance[seq].share for seq, _ in found])
            depths = choose_depths(acceptance_S, available_S, num_decodes, costs_N[:budget])
            self._choose_passes(acceptance_S, num_decodes, budget)
            if not depths.any():
                self._costs.relax()
        else:
            left_S = budget - available_S.cumsum() + available_S
            depths = available_S.clip(max=left_S.clip(min=0))
        for (seq, drafts), depth in zip(found, depths.tolist(), strict=True):
            if depth:
                yield seq, drafts[:depth]

    def _choose_passes(self, acceptance_S: np.ndarray, num_decodes: int, budget: int) -> None:
        """Choose anew, now and then, how many tokens a draft model drafts behind each step with drafts."""
        self._num_choices += 1
        if not self.uses_model or self._num_choices % CHOOSE_EVERY != 1:
            return
        num_drafts = min(budget, len(acceptance_S) * self._most)
        self._passes = choose_passes(
            acceptance_S,
            self._most,
            num_decodes,
            lambda count: self._costs.expected(num_decodes, num_drafts, count),
        )

    def draft_steps(self, seqs: Iterable[Sequence], step: int) -> int:
        """Return how many tokens a draft model is to draft of each of these sequences behind step number `step`.

        While no drafts pay, it drafts one token in each PROBE_EVERY-th step, which is compared with the token that
        comes: ranks probe in the same steps.
        """
        if any(map(self._pays, seqs)):
            return self._passes
        return int(step % PROBE_EVERY == 0)

    def observe(self, size: StepSize, seconds: float) -> None:
        """Count a step without prompts."""
        self._costs.observe(size, seconds)

    def forget(self, seq: Sequence) -> None:
        """Free what is kept of a sequence that has ended."""
        self._acceptance.pop(seq, None)
        self._drafter.forget(seq)


def make_speculator(
    config: SpeculationConfig, measured: StepSeconds | None = None
) -> Speculator | None:
    """Return the speculation of a rank in an epoch; None: off.

    measured   seconds of steps; None: they were not measured at the start
    """
    if config.method == "off":
        return None
    drafter = ModelDrafter() if config.uses_model else NGramDrafter()
    return Speculator(drafter, config, measured)
