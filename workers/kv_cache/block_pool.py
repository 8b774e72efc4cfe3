"""The blocks of the paged KV cache: references, contents of full blocks, eviction. Knows nothing of requests.

One pool serves all layers: block b is block b in the cache of every layer, in every group of layers (see
kernels/interface/kv_layout.py).

A full block has a key: a digest of its tokens, of the images among them, and of the key before it. Equal keys therefore
mean equal tokens from the first one on, and equal K and V. Two chains cannot be made to meet, because the digest is
cryptographic and the root of a chain is a digest of the salt in a domain of its own.
"""

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

_KEY_BYTES = 32


def root_key(salt: str, adapter: int = 0) -> bytes:
    """Return the key before a sequence's first block; sequences of different salts or adapters share no blocks."""
    data = salt.encode(errors="surrogatepass")  # a lone surrogate is a valid salt
    of_adapter = adapter.to_bytes(8, "little")
    return hashlib.blake2b(
        data, digest_size=_KEY_BYTES, person=b"cache salt", salt=of_adapter
    ).digest()


def chain_keys(
    parent: bytes,
    token_ids: Sequence[int],
    block_size: int,
    contents: Mapping[int, bytes] | None = None,
) -> list[bytes]:
    """Return the keys of the full blocks of `token_ids`, which follow a block (or root) with key `parent`.

    contents   what tokens of a block stand for beside their ids, by the number of the block among these
    """
    data = array("i", token_ids).tobytes()
    block_bytes = block_size * 4
    keys = []
    for number in range(len(data) // block_bytes):
        block = data[number * block_bytes : (number + 1) * block_bytes]
        if contents is not None and number in contents:
            block += contents[number]
        parent = hashlib.blake2b(parent + block, digest_size=_KEY_BYTES).digest()
        keys.append(parent)
    return keys


class BlockPool:
    """Blocks with reference counts; a block is free when its last holder has released it.

    A free block with a key keeps its contents: `find` returns it, `share` holds it again. It is evicted when no free
    block without a key is left, the longest unused block first, and of one sequence the last block first; blocks that
    were released as less useful go before all others.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))  # free, without contents
        self._unused: OrderedDict[int, None] = OrderedDict()  # free, with contents, oldest first
        self._references = [0] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        """Blocks without a holder, blocks with contents included."""
        return len(self._blank) + len(self._unused)

    @property
    def usage(self) -> float:
        """Share of blocks held, 0 to 1."""
        return 1 - self.num_free / self.num_blocks

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Return the blocks, held or free, of the longest run of `keys` that the pool has.

        Call `share` on them before any other method, because `allocate` may evict free blocks.
        """
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def __contains__(self, key: object) -> bool:
        """Return whether `find` finds the block of a key."""
        return key in self._block_of

    def num_free_besides(self, blocks: list[int]) -> int:
        """Return the number of free blocks that are not among `blocks`."""
        return self.num_free - sum(not self._references[block] for block in blocks)

    def allocate(self, count: int) -> list[int]:
        """Return `count` free blocks, each with one holder now. The caller has checked `num_free`."""
        assert count <= self.num_free, f"{count} blocks wanted, {self.num_free} are free"
        blocks = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: list[int]) -> None:
        """Add a holder to each of `blocks`, which must be held already or have contents."""
        for block in blocks:
            if not self._references[block]:
                assert block in self._unused, f"block {block} is free and cannot be shared"
                del self._unused[block]
            self._references[block] += 1

    def release(self, blocks: list[int], num_useful: int | None = None) -> None:
        """Remove a holder from each of `blocks`, which are in the order of their sequence.

        num_useful   the blocks behind this number are less useful than any other block; None: all are useful
        """
        free = []
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} is released but not held"
            self._references[block] -= 1
            if not self._references[block]:
                if block in self._key_of:
                    self._unused[block] = None
                    free.append(block)
                else:
                    self._blank.append(block)
        if num_useful is not None:
            less = set(blocks[num_useful:])
            for block in reversed(free):
                if block in less:
                    self._unused.move_to_end(block, last=False)

    def register(self, block: int, key: bytes) -> None:
        """Set the key of a held block with K and V written. A second block of the same key gets none."""
        assert self._references[block] > 0, f"block {block} is free and cannot get a key"
        assert block not in self._key_of, f"block {block} has a key already"
        if key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def forget(self, keys: Iterable[bytes]) -> None:
        """Let `find` no longer return the blocks of `keys`. Holders keep the blocks."""
        for key in keys:
            block = self._block_of.pop(key, None)
            if block is None:
                continue
            del self._key_of[block]
            if block in self._unused:
                del self._unused[block]
                self._blank.append(block)

    def check_integrity(self, owners: Counter[int]) -> None:
        """Compare the references of all blocks with the numbers of their `owners`, and free lists and keys with both.

        Raises AssertionError with the first blocks that differ. Equal counts suffice, so it takes 1 ms for 100,000
        blocks.
        """
        expected = [0] * self.num_blocks
        for block, count in owners.items():
            expected[block] = count
        num_keys = len(self._unused) + sum(block in self._key_of for block in owners)
        equal = self.num_free == expected.count(0) and num_keys == len(self._key_of)
        equal &= expected == self._references and len(self._block_of) == num_keys
        assert equal, "; ".join(islice(self._differences(owners), 3))

    def _differences(self, owners: Counter[int]) -> Iterator[str]:
        free = Counter([*self._blank, *self._unused])
        for block, count in enumerate(self._references):
            owned, key = owners[block], self._key_of.get(block)
            if (count, free[block]) != (owned, not owned):
                found = f"{count} references and {free[block]} places in the lists of free blocks"
                yield f"block {block} has {found}, expected {owned} and {int(not owned)}"
            if key is not None and self._block_of.get(key) != block:
                yield f"the key of block {block} finds block {self._block_of.get(key)}"
        if len(self._block_of) != len(self._key_of):
            yield f"{len(self._block_of)} keys find a block, {len(self._key_of)} blocks have a key"

    def _evict(self) -> int:
        block, _ = self._unused.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block
