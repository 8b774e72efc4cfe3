"""How many tokens of images the vision tower may compute beside a step in which a rank decodes, by measured times.

The tower delays such a step, and so the next token of every stream, by at most the time of its own work. So it gets a
share of the time that the step takes without it. Pure arithmetic: no clock, no torch.
"""

from workers.step.step_sync import StepPlan

DECODE_SHARE = 0.3
"""Of a step that only decodes: it then takes 1.3 times as long, and one block of the tower more."""

PROMPT_SHARE = 0.6
"""Of the time that prompts without a limit add to a step: where they come with images, the tower keeps up with them."""

FIRST_TOKENS = 256
"""Beside a step until times are known, and as many again as a rank has prompt tokens in it."""

SMOOTHING = 1 / 16
"""Weight of a step in a mean."""

OUTLIER = 4
"""A step counts in a mean as at most this multiple of it."""


class StepShare:
    """Mean times of steps in which a rank decodes, and what the tower may do beside the next one.

    decode_s   of a step that only decodes, in seconds without the tower; 0: none was observed
    added_s    what prompts add to it, by the bits of the number of prompt tokens: a token of a few costs more
    """

    def __init__(self) -> None:
        self.decode_s = 0.0
        self.added_s: dict[int, float] = {}

    def observe(self, plan: StepPlan, gap_s: float, *, beside: bool) -> None:
        """Note a step that ended `gap_s` after the step before it; `beside`: the tower computed meanwhile."""
        if not plan.decodes:
            return
        # The tower takes its whole share, or the mean falls below the truth, and its next share with it.
        factor = 1 + DECODE_SHARE if beside else 1.0
        if not plan.prefill_tokens:
            self.decode_s = _mean(self.decode_s, gap_s / factor)
        elif self.decode_s:
            bits = plan.prefill_tokens.bit_length()
            added_s = max(0.0, gap_s - factor * self.decode_s)
            if beside and not plan.prefill_cap:
                added_s /= 1 + PROMPT_SHARE
            self.added_s[bits] = _mean(self.added_s.get(bits, 0.0), added_s)

    def tokens(self, plan: StepPlan, token_s: float | None) -> float:
        """Return the tokens of images that the tower may compute beside a step.

        Prompts that have a limit beside decodes have it for the sake of the gaps, so they give the tower no more time.
        token_s   seconds of a token in the tower; None: not measured
        """
        if token_s is None or not self.decode_s:
            return FIRST_TOKENS + plan.prefill_tokens
        share_s = DECODE_SHARE * self.decode_s
        if plan.prefill_tokens and not plan.prefill_cap:
            share_s += PROMPT_SHARE * self._added_by(plan.prefill_tokens)
        return share_s / token_s

    def _added_by(self, prefill_tokens: int) -> float:
        """Return what prompts of this size add to a step, or smaller ones if none was observed."""
        known = [bits for bits in self.added_s if bits <= prefill_tokens.bit_length()]
        return self.added_s[max(known)] if known else 0.0


def _mean(known: float, seen: float) -> float:
    """Return the mean after a step; the first one is the mean."""
    known = known or seen
    return known + SMOOTHING * (min(seen, OUTLIER * known) - known)
