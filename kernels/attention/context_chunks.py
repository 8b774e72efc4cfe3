"""How the computed tokens of prompts are cut into chunks, to expand the latents of one chunk at a time. Pure.

Knows nothing of GPUs or of the kernels that attend to a chunk.
"""

from dataclasses import dataclass

import numpy as np

# Keys of a chunk as a part of the step's new rows: a chunk's keys, values and results then take no more memory than
# the keys and values of the new rows, which are freed before (d + v + u values against d + u of a head).
CHUNK_OF_ROWS = 0.7
MIN_CHUNK, MAX_CHUNK = 1024, 4096


@dataclass(frozen=True)
class Piece:
    """Computed tokens `start` to `end` of sequence `seq`."""

    seq: int
    start: int
    end: int


def chunk_limit(num_rows: int, block_size: int) -> int:
    """Return the most keys of a chunk in a step of `num_rows` new rows, a multiple of the block size."""
    limit = min(max(int(num_rows * CHUNK_OF_ROWS), MIN_CHUNK), MAX_CHUNK)
    return max(1, limit // block_size) * block_size


def cut_contexts(contexts: np.ndarray, limit: int, block_size: int) -> list[list[Piece]]:
    """Cut the computed tokens of all sequences into chunks of up to `limit` tokens; int [B], 0 for a new prompt.

    The pieces of a chunk belong to neighbouring sequences and all have tokens, because attention over no keys is
    undefined in some kernels. Pieces begin at the start of a block.
    """
    assert limit % block_size == 0, (limit, block_size)
    chunks: list[list[Piece]] = []
    free = 0  # tokens that the last chunk still takes
    for seq, context in enumerate(contexts.tolist()):
        if not context:
            free = 0  # the next sequence with tokens is no neighbour
        start = 0
        while start < context:
            if not free:
                chunks.append([])
                free = limit
            end = min(context, start + free)
            chunks[-1].append(Piece(seq, start, end))
            free = (free - (end - start)) // block_size * block_size
            start = end
    return chunks
