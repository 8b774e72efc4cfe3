"""Outputs of the vision tower by the digest of the image, bounded in tokens. Knows no tower and no requests.

An output that no sequence holds stays until its tokens are needed for others; the one used last goes last.
"""

from collections import Counter, OrderedDict

import torch


class OutputCache:
    """Outputs of up to `capacity` tokens. Its owner serialises all calls."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.num_tokens = 0
        self._outputs: OrderedDict[bytes, torch.Tensor] = OrderedDict()  # the one used last is last
        self._holders: Counter[bytes] = Counter()

    def find(self, digest: bytes) -> torch.Tensor | None:
        """Return the outputs of an image, or None."""
        found = self._outputs.get(digest)
        if found is not None:
            self._outputs.move_to_end(digest)
        return found

    def hold(self, digest: bytes) -> None:
        """Keep the outputs of an image until as many calls of `release`."""
        assert digest in self._outputs, "an image is held that the cache does not have"
        self._holders[digest] += 1

    def release(self, digest: bytes) -> None:
        """Take back one call of `hold`."""
        self._holders[digest] -= 1
        assert self._holders[digest] >= 0, "an image is released that nothing holds"
        if not self._holders[digest]:
            del self._holders[digest]

    def make_room(self, num_tokens: int) -> bool:
        """Drop outputs that nothing holds until there is room; return False, and drop none, if there cannot be."""
        held = sum(len(self._outputs[digest]) for digest in self._holders)
        if held + num_tokens > self.capacity:
            return False
        for digest in list(self._outputs):
            if self.num_tokens + num_tokens <= self.capacity:
                break
            if digest not in self._holders:
                self.num_tokens -= len(self._outputs.pop(digest))
        return True

    def put(self, digest: bytes, outputs: torch.Tensor) -> None:
        """Add the outputs [num_tokens, X, D] of an image; `make_room` comes before."""
        assert digest not in self._outputs, "an image was computed twice"
        self._outputs[digest] = outputs
        self.num_tokens += len(outputs)
        assert self.num_tokens <= self.capacity, (self.num_tokens, self.capacity)

    @property
    def num_held(self) -> int:
        """Images that sequences hold."""
        return len(self._holders)
