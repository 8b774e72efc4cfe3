"""The check value of a row in host memory, equal to that of workers/kv_transfer/contents.py. Imports no torch."""

import numpy as np

ODD = 0x1E3779B97F4A7C15  # 2^61 divided by the golden ratio, odd
CHECK_WORDS = 2**20
"""Words of a row that are checked at once, so that temporary memory is bounded."""
_WORD = 2**64


def check_value(parts: list[memoryview]) -> int:
    """Return the check value of the row that `parts` make; each part has a whole number of words."""
    total, first = ODD, 0
    for part in parts:
        words_W = np.frombuffer(part, dtype=np.uint64)
        for start in range(0, len(words_W), CHECK_WORDS):
            some_W = words_W[start : start + CHECK_WORDS]
            place_W = np.arange(first, first + len(some_W), dtype=np.uint64)
            first += len(some_W)
            total += int((some_W * ((place_W * np.uint64(ODD)) | np.uint64(1))).sum())
    total %= _WORD
    return total - _WORD if total >= _WORD // 2 else total
