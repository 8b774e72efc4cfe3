"""Speculation on one rank: which sequences draft how many tokens in a step. Knows nothing of memory and schedules.

Sequences and their drafts are chosen by this rank alone, because a drafter without collectives changes only the number
of the rank's tokens, which each rank votes anyway.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from workers.config import SpeculationConfig
from workers.speculation.depth import PRIOR, Acceptance, choose_depths
from workers.speculation.drafter import Drafter, Guesses
from workers.speculation.model_drafter import ModelDrafter
from workers.speculation.ngram import NGramDrafter
from workers.speculation.step_times import DraftCosts, StepSeconds, StepSize
from workers.step.sequence import Sequence

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
        self._synthetic = config.accept_lengths is not None
        self.uses_model = config.uses_model
        self._acceptance: dict[Sequence, Acceptance] = {}
        self._costs = DraftCosts(measured)
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
        seq.speculates = self._pays(seq) and self._drafter.has_drafts(seq)

    def _pays(self, seq: Sequence) -> bool:
        """Return whether a draft of `seq` is expected to pay; it may have none."""
        acceptance = self._acceptance.get(seq)
        share = PRIOR if acceptance is None else acceptance.share
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
        # With a draft for each sequence, tokens rise by the share of right guesses.
        costs = self._costs.expected(num_decodes, max(1, num_decodes), self._draft_steps)
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
                self._costs.expected(
                    num_decodes, min(budget, int(available_S.sum())), self._draft_steps
                ),
            )
            if not depths.any():
                self._costs.relax()
        else:
            left_S = budget - available_S.cumsum() + available_S
            depths = available_S.clip(max=left_S.clip(min=0))
        for (seq, drafts), depth in zip(found, depths.tolist(), strict=True):
            if depth:
                yield seq, drafts[:depth]

    @property
    def _draft_steps(self) -> int:
        """Tokens that a draft model drafts behind a step with drafts; 0: there is none."""
        return self._most if self.uses_model else 0

    def draft_steps(self, seqs: Iterable[Sequence], step: int) -> int:
        """Return how many tokens a draft model is to draft of each of these sequences behind step number `step`.

        While no drafts pay, it drafts one token in each PROBE_EVERY-th step, which is compared with the token that
        comes: ranks probe in the same steps.
        """
        if any(map(self._pays, seqs)):
            return self._most
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
