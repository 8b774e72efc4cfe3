"""The part of a sequence in a step: rows, rows with logits, rows with hidden states. Pure."""

from workers.step.sequence import DECODE, PROMPT, ScheduledSequence, Sequence, SequenceKind


def part_of(seq: Sequence, kind: SequenceKind, num_new: int) -> ScheduledSequence:
    """Return the part of `seq`, of its present kind, that computes its next `num_new` tokens."""
    if kind is DECODE:
        assert seq.decode_part is not None, f"{seq.request.request_id} has no row"
        return seq.decode_part
    if kind is PROMPT:
        last, pooling = num_new == seq.num_remaining, seq.request.pooling
        if pooling is None:
            return ScheduledSequence(seq, kind, num_new, int(last))
        start = seq.num_computed_tokens
        rows = pooling.hidden_rows(start, start + num_new, last=last)
        return ScheduledSequence(seq, kind, num_new, 0, hidden_rows=rows, ends_vector=last)
    return ScheduledSequence(seq, kind, num_new, num_new, seq.draft_token_ids[: num_new - 1])
