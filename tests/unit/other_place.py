"""A place outside the device that tests hold in their hands, and the transfers of a cache to it."""

from types import SimpleNamespace
from typing import Any

from workers.kv_cache.manager import KVCacheManager
from workers.kv_cache.transfers import BlockTransfers
from workers.kv_transfer.connector import KVConnector, Transfer
from workers.wire.request import EngineRequest


class OtherPlace(KVConnector):
    """Ends transfers as they begin, as a host tier without its keeper does, or when the test ends them.

    names   of contents that are found there
    """

    place = "other"

    def __init__(self, *, at_once: bool = False):
        super().__init__()
        self._at_once = at_once
        self.names: set[bytes] = set()
        self.open: list[Transfer] = []
        self._ended: list[Transfer] = []

    def bind(self, contents: Any) -> None:
        pass

    def unbind(self) -> None:
        self.end()

    def found(self, request: EngineRequest, keys: list[bytes]) -> set[bytes]:
        return self.names

    def load(self, transfer: Transfer) -> None:
        transfer.done = {item.name for item in transfer.items}
        self.save(transfer)

    def save(self, transfer: Transfer) -> None:
        self.open.append(transfer)
        if self._at_once:
            self.end()

    def end(self) -> None:
        self._ended += self.open
        self.open.clear()
        self.on_ended()

    def ended(self) -> list[Transfer]:
        found, self._ended = self._ended, []
        return found

    def close(self) -> None:
        pass


def transfers_to(place: OtherPlace, cache: KVCacheManager) -> BlockTransfers:
    """Let the contents of a cache move to a place and back."""
    contents: Any = SimpleNamespace(blocks=SimpleNamespace(row_bytes=1))
    sizes = cache.block_size, cache.num_blocks
    cache.transfers = BlockTransfers(cache.groups, *sizes, [place], contents, min_gain=1)
    return cache.transfers
