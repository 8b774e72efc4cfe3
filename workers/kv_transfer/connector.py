"""The KV connector: contents of KV blocks and of states that move between this rank and a place outside its device.

A place is the memory of the node, a file, or another rank. Contents have names: the key of a block (a chained digest of
tokens, salt and adapter, see workers/kv_cache/block_pool.py) with the suffix of its cache group. Equal names mean equal
contents, in stores of equal `compatibility` (see workers/kv_transfer/contents.py). So whatever is found under a name
may be used, and whatever is not found, late, lost or damaged is computed again.

Knows nothing of sequences and of schedules: workers/kv_cache/transfers.py holds the blocks of a transfer and enters its
end.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from workers.wire.request import EngineRequest

if TYPE_CHECKING:  # which imports torch
    from workers.kv_transfer.contents import CacheContents


class Item(NamedTuple):
    """The contents of one KV block, or of one snapshot of states.

    key       of the block; for states, of the block at the end of which they were kept
    suffix    of the cache group; key + suffix is the name of the contents
    is_state  the contents are states
    place     number of the block in the KV caches, or slot in the pools of states
    parent    key of the block before it in its sequence; b"" for the first block
    number    of the block in its sequence, from 0
    """

    key: bytes
    suffix: bytes
    is_state: bool
    place: int
    parent: bytes
    number: int

    @property
    def name(self) -> bytes:
        """The name of the contents."""
        return self.key + self.suffix


@dataclass(eq=False)
class Transfer:
    """Items on their way in one direction. The caller holds their places from `load` or `save` until the end.

    request   of the sequence that waits for a load; None: nothing waits
    private   the contents have no meaning beyond this server: keys of adapters are numbers that each server gives
    done      names of the items that have arrived whole; set before the end
    seconds   from the call to the end
    origin    where loaded items were found, "host" or "disk" or the name of another place, with numbers of items
    """

    items: list[Item]
    request: EngineRequest | None = None
    private: bool = False
    done: set[bytes] = field(default_factory=set)
    seconds: float = 0.0
    origin: dict[str, int] = field(default_factory=dict)


class KVConnector(ABC):
    """A place outside the device. The thread of the step loop calls every method, and none of them waits.

    A connector has threads of its own for all that waits. It lives as long as its process; `bind` and `unbind` frame
    the time in which the caches of the device may be read and written. A failure ends a transfer with fewer `done`
    names, and is counted and logged by the connector; it never reaches the caller as an exception.

    place      the connector's name in metrics
    saves      whether contents are saved there; otherwise they come from elsewhere
    on_ended   called from any thread when `ended` has something to return, or `counts` has changed meanwhile
    """

    place: ClassVar[str]
    saves: ClassVar[bool] = True

    def __init__(self) -> None:
        self.on_ended: Callable[[], None] = lambda: None

    @abstractmethod
    def bind(self, contents: "CacheContents") -> None:
        """Move contents of these caches from now on."""

    @abstractmethod
    def unbind(self) -> None:
        """End all transfers, and touch the caches no more after the return. No other method may wait for copies."""

    @abstractmethod
    def found(self, request: EngineRequest, keys: list[bytes]) -> Container[bytes]:
        """Return the names that `load` can probably provide, among the names of these keys.

        keys   of the full blocks of a sequence of `request`, the first one first
        """

    @abstractmethod
    def load(self, transfer: Transfer) -> None:
        """Begin to fill the places of the items.

        On a GPU the connector's copies begin after all work that the current stream has by now, because launched steps
        may still read the places.
        """

    @abstractmethod
    def save(self, transfer: Transfer) -> None:
        """Begin to copy the items from their places, which the work on the current stream fills."""

    @abstractmethod
    def ended(self) -> list[Transfer]:
        """Return the transfers that have ended since the last call.

        Contents of a load that are `done` can be read by all later launches, on every stream.
        """

    def forget(self, names: Iterable[bytes]) -> None:  # noqa: B027 - a place may keep nothing
        """Provide the contents of these names no more: they are wrong."""

    def counts(self) -> dict[str, float]:
        """Return counters and gauges of this place by name."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Release everything; `unbind` came before."""


NOWHERE = -1
"""Place of an item that is brought to the memory of the node, and not to the device."""


class KVFetcher(ABC):
    """Brings contents from the memory of another node to the memory of this node, where a KVConnector finds them.

    The thread of the step loop calls every method, and none but `close` waits. A fetch that fails brings less, and is
    counted and logged by the fetcher.

    place      the fetcher's name in metrics
    on_ended   called from any thread when `ended` has something to return
    source     where the fetchers of other nodes find what this node holds; "": nowhere for now
    """

    place: ClassVar[str]

    def __init__(self) -> None:
        self.on_ended: Callable[[], None] = lambda: None
        self.source = ""

    @abstractmethod
    def bind(self, contents: "CacheContents") -> None:
        """Fetch contents of the form of these caches from now on. Their connectors were bound before."""

    @abstractmethod
    def unbind(self) -> None:
        """End all fetches."""

    @abstractmethod
    def fetch(self, transfer: Transfer) -> None:
        """Begin to bring those of the items that the source of the transfer's request holds, in rising number.

        Of states the last one counts.
        """

    @abstractmethod
    def ended(self) -> list[Transfer]:
        """Return the transfers that have ended since the last call. What is `done` is in the memory of the node."""

    @abstractmethod
    def counts(self) -> dict[str, float]:
        """Return counters by name."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; `unbind` came before."""
