"""What the driver is asked for GPU tensors of other processes: allocations mapped once, places of slots, errors."""

import ctypes
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.host import shared_gpu_tensors
from kernels.host.shared_gpu_tensors import GpuMappings, MappedTensor

BASE = 1 << 40


class Driver:
    """Maps each handle at an address that follows from its first byte; `error` is what calls return."""

    def __init__(self) -> None:
        self.opened: list[int] = []
        self.closed: list[int] = []
        self.copies: list[tuple[int, int]] = []
        self.error = 0

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: int) -> int:
        assert flags == 1
        address._obj.value = BASE * handle.reserved[0]
        self.opened.append(handle.reserved[0])
        return self.error

    def cuIpcCloseMemHandle(self, address: int) -> int:
        self.closed.append(address)
        return self.error

    def cuMemcpyDtoDAsync_v2(self, _target: int, source: int, size: int, stream: int) -> int:
        assert stream == 77
        self.copies.append((source, size))
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(shared_gpu_tensors, "_driver", lambda: made)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    stream = SimpleNamespace(cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    return made


def handle(number: int, offset: int, slots: int = 4) -> dict[str, Any]:
    ipc = bytes([number, *range(1, 64)]).hex()
    return {"slots": slots, "slot_bytes": 12, "offset": offset, "ipc": ipc}


def test_an_allocation_is_mapped_once_and_slots_are_found_in_it(
    driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    mappings, target = GpuMappings(torch.device("cuda", 0)), torch.zeros(3)
    first, second, other = (
        mappings.open(it) for it in (handle(1, 0), handle(1, 256), handle(2, 8))
    )
    for tensor, slot in ((first, 3), (second, 0), (other, 1)):
        tensor.copy_slot(slot, target)
    assert driver.opened == [1, 2]
    assert driver.copies == [(BASE + 36, 12), (BASE + 256, 12), (2 * BASE + 20, 12)]
    for slot, wrong in ((4, target), (0, torch.zeros(4)), (0, torch.zeros(3, 2)[:, 0])):
        with pytest.raises(AssertionError):
            first.copy_slot(slot, wrong)
    driver.error = 700
    mappings.close()
    mappings.close()
    assert sorted(driver.closed) == [BASE, 2 * BASE] and "CUDA error 700" in caplog.text


def test_what_cannot_be_mapped_is_an_error_with_the_drivers_number(driver: Driver) -> None:
    driver.error = 217
    mappings = GpuMappings(torch.device("cuda", 0))
    with pytest.raises(OSError, match="cuIpcOpenMemHandle_v2 returned CUDA error 217"):
        mappings.open(handle(1, 0))
    empty = mappings.open({**handle(1, 0, slots=0), "ipc": ""})
    assert isinstance(empty, MappedTensor), "nothing of it can be read"
    mappings.close()
    assert not driver.closed
    assert ctypes.sizeof(shared_gpu_tensors._IpcHandle) == 64
