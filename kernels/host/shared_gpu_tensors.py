"""GPU tensors that other processes of this host map and copy from, by CUDA IPC, also where they see other GPUs.

By the driver's calls: torch's own sharing keeps a count of references to each tensor in a file, and opens events of
GPUs that the other process may not see. The allocation around a tensor is mapped whole, once.
"""

import ctypes
import functools
import logging
import math
from typing import Any

import torch

logger = logging.getLogger(__name__)

Handle = dict[str, Any]  # JSON
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is


class _IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


@functools.cache
def _driver() -> ctypes.CDLL:
    driver, address, size = ctypes.CDLL("libcuda.so.1"), ctypes.c_uint64, ctypes.c_size_t
    pointer = ctypes.POINTER
    driver.cuMemGetAddressRange_v2.argtypes = [pointer(address), pointer(size), address]
    driver.cuIpcGetMemHandle.argtypes = [pointer(_IpcHandle), address]
    driver.cuIpcOpenMemHandle_v2.argtypes = [pointer(address), _IpcHandle, ctypes.c_uint]
    driver.cuIpcCloseMemHandle.argtypes = [address]
    driver.cuMemcpyDtoDAsync_v2.argtypes = [address, address, size, ctypes.c_void_p]
    return driver


def _call(name: str, *arguments: Any) -> None:
    """Call the driver, for the GPU that is current in this thread. Raises OSError with the number of the error."""
    error = getattr(_driver(), name)(*arguments)
    if error:
        raise OSError(f"{name} returned CUDA error {error}")


def share_gpu(tensor: torch.Tensor) -> Handle:
    """Return the handle by which other processes map a contiguous tensor, as long as it lives. Raises OSError."""
    assert tensor.is_cuda and tensor.is_contiguous(), (tensor.device, tensor.stride())
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _IpcHandle()
    slot_bytes = tensor.element_size() * math.prod(tensor.shape[1:])
    found: Handle = {"slots": len(tensor), "slot_bytes": slot_bytes, "offset": 0, "ipc": ""}
    if not tensor.nbytes:  # nothing can be mapped
        return found
    with torch.cuda.device(tensor.device):
        address = tensor.data_ptr()
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
        _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return found | {"offset": address - base.value, "ipc": bytes(handle.reserved).hex()}


class GpuMappings:
    """The allocations of other processes that this process has mapped for `device`."""

    def __init__(self, device: torch.device):
        self._device = device
        self._bases: dict[str, int] = {}

    def open(self, handle: Handle) -> "MappedTensor":
        """Map the allocation of a tensor. Raises OSError if that is impossible, as without access between the GPUs."""
        ipc, base = handle["ipc"], 0
        if ipc:
            if ipc not in self._bases:
                self._bases[ipc] = self._map(ipc)
            base = self._bases[ipc]
        return MappedTensor(base + handle["offset"], handle["slots"], handle["slot_bytes"])

    def _map(self, ipc: str) -> int:
        address, given = ctypes.c_uint64(), _IpcHandle.from_buffer_copy(bytes.fromhex(ipc))
        with torch.cuda.device(self._device):
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, _LAZY_PEER_ACCESS)
        return address.value

    def close(self) -> None:
        """Unmap all; no copy from them may run any more."""
        while self._bases:
            _, base = self._bases.popitem()
            try:
                with torch.cuda.device(self._device):
                    _call("cuIpcCloseMemHandle", base)
            except OSError as error:  # a failure of the GPU ends the epoch by itself
                logger.warning("memory of another process stays mapped: %s", error)


class MappedTensor:
    """A tensor of another process, by slots along its first axis."""

    def __init__(self, address: int, num_slots: int, slot_bytes: int):
        self._address, self._num_slots, self._slot_bytes = address, num_slots, slot_bytes

    def copy_slot(self, slot: int, target: torch.Tensor) -> None:
        """Copy one slot into a contiguous tensor of its size on this process's GPU, on the current stream."""
        assert 0 <= slot < self._num_slots and target.is_contiguous(), (slot, target.stride())
        assert target.nbytes == self._slot_bytes, (target.nbytes, self._slot_bytes)
        with torch.cuda.device(target.device):
            stream = torch.cuda.current_stream().cuda_stream
            source = self._address + slot * self._slot_bytes
            _call("cuMemcpyDtoDAsync_v2", target.data_ptr(), source, self._slot_bytes, stream)
