"""The rows of a rank's experts, added up on its device in every step. L layers of the model, s slots of the rank.

Padding rows reach no expert, so neither they nor idle ranks count.
"""

from itertools import groupby

import torch


class ExpertLoad:
    """Adds up the rows that come to each slot of one rank, in each layer, without a wait for the device.

    counting    a forward is under way that counts; outside of it a layer only reads this
    counts_Ls   int64, zeros in layers without experts; captured graphs add to it, so its address stays. None before
                `allocate`, and on a rank without experts: then nothing is counted
    """

    def __init__(self) -> None:
        self.counting = False
        self.counts_Ls: torch.Tensor | None = None
        self._ends: list[tuple[int, torch.Tensor]] = []

    def allocate(self, num_layers: int, num_slots: int, device: torch.device) -> None:
        """Make place for the counts, or keep the place if it has this size; start from zero."""
        shape = (num_layers, num_slots)
        if not num_slots:
            self.counts_Ls = None
        elif self.counts_Ls is None or self.counts_Ls.shape != shape:
            self.counts_Ls = torch.zeros(shape, dtype=torch.int64, device=device)
        else:
            self.counts_Ls.zero_()

    def begin(self) -> None:
        """Count the rows of the layers that run until `finish`."""
        self._ends.clear()
        self.counting = self.counts_Ls is not None

    def add(self, layer: int, offs_s: torch.Tensor) -> None:
        """Keep the `ExpertInput.offs_e` of a layer, without computing anything. A layer adds one for each ubatch."""
        self._ends.append((layer, offs_s))

    def finish(self) -> None:
        """Add the rows of all layers since `begin` to the counts: few launches for all layers together."""
        ends, self._ends = sorted(self._ends, key=lambda one: one[0]), []
        counting, self.counting = self.counting, False
        if not counting or not ends:
            return
        assert self.counts_Ls is not None
        layers = [layer for layer, _ in groupby(ends, lambda one: one[0])]
        offs_lus = torch.stack([offs_s for _, offs_s in ends]).view(
            len(layers), -1, ends[0][1].numel()
        )
        offs_ls = offs_lus[:, 0] if len(ends) == len(layers) else offs_lus.sum(1)
        stride = layers[1] - layers[0] if len(layers) > 1 else 1
        if layers == [*range(layers[0], layers[-1] + 1, stride)]:
            _add_rows(self.counts_Ls[layers[0] : layers[-1] + 1 : stride], offs_ls)
        else:
            for index, layer in enumerate(layers):
                _add_rows(self.counts_Ls[layer : layer + 1], offs_ls[index : index + 1])


def _add_rows(counts_ls: torch.Tensor, offs_ls: torch.Tensor) -> None:
    """Add the rows of slots that end at these offsets."""
    counts_ls += offs_ls
    counts_ls[:, 1:] -= offs_ls[:, :-1]
