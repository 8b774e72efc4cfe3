"""Which names a store holds, as all processes of a node read them without a message: a counting Bloom filter.

One process adds and removes; others test. A test may find a name that is not there, once in 400 tests or less
often, and may be late. Needs the standard library alone. The filter is that of Fan, Cao, Almeida and Broder,
"Summary Cache", 2000, with counts of a byte that stay when they are full.
"""

import struct

COUNTS_PER_NAME = 16
HASHES = 4  # `Hints.__contains__` writes them out
_FULL = 255
_SUFFIX = 0x9E3779B97F4A7C15
_KEY_BYTES = 32
_HASHES = struct.Struct("<QQ")


def hint_bytes(num_names: int) -> int:
    """Return the bytes of a filter of up to `num_names` names: a power of two."""
    return 1 << max(12, (COUNTS_PER_NAME * num_names - 1).bit_length())


class Hints:
    """A filter over `counts`, memory of a power of two bytes that others may map.

    A name begins with a digest of 32 bytes, of which the hashes are parts.
    """

    def __init__(self, counts: memoryview):
        self._counts, self._mask = counts, len(counts) - 1
        assert len(counts) & self._mask == 0, f"{len(counts)} bytes are no power of two"

    def __contains__(self, name: object) -> bool:
        assert isinstance(name, bytes), "names are bytes"
        counts, mask = self._counts, self._mask  # the step loop tests every block of a prompt
        first, step = _hashes(name)
        return bool(
            counts[first & mask]
            and counts[(first + step) & mask]
            and counts[(first + 2 * step) & mask]
            and counts[(first + 3 * step) & mask]
        )

    def add(self, name: bytes) -> None:
        """Add a name that was not added, or was removed since."""
        for at in self._places(name):
            self._counts[at] = min(self._counts[at] + 1, _FULL)

    def remove(self, name: bytes) -> None:
        """Remove a name that was added."""
        for at in self._places(name):
            if 0 < self._counts[at] < _FULL:
                self._counts[at] -= 1

    def clear(self) -> None:
        """Remove all names."""
        self._counts[:] = bytes(len(self._counts))

    def _places(self, name: bytes) -> tuple[int, ...]:
        first, step = _hashes(name)
        return tuple((first + index * step) & self._mask for index in range(HASHES))


def _hashes(name: bytes) -> tuple[int, int]:
    """Return two parts of the digest, of which the suffix changes the first, and the second is odd."""
    first, step = _HASHES.unpack_from(name)
    if len(name) > _KEY_BYTES:
        first += int.from_bytes(name[_KEY_BYTES:], "little") * _SUFFIX
    return first, step | 1
