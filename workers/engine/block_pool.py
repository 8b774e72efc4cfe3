"""The paged KV cache: which blocks are whose, and what the full ones hold. Knows nothing of requests.

A full block has a key: a digest of its tokens and of the key before it, so that equal keys mean equal tokens from the
first one on, and equal K and V. Nobody can make two chains meet: the digest is a cryptographic one, and the root of
a chain is a digest of the salt in a domain of its own.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

_KEY_BYTES = 32


def root_key(salt: str) -> bytes:
    """The key before a sequence's first block; sequences of different salts share nothing."""
    data = salt.encode(errors="surrogatepass")  # half a character is a salt as good as any
    return hashlib.blake2b(data, digest_size=_KEY_BYTES, person=b"cache salt").digest()


def chain_keys(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """The keys of the full blocks of `token_ids`, which follow a block (or root) of key `parent`."""
    data = array("i", token_ids).tobytes()
    block_bytes = block_size * 4
    keys = []
    for end in range(block_bytes, len(data) + 1, block_bytes):
        block = data[end - block_bytes : end]
        parent = hashlib.blake2b(parent + block, digest_size=_KEY_BYTES).digest()
        keys.append(parent)
    return keys


class BlockPool:
    """Blocks with reference counts; a block is free again when its last holder releases it.

    A free block with a key keeps its contents, can be found and held again, and gives way when there is no free block
    without: the one longest unused first, and of one sequence the last before those that it builds upon.
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
        """Blocks nobody holds, those with contents included."""
        return len(self._blank) + len(self._unused)

    @property
    def usage(self) -> float:
        """Share of blocks held, 0 to 1."""
        return 1 - self.num_free / self.num_blocks

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the longest run of `keys` that is here, held or free. `share` them before anything else."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_free_besides(self, blocks: list[int]) -> int:
        """Blocks that are free and not among `blocks`."""
        return self.num_free - sum(not self._references[block] for block in blocks)

    def allocate(self, count: int) -> list[int]:
        """`count` free blocks, held once. The caller has checked `num_free`."""
        assert count <= self.num_free, f"asked for {count} blocks, {self.num_free} are free"
        blocks = [self._blank.pop() if self._blank else self._evict() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: list[int]) -> None:
        """One more holder for each of `blocks`, which must be held already or have contents."""
        for block in blocks:
            if not self._references[block]:
                assert block in self._unused, f"block {block} is free and cannot be shared"
                del self._unused[block]
            self._references[block] += 1

    def release(self, blocks: list[int]) -> None:
        """One holder fewer for each of `blocks`, which are in the order of their sequence."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} is released but not held"
            self._references[block] -= 1
            if not self._references[block]:
                if block in self._key_of:
                    self._unused[block] = None
                else:
                    self._blank.append(block)

    def register(self, block: int, key: bytes) -> None:
        """K and V of `key` are written in `block`, which is held. One block per key: a second one stays without."""
        assert self._references[block] > 0, f"block {block} is free and cannot get a key"
        assert block not in self._key_of, f"block {block} has a key already"
        if key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def forget(self, blocks: Iterable[int]) -> None:
        """Nobody finds `blocks` any more; who holds them keeps them."""
        for block in blocks:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
            if block in self._unused:
                del self._unused[block]
                self._blank.append(block)

    def forget_all(self) -> None:
        """Nobody finds anything any more."""
        self.forget(list(self._key_of))

    def _evict(self) -> int:
        block, _ = self._unused.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block
