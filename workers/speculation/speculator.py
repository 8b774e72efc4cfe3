"""Speculation on one rank: which sequences draft how many tokens in a step. Knows nothing of memory and schedules.

The ranks agree on the rows of a step with drafts, see `workers/step/draft_budget.py`. A rank chooses its drafts alone,
because they change only the number of its tokens, which each rank votes anyway.
"""

from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np

from workers.speculation.depth import (
    DECAY_OF_ALL,
    LEAST_SURVIVAL,
    Acceptance,
    choose_passes,
    expected_shares,
    likeliest_depths,
    survivals,
)
from workers.speculation.drafter import Drafter, Guesses, NewTokens
from workers.speculation.model_drafter import ModelDrafter
from workers.speculation.ngram import NGramDrafter
from workers.speculation.step_times import DraftCosts, StepSeconds, StepSize
from workers.speculation.synthetic import SyntheticGuesses
from workers.speculation_config import SpeculationConfig
from workers.step.draft_budget import packed_gains
from workers.step.drafts import Drafts
from workers.step.sequence import Sequence
from workers.step.step_sync import StepPlan

CHOOSE_EVERY = 8
"""Steps from one choice of a draft model's passes to the next: each takes some 0.1 ms."""

VOTES_ALIKE = 2
"""Steps in which a rank's votes about drafts stay the same; at first, and behind each new sequence, one.

A step of few sequences has no time for more. What follows from votes that stay the same is known, so ranks vote anew in
the same steps.
"""

PATIENCE = 32
"""Steps that a draft model still reads of a sequence that does not draft: each costs a layer."""

PAUSE = 512
"""Steps from the begin of one such time to the next, of any sequence of a rank."""

PROBE_EVERY = 4
"""Steps from one draft to the next while no drafts pay: a draft costs the draft model's head, of whole logits."""


class Speculator:
    """Belongs to the thread of the step loop.

    A sequence of an asynchronous engine waits for its last token only while a drafter reads it. The guesses of the
    drafter are compared with the tokens also where they are not drafted, so that a sequence begins again without a
    trial.
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
        self._plan: StepPlan | None = None  # followed, but its limit was not read yet
        self._last_limit: int | None = None  # None: no rank has had drafts yet
        self._candidates = {"drafts": 0}  # fields of the vote
        self._voted_costs = self._costs.vote()  # further ones
        self._num_votes = 0
        self._votes_alike = 1  # votes in a row that are alike
        self._num_weighed = 0  # sequences that the vote is about
        self._expected: dict[Sequence, float] = {}  # acceptance, since the last vote that was new
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
        committed = dict.fromkeys(chain.from_iterable(new.seqs for new, _ in unsettled))
        alive = [seq for seq in committed if not seq.finished]
        if unsettled and self._adaptive:
            if self._num_weighed != len(alive):
                self._num_weighed, self._votes_alike = len(alive), 1
            if (self._num_votes + 1) % self._votes_alike == 0:
                self._weigh(alive)
        for seq in alive:
            pays = self._pays(seq) and self._expected.get(seq, 1.0) >= LEAST_SURVIVAL
            if pays:
                self._waiting.discard(seq)
                self._patience[seq] = PATIENCE
            else:
                self._waiting.add(seq)
            seq.speculates = pays and self._drafter.has_drafts(seq)

    def _weigh(self, seqs: list[Sequence]) -> None:
        """Choose what this rank votes about drafts of these sequences, and note what to expect of each."""
        known, of_all = self._acceptance, self._of_all
        found = [of_all if seq in self._left_out else known.get(seq, of_all) for seq in seqs]
        acceptance_S = expected_shares(np.array([it.share for it in found]), of_all.share)
        self._expected.update(zip(seqs, acceptance_S.tolist(), strict=True))
        could_S = np.array([self._drafter.could_draft(seq) for seq in seqs], dtype=bool)
        self._candidates = self._candidates_of(acceptance_S[could_S])

    def _pays(self, seq: Sequence) -> bool:
        """Return whether a draft of `seq` is expected to pay; it may have none."""
        return seq not in self._left_out and self._limit != 0

    def _acceptance_of(self, seqs: list[Sequence]) -> np.ndarray:
        """Return the expected acceptance of sequences, float64 [S].

        A sequence may have drafts behind its first token before that token is settled, and a draft model may have left
        it out.
        """
        of_all, expected = self._of_all.share, self._expected
        return np.array([expected.get(seq, of_all) for seq in seqs])

    def _candidates_of(self, acceptance_S: np.ndarray) -> dict[str, int]:
        """Return the fields of a Vote about the drafts of sequences with this acceptance, float64 [S]."""
        depth = self._passes if self.uses_model else self._most
        _, survival_N = survivals(acceptance_S, np.full(len(acceptance_S), depth))
        return {
            "drafts": len(survival_N),
            "draft_gains": packed_gains(survival_N),
            "draft_passes": self._passes,
        }

    def vote(self, num_decodes: int) -> dict[str, int]:
        """Return the fields of this rank's Vote about the next step, in which so many sequences decode."""
        if not self._adaptive:
            return {}
        self._num_votes += 1
        if self._num_votes % self._votes_alike == 0:
            self._votes_alike = VOTES_ALIKE
            self._voted_costs = self._costs.vote()
        candidates = self._candidates if num_decodes else {}
        return {**candidates, **self._voted_costs}

    def follow(self, plan: StepPlan) -> None:
        """Enter the plan of a step: all ranks have the same limit at each step.

        The limit is read when it is needed, as a rule behind the launch.
        """
        self._last_limit, self._plan = self._limit, plan
        if not plan.verifies:
            self._costs.relax()

    @property
    def _limit(self) -> int | None:
        """The last limit of a plan; None: no rank has had drafts yet."""
        plan, self._plan = self._plan, None
        if plan is not None and plan.draft_limit is not None:
            self._last_limit = plan.draft_limit
        return self._last_limit

    def drafts(
        self, seqs: list[Sequence], num_decodes: int, budget: int
    ) -> Iterator[tuple[Sequence, tuple[int, ...]]]:
        """Yield sequences with the drafts to verify in the next step, `budget` at most together.

        seqs         sequences that take drafts
        num_decodes  sequences that decode in the step, these among them
        """
        if self._adaptive:
            if self.uses_model:
                self._choose_passes(seqs, num_decodes, budget)
            if self._limit is not None:
                budget = min(budget, self._limit - num_decodes)
        most = min(self._most, budget)
        if most < 1 or not seqs:
            return
        seqs = [seq for seq in seqs if seq not in self._waiting]
        found = [(seq, drafts) for seq in seqs if (drafts := self._proposed(seq, most))]
        available_S = np.array([len(drafts) for _, drafts in found], dtype=np.int64)
        if self._adaptive:
            acceptance_S = self._acceptance_of([seq for seq, _ in found])
            depths = likeliest_depths(acceptance_S, available_S, budget)
        else:
            left_S = budget - available_S.cumsum() + available_S
            depths = available_S.clip(max=left_S.clip(min=0))
        for (seq, drafts), depth in zip(found, depths.tolist(), strict=True):
            if depth:
                yield seq, drafts[:depth]

    def _proposed(self, seq: Sequence, most: int) -> tuple[int, ...]:
        """Return at most `most` drafts of `seq`, those that follow pending tokens if it has any."""
        return seq.coming_drafts[:most] if seq.num_pending else self._drafter.propose(seq, most)

    def _choose_passes(self, seqs: list[Sequence], num_decodes: int, budget: int) -> None:
        """Choose how many tokens a draft model drafts, now and then."""
        self._num_choices += 1
        if self._num_choices % CHOOSE_EVERY != 1 or not num_decodes:
            return
        costs = [
            self._costs.expected(num_decodes, num_decodes * count, count)
            for count in range(1, self._most + 1)
        ]
        acceptance_S = self._acceptance_of([seq for seq in seqs if seq in self._expected])
        if not len(acceptance_S):
            acceptance_S = np.full(num_decodes, self._of_all.share)
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
        for seq in found:
            self._expected.pop(seq, None)

    def observe(self, size: StepSize, seconds: float) -> None:
        """Count a step without prompts."""
        self._costs.observe(size, seconds)

    def forget(self, seq: Sequence) -> None:
        """Free what is kept of a sequence that has ended."""
        self._acceptance.pop(seq, None)
        self._patience.pop(seq, None)
        self._left_out.discard(seq)
        self._waiting.discard(seq)
        self._expected.pop(seq, None)
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
