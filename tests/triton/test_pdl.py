"""Which kernels start before the kernel before them has ended."""

import inspect

import pytest

from kernels.pending import set_yield_ubatch
from kernels.triton import pdl, qk_rope
from kernels.triton.pdl import MOST_ROWS, dependent_launch

OFF, ON = ({"PDL": on, "launch_pdl": on} for on in (False, True))


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdl, "supported", lambda: True)


def test_kernels_of_few_rows_start_early(hopper: None) -> None:
    assert dependent_launch(1) == dependent_launch(MOST_ROWS) == ON
    assert dependent_launch(MOST_ROWS + 1) == dependent_launch(1, early=False) == OFF


def test_no_kernel_starts_early_in_ubatches(hopper: None) -> None:
    set_yield_ubatch(lambda: None)
    try:
        assert dependent_launch(1) == OFF
    finally:
        set_yield_ubatch(None)
    assert dependent_launch(1) == ON


def test_flashinfer_does_not_start_early() -> None:
    """Its kernel for a rank without sequences ends without waiting, and so before the kernels before it."""
    assert "begin_last(PDL)" in inspect.getsource(qk_rope)
