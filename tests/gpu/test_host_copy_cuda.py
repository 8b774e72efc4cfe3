"""Arrays of the host reach the device without a wait for its earlier work, and may be overwritten at once."""

import numpy as np
import pytest
import torch

from kernels.host.host_copy import MAX_PAGEABLE_BYTES, HostCopies, fill, to_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CYCLES = 2_000_000_000  # a second of a GPU
MOST = MAX_PAGEABLE_BYTES // 8


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("size", [1, MOST, MOST + 1, 2**20])
def test_a_copy_to_a_busy_device(size: int, filled: bool) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    found = to_device(np.zeros(size, np.int64), device)  # allocates
    torch.cuda.synchronize()
    busy, array = torch.cuda.Event(), np.arange(size)
    torch.cuda._sleep(CYCLES)
    busy.record()
    if filled:
        fill(found, array)
    else:
        found = to_device(array, device)
    array[:] = -1
    assert not busy.query(), "the copy has waited for earlier work"
    assert found.tolist() == list(range(size))


def test_copies_to_the_host_wait_for_what_was_computed_and_delay_nothing() -> None:
    """Also of tensors that are written again at once, and of parts of larger ones."""
    stream, wide = torch.cuda.Stream(), torch.zeros(4, 6, dtype=torch.int64, device="cuda")
    copies, later = HostCopies(stream), torch.cuda.Event()
    torch.cuda._sleep(CYCLES // 10)
    wide += 3
    found = [copies(wide), copies(wide[:, 2:4]), copies(wide[:0])]
    copies.finish()
    torch.cuda._sleep(CYCLES)
    later.record()
    copies.wait()
    assert not later.query(), "the copies have waited for later work"
    assert [part.tolist() for part in found] == [[[3] * 6] * 4, [[3] * 2] * 4, []]
