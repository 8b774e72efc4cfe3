"""Reads tensors out of files on several threads into their slots. Knows nothing of the weight map.

A mapped file costs page faults, and its copy to a GPU costs a second copy through a buffer of the driver. Therefore
each thread reads several tensors at a time into its own memory, pinned for GPUs, copies them to the GPU at once on its
own stream, and fills their slots. Other threads read while the copy runs. Each thread holds PIECE bytes or one larger
tensor, and of a matrix in four bits also the codes with a byte each.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import torch

from workers.specs.four_bit import FourBitForm
from workers.weights.checkpoint_files import CheckpointError
from workers.weights.files import DTYPES, StoredTensor
from workers.weights.slots import Progress, Slot
from workers.weights.unpack import PackedValuesError, unpack

PIECE = 32 * 2**20  # bytes of a thread's buffer and of one copy
MAX_THREADS = 8
ALIGNMENT = 16


@dataclass(frozen=True)
class SlotSource:
    """A slot and the stored tensors that fill it: one; or one in FP8 and its scales; or those of a packed matrix.

    name     of the matrix in an unpacked checkpoint
    packed   how the tensors pack a matrix in four bits; None: they do not
    """

    slot: Slot
    stored: Sequence[StoredTensor]
    name: str = ""
    packed: FourBitForm | None = None

    @property
    def place(self) -> tuple[str, int]:
        """File and offset: the order of sources on disk."""
        return str(self.stored[0].file), self.stored[0].offset

    @property
    def num_bytes(self) -> int:
        """Bytes to read."""
        return sum(stored.num_bytes for stored in self.stored)

    def fill(self, tensors: list[torch.Tensor]) -> None:
        """Fill the slot from the content of `stored`. Raises CheckpointError for values that stand for no weights."""
        if self.packed is not None:
            try:
                self.slot.fill_four_bit(unpack(self.packed, tensors))
            except PackedValuesError as error:
                raise CheckpointError(f"{self.name} cannot be unpacked: {error}") from error
        elif len(tensors) == 1:
            self.slot.fill(*tensors)
        else:
            self.slot.fill_blocks(*tensors)


def fill_slots(
    sources: Iterable[SlotSource],
    device: torch.device,
    *,
    num_threads: int,
    serving: bool = False,
    progress: Progress | None = None,
) -> None:
    """Fill every slot, all on `device`; `progress(done, total)` in bytes runs on any thread, one call at a time.

    serving   steps run beside: wait for the streams of the threads alone, and leave their buffers to the next call

    Raises CheckpointError if a file cannot be read, or is shorter than its header states.
    """
    ordered = sorted(sources, key=lambda source: source.place)
    work = _Work(ordered, progress)
    num_threads = max(1, min(num_threads, MAX_THREADS, work.total // PIECE))
    with ThreadPoolExecutor(num_threads, "weights") as pool:
        done = [pool.submit(_Reader(device).run, work) for _ in range(num_threads)]
    for future in done:
        future.result()
    if device.type == "cuda" and not serving:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # the buffers of the threads: only their streams could use them again


class _Work:
    """The sources in portions, which threads take one by one."""

    def __init__(self, ordered: Sequence[SlotSource], progress: Progress | None):
        self.total = sum(source.num_bytes for source in ordered)
        self._done = 0
        self._progress = progress
        self._portions = _portions(ordered)
        self._lock = Lock()

    def next(self) -> list[SlotSource] | None:
        """Return the next portion, None if there is none or `stop` was called."""
        with self._lock:
            return next(self._portions, None)

    def finished(self, portion: list[SlotSource]) -> None:
        with self._lock:
            self._done += sum(source.num_bytes for source in portion)
            if self._progress is not None:
                self._progress(self._done, self.total)

    def stop(self) -> None:
        """Return no further portion from `next`."""
        with self._lock:
            self._portions = iter(())


def _portions(ordered: Sequence[SlotSource]) -> Iterator[list[SlotSource]]:
    """Yield neighbours of at most PIECE bytes together, or a single larger source."""
    portion: list[SlotSource] = []
    num_bytes = 0
    for source in ordered:
        if portion and num_bytes + source.num_bytes > PIECE:
            yield portion
            portion, num_bytes = [], 0
        portion.append(source)
        num_bytes += source.num_bytes
    if portion:
        yield portion


class _Reader:
    """The buffers and files of one thread."""

    def __init__(self, device: torch.device):
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._files: dict[Path, int] = {}

    def run(self, work: _Work) -> None:
        """Fill slots until no portion is left; a failure stops the other threads too."""
        try:
            with ExitStack() as stack:
                stack.callback(self._close_files)
                if self._on_gpu:
                    stack.enter_context(torch.cuda.device(self._device))
                    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
                    stack.enter_context(torch.cuda.stream(stream))
                    stack.callback(stream.synchronize)
                    self._pinned = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
                    self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
                while (portion := work.next()) is not None:
                    self._fill(portion)
                    work.finished(portion)
        except BaseException:
            work.stop()
            raise

    def _fill(self, portion: list[SlotSource]) -> None:
        starts, size = [], 0
        for source in portion:
            for stored in source.stored:
                starts.append(size)
                size += -(-stored.num_bytes // ALIGNMENT) * ALIGNMENT
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        every = [stored for source in portion for stored in source.stored]
        if self._on_gpu:
            self._send(every, starts, buffer)
        else:
            for stored, start in zip(every, starts, strict=True):
                self._read(stored, 0, buffer[start : start + stored.num_bytes])
        tensors = iter([_typed(buffer, s, at) for s, at in zip(every, starts, strict=True)])
        for source in portion:
            source.fill([next(tensors) for _ in source.stored])

    def _send(self, every: list[StoredTensor], starts: list[int], buffer: torch.Tensor) -> None:
        for base, reads in copies([stored.num_bytes for stored in every], starts):
            self._sent.synchronize()
            for index, skip, at, count in reads:
                self._read(every[index], skip, self._pinned[at : at + count])
            used = at + count
            buffer[base : base + used].copy_(self._pinned[:used], non_blocking=True)
            self._sent.record()

    def _read(self, stored: StoredTensor, skip: int, target: torch.Tensor) -> None:
        """Read a tensor's bytes from `skip` on into the whole of `target`, uint8 on the CPU."""
        view, done = memoryview(target.numpy()), 0  # type: ignore[arg-type]  # numpy's stubs lag behind
        try:
            if stored.file not in self._files:
                self._files[stored.file] = os.open(stored.file, os.O_RDONLY)
            while done < len(view):
                offset = stored.offset + skip + done
                count = os.preadv(self._files[stored.file], [view[done:]], offset)
                if not count:
                    raise CheckpointError(f"{stored.file} became shorter while it was read")
                done += count
        except OSError as error:
            raise CheckpointError(f"{stored.file} cannot be read: {error}") from error

    def _close_files(self) -> None:
        for file in self._files.values():
            os.close(file)
        self._files.clear()


def copies(
    sizes: Sequence[int], starts: Sequence[int]
) -> Iterator[tuple[int, list[tuple[int, int, int, int]]]]:
    """Split tensors of `sizes` bytes at `starts` (ascending) of one buffer into copies of at most PIECE bytes.

    Yields for each copy its place in the buffer, and its reads: (tensor, bytes of the tensor to skip, place in the
    copy, bytes).
    """
    base, end = 0, 0
    reads: list[tuple[int, int, int, int]] = []
    for index, (size, start) in enumerate(zip(sizes, starts, strict=True)):
        skip = 0
        while skip < size:
            if reads and start + skip >= end:
                yield base, reads
                reads = []
            if not reads:
                base, end = start + skip, start + skip + PIECE
            count = min(size - skip, end - start - skip)
            reads.append((index, skip, start + skip - base, count))
            skip += count
    if reads:
        yield base, reads


def _typed(buffer: torch.Tensor, stored: StoredTensor, start: int) -> torch.Tensor:
    raw = buffer[start : start + stored.num_bytes]
    values = raw.view(DTYPES[stored.dtype])
    if values.dtype == torch.float8_e8m0fnu:
        values = values.float()  # torch has few operators for it
    if stored.columns is None:
        return values.view(stored.shape)
    transposed = values.view(stored.shape[1], -1)
    return transposed[:, slice(*stored.columns)].t().contiguous()
