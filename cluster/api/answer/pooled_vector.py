"""The vector that a request answers with, in the place of a text. Knows nothing of what the vector means."""

import numpy as np

from workers.wire.request import RequestOutput


class PooledVector:
    """Takes the one output of a request with PoolingParams.

    vector   float32 [n], None before
    """

    num_tokens = 0
    stop_reason: str | int | None = None
    may_end_early = False

    def __init__(self) -> None:
        self.finish_reason: str | None = None
        self.vector: np.ndarray | None = None

    def push(self, output: RequestOutput) -> str:
        """Take the vector; there is no text."""
        self.finish_reason, self.vector = output.finish_reason, output.vector
        return ""
