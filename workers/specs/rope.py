"""The rotary embedding of a model as plain data. Needs no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary embedding. `scaling` holds the type's parameters under transformers' names, without nulls.

    interleaved   the checkpoint stores the two values of a pair side by side; False: half a head apart
    sections      pairs that turn by the time, by the row and by the column of a token of an image; (): a token has one
                  position. A token of text has the same position three times
    interleaved_sections   the pairs of the sections take turns; False: one section follows the other
    """

    rope_type: str = "default"
    rope_theta: float = 10_000.0
    scaling: Mapping[str, float | bool] = field(default_factory=dict, hash=False)
    interleaved: bool = False
    sections: tuple[int, ...] = ()
    interleaved_sections: bool = False

    @property
    def axes(self) -> list[int]:
        """The position by which each pair turns: 0 time, 1 row, 2 column."""
        if not self.interleaved_sections:
            return [axis for axis, count in enumerate(self.sections) for _ in range(count)]
        places = range(sum(self.sections))
        return [place % 3 if place // 3 < self.sections[place % 3] else 0 for place in places]
