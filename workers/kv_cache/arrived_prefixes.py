"""Prefixes that loads have brought to the device, held until their sequences start behind them.

Other loads and new snapshots of states would otherwise replace them while their sequences wait for their turn. A
sequence that needs their memory gets it: sequences behind it in order then start behind what is left.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from workers.kv_cache.group import CacheGroup
from workers.step.sequence import Sequence

Held = list[tuple[CacheGroup, int]]


class _Arrived(NamedTuple):
    """What a sequence holds, the number of KV blocks among it, and how many more blocks the sequence needs to start."""

    held: Held
    num_blocks: int
    lacks: int


class ArrivedPrefixes:
    """The places that each waiting sequence holds. let_go: releases places."""

    def __init__(self, let_go: Callable[[Held], None]):
        self._let_go = let_go
        self._of: dict[Sequence, _Arrived] = {}

    def __len__(self) -> int:
        """Sequences that hold places."""
        return len(self._of)

    @property
    def places(self) -> Iterable[Held]:
        """The places of each sequence."""
        return (it.held for it in self._of.values())

    def hold(self, seq: Sequence, held: Held, lacks: int) -> None:
        """Let `seq` hold places that are held already, unless it has finished; it needs `lacks` blocks beside them."""
        assert seq not in self._of, f"{seq.request.request_id} has two prefixes"
        if seq.finished:
            self._let_go(held)
        elif held:
            num_blocks = sum(not group.is_state for group, _ in held)
            self._of[seq] = _Arrived(held, num_blocks, lacks)

    def num_promised(self, seq: Sequence) -> int:
        """Return how many blocks the sequences before `seq` in order need beside what they hold."""
        return sum(it.lacks for other, it in self._of.items() if other.order < seq.order)

    def starts_behind(self, seq: Sequence, num_blocks: int) -> None:
        """Let go of what `seq` holds if that is more than it can start behind: a part was damaged or is forgotten."""
        if seq in self._of and num_blocks < self._of[seq].num_blocks:
            self.started(seq)

    def started(self, seq: Sequence) -> None:
        """Let go of what `seq` holds, because it starts and holds its prefix itself."""
        if (arrived := self._of.pop(seq, None)) is not None:
            self._let_go(arrived.held)

    def drop_finished(self) -> None:
        """Let go of what sequences hold that ended before they started."""
        self._drop([seq for seq in self._of if seq.finished])

    def give_way(self, seq: Sequence | None = None) -> bool:
        """Let go of what sequences behind `seq` in order hold; None: of everything. Return whether there was any."""
        return self._drop([it for it in self._of if seq is None or it.order > seq.order])

    def _drop(self, seqs: list[Sequence]) -> bool:
        for seq in seqs:
            self.started(seq)
        return bool(seqs)
