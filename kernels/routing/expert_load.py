"""The load of a rank's experts, sampled in some steps. L layers, e local experts."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LoadSample:
    """One step of one rank.

    rows          (token, expert) pairs of this rank's experts, over all layers
    balancedness  mean rows of an expert over the rows of the busiest expert, over layers with rows; 1 = even
    """

    rows: int
    balancedness: float

    @classmethod
    def of(cls, offs_Le: torch.Tensor) -> "LoadSample | None":
        """Return the sample of the int32 `offs_e` of all layers, on the host; None if no layer had rows."""
        rows_Le = offs_Le.diff(dim=1, prepend=offs_Le.new_zeros(len(offs_Le), 1)).float()
        rows_Le = rows_Le[offs_Le[:, -1] > 0]
        if not len(rows_Le):
            return None
        balancedness = (rows_Le.mean(dim=1) / rows_Le.amax(dim=1)).mean()
        return cls(int(rows_Le.sum()), float(balancedness))


class ExpertLoad:
    """Collects the loads of one rank's layers during a sampled step. Outside of it a layer only reads `watching`."""

    def __init__(self) -> None:
        self.watching = False
        self._offs_Le: list[torch.Tensor] = []

    def watch(self) -> None:
        """Collect the loads of all layers until `take`."""
        self._offs_Le.clear()
        self.watching = True

    def add(self, offs_e: torch.Tensor) -> None:
        """Keep the `ExpertInput.offs_e` of a layer, without computing anything."""
        self._offs_Le.append(offs_e)

    def take(self) -> torch.Tensor | None:
        """Stop, and return int32 [L, e] of the collected layers for `LoadSample.of`, on the device, or None."""
        self.watching = False
        offs_Le, self._offs_Le = self._offs_Le, []
        if not offs_Le or not offs_Le[0].numel():
            return None
        return torch.stack(offs_Le)
