"""Plans of flashinfer take the maximum of a tensor at once, and that of anything else as before."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from kernels.attention.flashinfer_modules import plan_quickly

PLAN = """
def longest(*values, **options):
    return max(*values, **options)
"""


class Lengths(torch.Tensor):
    """Of which no element may become a tensor."""

    def __iter__(self) -> Any:
        raise AssertionError("an element at a time")


def test_the_maximum_of_a_tensor_makes_no_tensor_of_each_element(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library = ModuleType("flashinfer.prefill")
    exec(PLAN, vars(library))
    lengths = torch.tensor([3, 7, 5]).as_subclass(Lengths)
    with pytest.raises(AssertionError, match="an element at a time"):
        library.longest(lengths)
    monkeypatch.setitem(sys.modules, "flashinfer.prefill", library)
    plan_quickly()
    assert library.longest(lengths).item() == 7
    assert library.longest(2, 5) == 5
    assert library.longest([4, -6], key=abs) == -6
    assert library.longest([], default=1) == 1
