"""Computes arrival times for an open loop. Pure: the same seed gives every server the same schedule."""

import math
import random
from itertools import accumulate


def arrival_offsets(
    num_requests: int, rate: float, burstiness: float, source: random.Random
) -> list[float]:
    """Return the seconds from the first arrival to each arrival; `rate` is the mean in requests/s.

    The gaps are gamma distributed with shape `burstiness` and mean 1 / rate: 1 = Poisson arrivals,
    below 1 more bursty, above 1 more even. An infinite rate: all at once.
    """
    if math.isinf(rate):
        return [0.0] * num_requests
    scale = 1 / (rate * burstiness)
    gaps = (source.gammavariate(burstiness, scale) for _ in range(num_requests - 1))
    return list(accumulate(gaps, initial=0.0))
