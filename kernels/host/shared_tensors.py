"""CPU tensors that other processes of this host map and read in place, in memory without a name.

The memory is a memfd, so it takes nothing of /dev/shm, and ends with the last process that maps it. Another process of
the same user opens it by the number of the process and its descriptor.
"""

import os
from collections.abc import Iterable
from typing import Any

import torch

from kernels.host.processes import start_ticks

Handle = dict[str, Any]  # JSON


class SharedTensors:
    """The tensors of one process that others may read."""

    def __init__(self) -> None:
        self._handles: dict[int, Handle] = {}  # by address

    def share(self, tensors: Iterable[torch.Tensor]) -> list[Handle]:
        """Move the storages of these tensors to memory that others can map; forget all other tensors.

        The tensors stay the same objects. A tensor that is shared already stays where it is.
        """
        before, self._handles = self._handles, {}
        handles = []
        for tensor in tensors:
            handle = before.pop(tensor.data_ptr(), None) or _move(tensor)
            if handle["bytes"]:
                self._handles[tensor.data_ptr()] = handle
            handles.append(handle)
        for gone in before.values():
            os.close(gone["fd"])
        return handles

    def close(self) -> None:
        """Let no further process map the tensors."""
        self.share(())


def _move(tensor: torch.Tensor) -> Handle:
    storage = tensor.untyped_storage()
    size, fd = storage.nbytes(), -1
    shape, stride, offset = tuple(tensor.shape), tensor.stride(), tensor.storage_offset()
    if size:  # nothing can be mapped otherwise
        fd = os.memfd_create("phalanx-tensor")
        os.ftruncate(fd, size)
        shared = torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", True, size)
        shared.copy_(storage, non_blocking=False)
        tensor.set_(shared, offset, shape, stride)  # type: ignore[arg-type]
    return {
        "pid": os.getpid(),
        "started": start_ticks(os.getpid()),
        "fd": fd,
        "bytes": size,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": shape,
        "stride": stride,
        "offset": offset,
    }


def open_shared(handle: Handle) -> torch.Tensor:
    """Return a tensor over the memory of another process, to be read alone. Raises OSError if that is impossible."""
    pid = int(handle["pid"])
    if start_ticks(pid) != handle["started"]:
        raise OSError(f"process {pid} has ended")
    if not handle["bytes"]:
        return torch.empty(handle["shape"], dtype=getattr(torch, handle["dtype"]))
    path = f"/proc/{pid}/fd/{handle['fd']}"
    os.close(os.open(path, os.O_RDWR))  # torch would name neither the path nor the reason
    storage = torch.UntypedStorage.from_file(path, True, int(handle["bytes"]))
    tensor = torch.empty(0, dtype=getattr(torch, handle["dtype"]))
    place = int(handle["offset"]), tuple(handle["shape"]), tuple(handle["stride"])
    return tensor.set_(storage, *place)  # type: ignore[arg-type]
