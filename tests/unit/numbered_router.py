"""A router whose ranks have numbers here, as a client sees them."""

from typing import Any

from cluster.client import router


class Router(router.Router):
    picked_prefill = 0

    def pick(
        self, token_ids: list[int], num_output: int, pinned: int | None = None, **how: Any
    ) -> int:
        return self.number(self.picked(token_ids, num_output, pinned, **how).load.place)

    def picked(
        self, token_ids: list[int], num_output: int, pinned: int | None = None, **how: Any
    ) -> router.Pick:
        place = None if pinned is None else self.place(pinned)
        picked = super().pick(token_ids, num_output, pinned=place, **how)
        self.picked_prefill = picked.prefill
        return picked

    def release(self, rank: int, num_tokens: int) -> None:
        self.loads[rank].release(num_tokens)

    def report(self, rank: int, load_of_others: int) -> None:
        super().report(self.place(rank), load_of_others)

    @property
    def outstanding(self) -> tuple[int, ...]:
        return tuple(load.outstanding for load in self.loads)
