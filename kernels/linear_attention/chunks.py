"""Cut the new tokens of prompts into chunks, as indices on the host. No model, no tensors of torch.

n prompts, N chunks, L tokens of a chunk.
"""

from dataclasses import dataclass

import numpy as np

MAX_CHUNK = 64


@dataclass(frozen=True, eq=False)
class Chunks:
    """Chunk i of every prompt comes before chunk i + 1 of any, and prompts with more chunks come first.

    So the prompts of each step of the recurrence over chunks are the first ones, and their chunks stand together.

    order      [n]: the prompts in the order of their chunks
    steps      chunks of each step
    rows       [N, L]: the token of each place, counted from the first prompt's first token; places behind a prompt's
               last token repeat the chunk's first token
    real       bool [N, L]: whether the place has a token
    places     [tokens]: the place of each token in the N * L places
    """

    order: np.ndarray
    steps: tuple[int, ...]
    rows: np.ndarray
    real: np.ndarray
    places: np.ndarray

    @classmethod
    def cut(cls, lengths: np.ndarray) -> "Chunks":
        """Cut prompts of these lengths, each at least 1."""
        size = int(min(MAX_CHUNK, lengths.max()))
        counts = -(-lengths // size)
        order = np.argsort(-counts, kind="stable")
        starts = np.cumsum(lengths) - lengths
        firsts, ends, steps = [], [], []
        for step in range(int(counts.max())):
            prompts = order[: int((counts > step).sum())]
            firsts.append(starts[prompts] + step * size)
            ends.append(starts[prompts] + lengths[prompts])
            steps.append(len(prompts))
        first, end = np.concatenate(firsts), np.concatenate(ends)
        rows = first[:, None] + np.arange(size)
        real = rows < end[:, None]
        rows = np.where(real, rows, first[:, None])
        places = np.empty(int(lengths.sum()), dtype=np.int64)
        places[rows[real]] = np.flatnonzero(real)
        return cls(order, tuple(steps), rows, real, places)
