"""Combinations of parameters: some in each run of the suite, all of them in the exhaustive one."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def in_turn(share: int, *axes: Iterable[Any]) -> list[Any]:
    """Return all combinations of the axes' values, of which one of `share` is not exhaustive.

    A value that is a tuple stands for several parameters. Each value has a case that is not exhaustive, and any two
    values of different axes meet in one if a third axis has `share` values or more.
    """
    cases = []
    for numbered in product(*(list(enumerate(axis)) for axis in axes)):
        values = [
            it for _, value in numbered for it in (value if type(value) is tuple else [value])
        ]
        skipped = sum(number for number, _ in numbered) % share
        cases.append(pytest.param(*values, marks=pytest.mark.exhaustive if skipped else []))
    return cases
