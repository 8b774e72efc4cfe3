"""Signals between the streams of all ranks, by the driver's stream memory operations: no kernel.

A CUDA graph captures the operations with their values, so each word goes from 0 to 1 and back. Knows nothing of the
work that is signalled.
"""

import ctypes
import functools

import torch

from kernels.all2all.peer_memory import PeerMemory

_WAIT_32, _WRITE_32, _EQUAL = 1, 2, 1  # CU_STREAM_MEM_OP_*, CU_STREAM_WAIT_VALUE_EQ


class _Operation(ctypes.Structure):
    """CUstreamBatchMemOpParams: the common fields of waits and writes, padded to the union's 48 bytes."""

    _fields_ = (
        ("operation", ctypes.c_uint),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint),
        ("alias", ctypes.c_uint64),
        ("padding", ctypes.c_uint64),
    )


class StreamSignals:
    """One signal word of each rank for each peer, from byte `words_at` of the rank's memory on."""

    def __init__(self, memory: PeerMemory, words_at: int):
        others = [rank for rank in range(memory.num_ranks) if rank != memory.rank]
        own = [memory.address(memory.rank, words_at + 4 * rank) for rank in others]
        operations = [
            *(
                _Operation(_WRITE_32, memory.address(rank, words_at + 4 * memory.rank), 1)
                for rank in others
            ),
            *(_Operation(_WAIT_32, address, 1, _EQUAL) for address in own),
            *(_Operation(_WRITE_32, address, 0) for address in own),
        ]
        releases = [_Operation(_WRITE_32, address, 1) for address in own]
        self._operations = (_Operation * len(operations))(*operations)
        self._releases = (_Operation * len(releases))(*releases)

    def signal_and_wait(self, stream: torch.cuda.Stream) -> None:
        """Signal the earlier work of `stream` to all peers, then let it wait for their signals.

        Two calls over the same words need another signal of every rank to every rank between them; otherwise a word
        could be set before it was reset.
        """
        _submit(stream, self._operations)

    def release(self, stream: torch.cuda.Stream) -> None:
        """Write this rank's own words over `stream`, so that a stream that waits for them goes on."""
        _submit(stream, self._releases)


def _submit(stream: torch.cuda.Stream, operations: "ctypes.Array[_Operation]") -> None:
    driver = _driver()
    code = driver.cuStreamBatchMemOp_v2(
        ctypes.c_void_p(stream.cuda_stream), len(operations), operations, 0
    )
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"cuStreamBatchMemOp: {(text.value or b'?').decode()} ({code})")


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
