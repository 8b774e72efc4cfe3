"""Grammar masks of the rows with logits of a step."""

from workers.sampling.grammar_bitmask import GrammarBitmasks, PendingBitmask
from workers.step.scheduled_batch import ScheduledBatch
from workers.step.sequence import Sequence


class RowMasks:
    """Belongs to one runner; costs nothing until a request has a grammar."""

    def __init__(self, vocab_size: int, num_threads: int):
        self._masks = GrammarBitmasks(vocab_size, num_threads)
        self._met_grammar = False

    def admit(self, seq: Sequence) -> None:
        """`seq` moved into its row."""
        self._met_grammar |= seq.grammar is not None

    def start(self, scheduled: ScheduledBatch) -> PendingBitmask | None:
        """Start to compute the masks of the rows with logits; draws of ended sequences are dropped."""
        if not self._met_grammar:
            return None
        return self._masks.start(
            (None if part.seq.finished else part.seq.grammar, part.draft_token_ids)
            for part in scheduled.parts
            if part.num_logits
        )
