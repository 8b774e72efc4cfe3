"""Acceptance of drafts by given probabilities, to measure steps with random weights: no draft of theirs would be right.

The draws depend on request, position and place alone. An accepted draft leaves the model's own draw as the token.
"""

import zlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from workers.sampling.token_sampling import uniforms
from workers.speculation.drafter import Guesses
from workers.speculation_config import SpeculationConfig
from workers.step.scheduled_batch import NO_DRAFT, ScheduledBatch
from workers.step.step_output import count_draws


class SyntheticAcceptance:
    """`lengths`: by place, the probability that a draft is accepted if all before it were; the last holds behind it."""

    def __init__(self, lengths: Sequence[float]):
        self._lengths = np.array(lengths)

    def counts(self, batch: ScheduledBatch) -> np.ndarray:
        """Return how many draws of each sequence count, int64 [B]. Call it at the launch of a batch with drafts."""
        assert batch.draft_token_ids is not None, "no sequence has drafts"
        place_L = batch.logits_places
        names = (seq.request.request_id for seq in batch.seqs)
        keys_B = np.fromiter(map(_key, names), np.uint64, len(batch.seqs))
        known_B = np.fromiter((len(seq.token_ids) for seq in batch.seqs), np.int64, len(keys_B))
        drawn_L = uniforms(keys_B[batch.logits_seqs], known_B[batch.logits_seqs] + place_L)
        chance_L = self._lengths[np.minimum(place_L, len(self._lengths) - 1)]
        return count_draws(batch, (batch.draft_token_ids == NO_DRAFT) | (drawn_L >= chance_L))


class SyntheticGuesses:
    """Guesses that were not verified, as right as verified ones are: compared with tokens, all would be wrong."""

    def __init__(self, lengths: Sequence[float]):
        self._first, self._chance = lengths[0], np.random.default_rng(0)

    def counted(self, guesses: Guesses, accepted: int, verified: int) -> Guesses:
        """Return what counts: of verified drafts those that were accepted; else one guess, if there was any."""
        if verified:
            return Guesses(accepted, int(accepted < verified))
        if not any(guesses):
            return guesses
        right = int(self._chance.random() < self._first)
        return Guesses(right, 1 - right)


@lru_cache(4096)
def _key(request_id: str) -> int:
    return zlib.crc32(request_id.encode())


def acceptance_of(config: SpeculationConfig) -> SyntheticAcceptance | None:
    """Return the acceptance that `accept_lengths` wants; None: drafts are compared with the draws."""
    return None if config.accept_lengths is None else SyntheticAcceptance(config.accept_lengths)
