"""How evenly a rank's experts are used, looked at in a step now and then. L layers, e local experts, R routed rows."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LoadSample:
    """One step of one rank.

    rows          (token, expert) pairs that came to this rank's experts, over all layers
    balancedness  mean rows of an expert over those of the busiest, averaged over the layers that had any; 1 = even
    """

    rows: int
    balancedness: float

    @classmethod
    def of(cls, offs_Le: torch.Tensor) -> "LoadSample | None":
        """What int32 `offs_e` of all layers, on the host, say; None when no layer had rows."""
        rows_Le = offs_Le.diff(dim=1, prepend=offs_Le.new_zeros(len(offs_Le), 1)).float()
        rows_Le = rows_Le[offs_Le[:, -1] > 0]
        if not len(rows_Le):
            return None
        balancedness = (rows_Le.mean(dim=1) / rows_Le.amax(dim=1)).mean()
        return cls(int(rows_Le.sum()), float(balancedness))


class ExpertLoad:
    """What the layers of one rank report while it watches; costs a layer one look at `watching` while it does not."""

    def __init__(self) -> None:
        self.watching = False
        self._offs_Le: list[torch.Tensor] = []

    def watch(self) -> None:
        """From now on the layers report, until `take`."""
        self._offs_Le.clear()
        self.watching = True

    def add(self, offs_e: torch.Tensor) -> None:
        """A layer's `ExpertInput.offs_e`, kept as it is; nothing is computed here."""
        self._offs_Le.append(offs_e)

    def take(self) -> torch.Tensor | None:
        """int32 [L, e] of the layers that reported, on their device, for `LoadSample.of`; None without any."""
        self.watching = False
        offs_Le, self._offs_Le = self._offs_Le, []
        if not offs_Le or not offs_Le[0].numel():
            return None
        return torch.stack(offs_Le)
