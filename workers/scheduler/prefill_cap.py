"""The most prompt tokens of a step in which a rank of the group decodes, fixed or adapted to the gaps between tokens.

A rank's prompts delay the tokens of all ranks, because a step ends on all ranks together. Each rank observes the same
steps and votes its cap; `decide` takes the smallest. Pure arithmetic: no clock, no torch.
"""

from workers.config import SchedulerConfig

FLOOR_TOKENS = 128
"""Least cap: a prompt of n tokens then takes at most n / 128 steps beside decodes."""

DECODE_SHARE = 2
"""The gap may be this multiple of a step that only decodes, whatever the target: prompts then get half of the time."""

SHRINK = 0.8
"""Share of the cap that is left at most after a gap over the limit."""

GROWTH = 0.02
"""Share by which a full step in no time raises the cap. Where full steps take 0.9 of the limit, 100 of them make good
what one gap over the limit takes: so about one gap in a hundred is over it."""

LEAD = 1.1
"""A rank's cap is at most this multiple of the cap of the step that it observes, which is the lowest of all ranks."""

SMOOTHING = 1 / 16
"""Weight of a step in the mean time of steps that only decode."""

OUTLIER = 4
"""A step counts in that mean as at most this multiple of it."""


class PrefillCap:
    """The cap of one rank process, over all its epochs. Belongs to the thread of the step loop.

    The cap starts at its least value and doubles after each step with as many prompt tokens as it allows, until prompts
    take half of the time that decodes leave of the limit. From then on it rises slowly after such a step. A gap over
    the limit lowers it to the tokens that would have fitted, and to SHRINK of itself; at most by a half, because one
    gap may have another reason. The limit is `target_itl_ms`, or DECODE_SHARE times the mean step without prompts if
    that is more. The cap never falls below FLOOR_TOKENS or one KV block, and follows a peer's lower cap down.
    """

    @classmethod
    def of(cls, config: SchedulerConfig, block_size: int) -> "PrefillCap | None":
        """Return a new cap; None if prompts beside decodes have no limit, or are not split."""
        limited = config.max_prefill_tokens_with_decodes != "auto" or config.target_itl_ms
        return cls(config, block_size) if limited and config.chunked_prefill else None

    def __init__(self, config: SchedulerConfig, block_size: int):
        self._most = config.max_num_batched_tokens
        self._least = min(self._most, max(FLOOR_TOKENS, block_size))
        self._target_s = (config.target_itl_ms or 0.0) / 1000
        self._decode_s = 0.0
        self._doubles = True
        fixed = config.max_prefill_tokens_with_decodes
        self._adapts = fixed == "auto"
        self._tokens = float(self._least if fixed == "auto" else min(fixed, self._most))

    @property
    def tokens(self) -> int:
        """The cap in tokens, at least 1."""
        return int(self._tokens)

    @property
    def limit_s(self) -> float:
        """The longest gap between two tokens that the cap aims at, in seconds."""
        return max(self._target_s, DECODE_SHARE * self._decode_s)

    def observe(self, gap_s: float, prefill_tokens: int, cap: int) -> None:
        """Note a step with decodes in the group, which ended `gap_s` after the step before it.

        prefill_tokens   most prompt tokens of a rank in the step
        cap              the cap of the step
        """
        if not self._adapts:
            return
        if not prefill_tokens:
            known = self._decode_s or gap_s
            self._decode_s = known + SMOOTHING * (min(gap_s, OUTLIER * known) - known)
            return
        limit_s = self.limit_s
        room_s, prompts_s = limit_s - self._decode_s, gap_s - self._decode_s
        self._doubles = self._doubles and prompts_s < room_s / 2
        # The cap of the group must not jump when the rank with the lowest cap has no more decodes.
        tokens = min(self._tokens, LEAD * cap)
        if gap_s > limit_s:
            # The part of the step that the prompts take is in proportion to them.
            fitting = prefill_tokens * room_s / prompts_s
            tokens = max(min(fitting, SHRINK * tokens), tokens / 2)
        elif prefill_tokens >= cap:
            tokens *= 2 if self._doubles else 1 + GROWTH * (1 - gap_s / limit_s)
        self._tokens = min(max(tokens, self._least), self._most)
