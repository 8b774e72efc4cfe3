"""Arrays of the host reach the device without a wait for its earlier work, and may be overwritten at once."""

import numpy as np
import pytest
import torch

from kernels.host.host_copy import MAX_PAGEABLE_BYTES, to_device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
CYCLES = 2_000_000_000  # a second of a GPU
MOST = MAX_PAGEABLE_BYTES // 8


@pytest.mark.parametrize("size", [1, MOST, MOST + 1, 2**20])
def test_a_copy_to_a_busy_device(size: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    to_device(np.zeros(size, np.int64), device)  # allocates
    torch.cuda.synchronize()
    busy, array = torch.cuda.Event(), np.arange(size)
    torch.cuda._sleep(CYCLES)
    busy.record()
    found = to_device(array, device)
    array[:] = -1
    assert not busy.query(), "the copy has waited for earlier work"
    assert found.tolist() == list(range(size))
