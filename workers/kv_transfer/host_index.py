"""Which contents lie in which units of a node's memory, and which of them make room for others.

Contents belong to the blocks of chains: a block follows its parent, and a session is the chain that its turns extend. A
block without the blocks before it is of no use, so the last blocks of chains go first. Of these goes the one with the
least value: the cost to compute it again, which grows with its place in the chain, on top of the value of what went
last before it was used (GreedyDual; Cao and Irani, "Cost-Aware WWW Proxy Caching Algorithms", 1997). So neither an old
session nor a cheap one stays for ever. Before all others go contents that a later turn of their chain has superseded:
states before its last state, and blocks of layers with a window that no window at its end touches.

Pure bookkeeping, with the standard library alone.
"""

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

DOUBLE_COST = 512
"""Blocks before a block at which it costs twice as much to compute as the first one, because of attention."""


class Place(NamedTuple):
    """Where contents belong: the arguments of `reserve`.

    key, suffix  as in an Item; parent: b"" for the first block of a chain
    number       of the block in its chain
    num_units    that the contents take
    private      the contents end with this store: they may not be kept in files
    """

    key: bytes
    suffix: bytes
    parent: bytes
    number: int
    num_units: int
    private: bool = False

    @property
    def name(self) -> bytes:
        """The name of the contents."""
        return self.key + self.suffix


@dataclass(eq=False, slots=True)
class _Node:
    """A block of a chain, with its contents by suffix."""

    key: bytes
    number: int
    parent: "_Node | None"
    num_children: int = 0
    value: float = 0.0
    entries: dict[bytes, "Entry"] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Entry:
    """Contents in units.

    check     of the row, None until it is published
    num_pins  readers and the writer: it stays while there are any
    origin    where it came from: "host" = from a rank, "disk" = from a file
    """

    name: bytes
    node: _Node
    units: list[int]
    private: bool
    check: int | None = None
    num_pins: int = 1
    origin: str = "host"
    superseded: bool = False

    @property
    def place(self) -> Place:
        """The arguments of `reserve` that made it."""
        node, parent = self.node, self.node.parent
        suffix, before = self.name[len(node.key) :], b"" if parent is None else parent.key
        return Place(node.key, suffix, before, node.number, len(self.units), self.private)


class HostIndex:
    """The contents of `num_units` units.

    window_blocks  blocks that a window at the end of a chain touches; 0: no layer has a window
    evicted        names that have left since the owner has cleared the list
    """

    def __init__(self, num_units: int, *, window_blocks: int = 0):
        self.num_units, self._window_blocks = num_units, window_blocks
        self.evicted: list[bytes] = []
        self._free = list(range(num_units - 1, -1, -1))
        self._nodes: dict[bytes, _Node] = {}
        self._entries: dict[bytes, Entry] = {}
        self._superseded: dict[bytes, Entry] = {}  # the longest superseded first
        self._leaves: list[tuple[float, int, _Node]] = []  # a heap, with entries of the past
        self._order = itertools.count()
        self._level = 0.0  # the value of what was evicted last
        self.num_evicted = 0

    def __len__(self) -> int:
        """Contents that can be found."""
        return sum(entry.check is not None for entry in self._entries.values())

    @property
    def num_free(self) -> int:
        """Units without contents."""
        return len(self._free)

    def get(self, name: bytes) -> Entry | None:
        """Return contents that are complete."""
        entry = self._entries.get(name)
        return None if entry is None or entry.check is None else entry

    def reserve(self, place: Place) -> Entry | None:
        """Return units to fill, pinned; None if the contents are there or on their way, or if there is no room."""
        entry = self._entries.get(place.name)
        if entry is not None:
            self._touch(entry.node)
            return None
        if not self._make_room(place.num_units, keep=place.parent):
            return None
        node = self._node_of(place)
        units = sorted(self._free.pop() for _ in range(place.num_units))
        entry = Entry(place.name, node, units, place.private)
        node.entries[place.suffix] = self._entries[place.name] = entry
        self._touch(node)
        return entry

    def publish(self, entry: Entry, check: int) -> bool:
        """Let `get` find contents that were reserved, unless they were forgotten meanwhile, and unpin them."""
        there = self._entries.get(entry.name) is entry
        entry.check = check
        self.unpin(entry)
        if not there:
            return False
        for other in self._superseded_by(entry):
            if not other.superseded:
                other.superseded = True
                self._superseded[other.name] = other
        return True

    def discard(self, entry: Entry) -> None:
        """Forget contents that were reserved and not filled, and unpin them. Later contents of their name stay."""
        if self._entries.get(entry.name) is entry:
            self._remove(entry)
        self.unpin(entry)

    def pin(self, entry: Entry) -> None:
        """Keep contents that are used now."""
        entry.num_pins += 1
        if entry.superseded:  # an earlier turn goes on once more
            entry.superseded = False
            del self._superseded[entry.name]
        self._touch(entry.node)

    def unpin(self, entry: Entry) -> None:
        """End the use of contents."""
        assert entry.num_pins > 0, "contents are unpinned but not pinned"
        entry.num_pins -= 1
        if self._entries.get(entry.name) is not entry and not entry.num_pins:
            self._free += reversed(entry.units)  # forgotten in its use

    def forget(self, names: Iterable[bytes]) -> None:
        """Let `get` find these no more. Their units are free when nothing uses them."""
        for name in names:
            if (entry := self._entries.get(name)) is not None:
                self._remove(entry)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every unit is free or belongs to one entry, while nothing forgotten is in use."""
        used = [unit for entry in self._entries.values() for unit in entry.units]
        assert sorted([*used, *self._free]) == list(range(self.num_units)), "units leak"
        children: dict[bytes, int] = dict.fromkeys(self._nodes, 0)
        for node in self._nodes.values():
            if node.parent is not None and node.parent.key in children:
                children[node.parent.key] += 1
        counted = {key: node.num_children for key, node in self._nodes.items()}
        assert counted == children, "children are miscounted"

    def _node_of(self, place: Place) -> _Node:
        node = self._nodes.get(place.key)
        if node is None:
            parent = self._nodes.get(place.parent)
            node = self._nodes[place.key] = _Node(place.key, place.number, parent)
            if parent is not None:
                parent.num_children += 1
        return node

    def _touch(self, node: _Node) -> None:
        node.value = self._level + 1 + node.number / DOUBLE_COST
        if not node.num_children:
            self._push(node)

    def _push(self, node: _Node) -> None:
        heapq.heappush(self._leaves, (node.value, next(self._order), node))
        if len(self._leaves) > 64 + 4 * len(self._nodes):  # most are of the past
            leaves = (node for node in self._nodes.values() if not node.num_children)
            self._leaves = [(node.value, next(self._order), node) for node in leaves]
            heapq.heapify(self._leaves)

    def _make_room(self, num_units: int, *, keep: bytes) -> bool:
        """Evict until there are free units; `keep` is the block that the new contents follow."""
        if num_units > self.num_units:
            return False
        for entry in list(itertools.islice(self._superseded.values(), num_units)):
            if len(self._free) >= num_units:
                return True
            if not entry.num_pins:
                self._evict(entry)
        busy: list[tuple[float, int, _Node]] = []
        while len(self._free) < num_units and self._leaves:
            leaf = heapq.heappop(self._leaves)
            value, _, node = leaf
            if node.value != value or node.num_children or self._nodes.get(node.key) is not node:
                continue
            if node.key == keep or any(entry.num_pins for entry in node.entries.values()):
                busy.append(leaf)
                continue
            self._level = max(self._level, value)
            for entry in list(node.entries.values()):
                self._evict(entry)
        for leaf in busy:
            heapq.heappush(self._leaves, leaf)
        return len(self._free) >= num_units

    def _evict(self, entry: Entry) -> None:
        self.evicted.append(entry.name)
        self.num_evicted += 1
        self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        node = entry.node
        del self._entries[entry.name]
        self._superseded.pop(entry.name, None)
        del node.entries[entry.name[len(node.key) :]]
        if not entry.num_pins:
            self._free += reversed(entry.units)
        while not node.entries and not node.num_children:
            del self._nodes[node.key]
            parent = node.parent
            if parent is None:
                return
            parent.num_children -= 1
            if not parent.num_children:
                self._push(parent)
            node = parent

    def _superseded_by(self, entry: Entry) -> Iterator[Entry]:
        """Yield contents that a chain does not need behind `entry`, up to where another chain parts from it."""
        suffix, node = entry.name[len(entry.node.key) :], entry.node
        if suffix == STATE_SUFFIX:
            for before in _alone(node):
                if (found := before.entries.get(suffix)) is not None:
                    yield found
                    return  # the states before it were superseded by it
        elif suffix == WINDOW_SUFFIX and self._window_blocks:
            behind = itertools.islice(_alone(node), self._window_blocks - 1, self._window_blocks)
            for before in behind:
                if (found := before.entries.get(suffix)) is not None:
                    yield found


STATE_SUFFIX, WINDOW_SUFFIX = b"s", b"w"
"""Suffixes of names of states and of blocks for layers with a window; blocks for layers over all tokens have none."""


def _alone(node: _Node) -> Iterator[_Node]:
    """Yield the blocks before `node`, the nearest first, up to the first one that several blocks follow."""
    before = node.parent
    while before is not None and before.num_children < 2:
        yield before
        before = before.parent
