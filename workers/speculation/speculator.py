"""Speculation on one rank: which sequences draft how many tokens in a step. Knows nothing of memory and schedules.

Sequences and their drafts are chosen by this rank alone, because a drafter without collectives changes only the number
of the rank's tokens, which each rank votes anyway.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np

from workers.speculation.depth import (
    DECAY_OF_ALL,
    Acceptance,
    choose_depths,
    choose_passes,
    least_share,
)
from workers.speculation.drafter import Drafter, Guesses, NewTokens
from workers.speculation.model_drafter import ModelDrafter
from workers.speculation.ngram import NGramDrafter
from workers.speculation.step_times import DraftCosts, StepSeconds, StepSize
from workers.speculation.synthetic import SyntheticGuesses
from workers.speculation_config import SpeculationConfig
from workers.step.drafts import Drafts
from workers.step.sequence import Sequence

CHOOSE_EVERY = 8
"""Steps from one choice of the least acceptance, and of a draft model's passes, to the next: each takes some 0.1 ms."""

OF_ALL = 0.7
"""Weight of all sequences' guesses against those of a sequence, where it is judged whether its drafts pay."""

PATIENCE = 64
"""Steps that a draft model still reads of a sequence that does not draft: each costs a layer."""

PAUSE = 512
"""Steps from the begin of one such time to the next, of any sequence of a rank."""

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
        self._drafter, self._adaptive = drafter, config.adaptive
        self._most = config.num_draft_tokens
        lengths = config.accept_lengths
        self._synthetic = None if lengths is None else SyntheticGuesses(lengths)
        self.uses_model = config.uses_model
        self._acceptance: dict[Sequence, Acceptance] = {}
        self._of_all = Acceptance(decay=DECAY_OF_ALL)
        self._costs = DraftCosts(measured)
        self._least = 0.0  # acceptance from which drafts pay
        self._patience: dict[Sequence, int] = {}  # steps that a draft model still reads of it
        self._left_out: set[Sequence] = set()  # a draft model has not read all of them
        self._next_probe = 0  # step
        self._passes = self._most if self.uses_model else 0
        self._num_choices = 0
        self._unsettled: list[tuple[NewTokens, Iterable[Guesses]]] = []
        self._waiting: set[Sequence] = set()  # drafts of them do not pay

    @property
    def num_ahead(self) -> int:
        """Tokens behind the rows of a step that a draft model reads and writes at most."""
        return self._most if self.uses_model else 0

    def committed(self, new: NewTokens, drafts: Drafts | None = None) -> None:
        """Read the new tokens of sequences; `settle` follows.

        drafts     of a draft model, that follow the new tokens
        """
        self._unsettled.append((new, self._drafter.committed(new)))
        if drafts is not None:
            self._drafter.drafted(new, drafts)

    def settle(self) -> None:
        """Count the guesses of the sequences with new tokens, and decide whether their next steps wait for tokens.

        A step may be launched between `committed` and this call: no launch waits for it.
        """
        unsettled, self._unsettled = self._unsettled, []
        all_right = all_wrong = 0
        for new, found in unsettled:
            if self._synthetic is not None:
                found = map(self._synthetic.counted, found, new.accepted, new.verified)
            for seq, (right, wrong) in zip(new.seqs, found, strict=True):
                if seq.finished:
                    continue
                acceptance = self._acceptance.get(seq)
                if acceptance is None:
                    acceptance = self._acceptance[seq] = Acceptance(self._of_all.share)
                if seq not in self._left_out:
                    acceptance.count(right, wrong)
                    all_right += right
                    all_wrong += wrong
        self._of_all.count(all_right, all_wrong)
        for seq in chain.from_iterable(new.seqs for new, _ in unsettled):
            if seq.finished:
                continue
            pays = self._pays(seq)
            if pays:
                self._waiting.discard(seq)
                self._patience[seq] = PATIENCE
            else:
                self._waiting.add(seq)
            seq.speculates = pays and self._drafter.has_drafts(seq)

    def _pays(self, seq: Sequence) -> bool:
        """Return whether a draft of `seq` is expected to pay; it may have none."""
        if seq in self._left_out:
            return False
        acceptance = self._acceptance.get(seq)
        share = self._of_all.share
        # A few wrong guesses of a sequence end no drafts, and a few right ones begin none.
        if acceptance is not None:
            share = OF_ALL * share + (1 - OF_ALL) * acceptance.share
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
        if self._adaptive:
            self._judge(seqs, num_decodes, budget)
        most = min(self._most, budget)
        seqs = [seq for seq in seqs if seq not in self._waiting]
        found = [(seq, drafts) for seq in seqs if (drafts := self._drafter.propose(seq, most))]
        if not found:
            self._costs.relax()
            return
        available_S = np.array([len(drafts) for _, drafts in found])
        if self._adaptive:
            # A sequence may have drafts behind its first token before that token is settled.
            known, of_all = self._acceptance.get, self._of_all
            acceptance_S = np.array([known(seq, of_all).share for seq, _ in found])
            num_drafts = min(budget, int(available_S.sum()))
            costs_N = self._costs.expected(num_decodes, num_drafts, self._passes)
            depths = choose_depths(acceptance_S, available_S, num_decodes, costs_N)
            if not depths.any():
                self._costs.relax()
        else:
            left_S = budget - available_S.cumsum() + available_S
            depths = available_S.clip(max=left_S.clip(min=0))
        for (seq, drafts), depth in zip(found, depths.tolist(), strict=True):
            if depth:
                yield seq, drafts[:depth]

    def _judge(self, seqs: list[Sequence], num_decodes: int, budget: int) -> None:
        """Find the acceptance from which drafts pay, and how many tokens a draft model drafts, now and then.

        Drafts pay if they do with some number of passes, whatever the present number is.
        """
        self._num_choices += 1
        if self._num_choices % CHOOSE_EVERY != 1:
            return
        if not self.uses_model:
            costs_N = self._costs.expected(num_decodes, num_decodes * self._most)
            self._least = least_share(costs_N[num_decodes - 1 :: num_decodes])
            return
        costs = [
            self._costs.expected(num_decodes, num_decodes * count, count)
            for count in range(1, self._most + 1)
        ]
        self._least = min(least_share(of[num_decodes - 1 :: num_decodes]) for of in costs)
        shares = [self._acceptance[seq].share for seq in seqs if seq in self._acceptance]
        acceptance_S = np.array(shares or [self._of_all.share] * num_decodes)
        self._passes = choose_passes(
            acceptance_S, self._most, num_decodes, lambda count: costs[count - 1][:budget]
        )

    def wish(self, seqs: Iterable[Sequence], step: int, *, prompts: bool) -> tuple[bool, int]:
        """Return whether a draft model is to read step number `step`, and how many tokens it is to draft behind it.

        seqs      sequences with new tokens
        prompts   the step computes tokens of prompts

        While no drafts of a sequence pay, the draft model reads its next PATIENCE steps, and drafts one token in each
        PROBE_EVERY-th step, which is compared with the token that comes. Then it reads no more, until the drafts of
        another sequence pay, or a PAUSE ends. Ranks do so in the same steps.
        """
        pays, waiting = False, []
        for seq in seqs:
            if seq in self._waiting or (seq not in self._acceptance and not self._pays(seq)):
                waiting.append(seq)
            else:
                pays = True
        if waiting and step >= self._next_probe:
            self._next_probe = (step // PAUSE + 1) * PAUSE
            probing = next((seq for seq in waiting if seq not in self._left_out), waiting[0])
            self._left_out.discard(probing)
            self._patience[probing] = PATIENCE
        waits = False
        for seq in waiting:
            if seq not in self._left_out and self._patience.get(seq, 0):
                waits = True
                self._patience[seq] -= 1
        if pays:
            return True, self._passes
        return waits or prompts, int(waits and step % PROBE_EVERY == 0)

    def left_out(self, seqs: Iterable[Sequence]) -> None:
        """Draft no more of these sequences: the draft model does not read their next step."""
        found = list(seqs)
        self._left_out.update(found)
        self._waiting.update(found)

    def observe(self, size: StepSize, seconds: float) -> None:
        """Count a step without prompts."""
        self._costs.observe(size, seconds)

    def forget(self, seq: Sequence) -> None:
        """Free what is kept of a sequence that has ended."""
        self._acceptance.pop(seq, None)
        self._patience.pop(seq, None)
        self._left_out.discard(seq)
        self._waiting.discard(seq)
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
