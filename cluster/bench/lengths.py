"""Lengths of prompts and answers: one number, an even range, or a lognormal with a longest value."""

import math
import random
from dataclasses import dataclass

FORMS = "N, LOW-HIGH or lognormal:MEDIAN:SIGMA:MAX, in tokens"


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths. `sigma` None: uniform from `low` to `high`, both included."""

    low: int
    high: int
    median: float = 0.0
    sigma: float | None = None

    @classmethod
    def parse(cls, text: int | str) -> "Lengths":
        """Parse `64`, `32-512` or `lognormal:256:0.8:2048`. Raises ValueError with the allowed forms."""
        text = str(text)
        try:
            kind, *numbers = text.split(":")
            if kind == "lognormal":
                median, sigma, high = float(numbers[0]), float(numbers[1]), int(numbers[2])
                lengths = cls(1, high, median, sigma)
                valid = len(numbers) == 3 and 1 <= median <= high and 0 <= sigma < math.inf
            else:
                low, dash, high_text = text.partition("-")
                lengths = cls(int(low), int(high_text) if dash else int(low))
                valid = 1 <= lengths.low <= lengths.high
        except (ValueError, IndexError):
            valid = False
        if not valid:
            raise ValueError(f"{text!r} is not a length; write {FORMS}")
        return lengths

    def sample(self, source: random.Random) -> int:
        """Draw one length; a fixed length takes no random number."""
        if self.sigma is not None:
            value = round(source.lognormvariate(math.log(self.median), self.sigma))
            return min(max(value, self.low), self.high)
        return self.low if self.low == self.high else source.randint(self.low, self.high)
