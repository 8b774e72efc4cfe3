"""The LoRA adapters of the server as one ingress sees them, and how many of its requests use each."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cluster.errors import NotFoundError
from workers.lora_config import LoadedAdapter


class ListedAdapters:
    """The adapters that take requests; `follow` replaces them."""

    def __init__(self) -> None:
        self.listed: tuple[LoadedAdapter, ...] = ()
        self._open: Counter[int] = Counter()

    def follow(self, listed: Sequence[LoadedAdapter]) -> None:
        """Take over the adapters that the supervisor lists."""
        self.listed = tuple(listed)

    def folders(self) -> dict[str, str]:
        """Return path or Hub name of each adapter, by name."""
        return {adapter.name: adapter.path for adapter in self.listed}

    def used(self) -> frozenset[int]:
        """Return the ids of adapters that are listed or have open requests here."""
        return frozenset(self._open).union(it.id for it in self.listed)

    @contextmanager
    def open(self, name: str) -> Iterator[int]:
        """Yield the id of an adapter, and count a request for it meanwhile; 0 for no name.

        Raises NotFoundError for a name that was unloaded since its request was read.
        """
        if not name:
            yield 0
            return
        found = next((it.id for it in self.listed if it.name == name), None)
        if found is None:
            raise NotFoundError(
                f"the adapter {name[:200]!r} was unloaded", param="model", code="model_not_found"
            )
        self._open[found] += 1
        try:
            yield found
        finally:
            self._open[found] -= 1
            if not self._open[found]:
                del self._open[found]
