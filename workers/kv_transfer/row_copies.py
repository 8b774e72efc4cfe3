"""Copies of rows between the caches of a device and a node's memory, many rows at a time, with their check values.

On a GPU a row of all layers is made in a buffer of the device, so that the link carries a few copies of many MB in
place of many copies of some KB. Two buffers, each with a stream of its own, take turns: the link works while rows are
made and checked. On CPU rows are copied through a small buffer. All calls belong to one thread, which waits.

N rows, U units.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import NamedTuple

import torch

from workers.kv_transfer.connector import Item
from workers.kv_transfer.contents import CacheContents, Rows

BUFFER_BYTES = 2**26
"""Bytes of a buffer that holds several rows; a larger row has a buffer of its own size.

The link needs a millisecond for them, many times what the thread needs for the calls of a batch.
"""
REGISTER_BYTES = 2**30
"""Bytes of host memory that are pinned at once, because CUDA's other calls wait meanwhile."""


class RowPlace(NamedTuple):
    """A row: the place of its contents on the device, and its units in the memory."""

    item: Item
    units: list[int]


class RowCopies(ABC):
    """Copies between caches and `memory`, a flat tensor of uint8 in which unit u begins at u * unit_bytes."""

    def __init__(self, memory: torch.Tensor):
        self.memory, self.unit_bytes = memory, 0

    @abstractmethod
    def save(self, contents: CacheContents, rows: Sequence[RowPlace]) -> list[int]:
        """Copy rows to the memory; return their check values."""

    @abstractmethod
    def load(self, contents: CacheContents, rows: Sequence[RowPlace]) -> list[int]:
        """Copy rows to the device; return the check values of what came."""

    def close(self) -> None:  # noqa: B027 - on CPU there is nothing to release
        """Release the memory of the copies."""


Batch = tuple[Rows, list[int], list[RowPlace]]


def batches(contents: CacheContents, rows: Sequence[RowPlace]) -> Iterator[Batch]:
    """Yield rows of one kind that fit into a buffer, with their indices."""
    for is_state in (False, True):
        kind = contents.of(is_state)
        chosen = [index for index, row in enumerate(rows) if row.item.is_state is is_state]
        size = max(1, BUFFER_BYTES // max(1, kind.row_bytes))
        for start in range(0, len(chosen), size):
            part = chosen[start : start + size]
            yield kind, part, [rows[index] for index in part]


def places_of(batch: Sequence[RowPlace]) -> list[int]:
    """Return the places of the rows on the device."""
    return [row.item.place for row in batch]


def units_of(batch: Sequence[RowPlace]) -> list[int]:
    """Return the units of all rows."""
    return [unit for row in batch for unit in row.units]


class CpuCopies(RowCopies):
    """Copies of the caches of a CPU."""

    def save(self, contents: CacheContents, rows: Sequence[RowPlace]) -> list[int]:
        checks = [0] * len(rows)
        for kind, indices, batch in batches(contents, rows):
            buffer_NB = torch.empty(len(batch), kind.row_bytes, dtype=torch.uint8)
            checks_N = kind.pack(places_of(batch), buffer_NB)
            self._units[units_of(batch)] = buffer_NB.view(-1, self.unit_bytes)
            for index, check in zip(indices, checks_N.tolist(), strict=True):
                checks[index] = check
        return checks

    def load(self, contents: CacheContents, rows: Sequence[RowPlace]) -> list[int]:
        checks = [0] * len(rows)
        for kind, indices, batch in batches(contents, rows):
            buffer_NB = self._units[units_of(batch)].view(len(batch), kind.row_bytes)
            checks_N = kind.unpack(buffer_NB, places_of(batch))
            for index, check in zip(indices, checks_N.tolist(), strict=True):
                checks[index] = check
        return checks

    @property
    def _units(self) -> torch.Tensor:
        num_units = len(self.memory) // self.unit_bytes
        return self.memory[: num_units * self.unit_bytes].view(num_units, self.unit_bytes)


@dataclass
class Lane:
    """A buffer of the device, and the stream of its copies."""

    buffer: torch.Tensor
    stream: torch.cuda.Stream

    def rows(self, num_rows: int, row_bytes: int) -> torch.Tensor:
        """Return uint8 [num_rows, row_bytes] of the buffer."""
        return self.buffer[: num_rows * row_bytes].view(num_rows, row_bytes)


def make_lanes(device: torch.device, row_bytes: int) -> list[Lane]:
    """Return two lanes for rows of up to `row_bytes` bytes.

    Their kernels come before those of the model, which otherwise keep every multiprocessor for the time of a product.
    """
    size = max(BUFFER_BYTES, row_bytes)
    return [
        Lane(
            torch.empty(size, dtype=torch.uint8, device=device),
            torch.cuda.Stream(device, priority=-1),  # type: ignore[no-untyped-call]
        )
        for _ in range(2)
    ]


class GpuCopies(RowCopies):
    """Copies of the caches of a GPU. The constructor pins the memory, which takes a while."""

    def __init__(self, memory: torch.Tensor, device: torch.device, lanes: list[Lane]):
        super().__init__(memory)
        self._lanes, self._pinned = lanes, list[int]()
        torch.cuda.set_device(device)
        for start in range(0, len(memory), REGISTER_BYTES):
            part = memory[start : start + REGISTER_BYTES]
            cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            torch.cuda.check_error(cudart.cudaHostRegister(part.data_ptr(), len(part), 0))
            self._pinned.append(part.data_ptr())

    def close(self) -> None:
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        while self._pinned:
            torch.cuda.check_error(cudart.cudaHostUnregister(self._pinned.pop()))

    def save(self, contents: CacheContents, rows: Sequence[RowPlace]) -> list[int]:
        found = []
        for lane, (kind, indices, batch) in zip(cycle(self._lanes), batches(contents, rows)):
            with torch.cuda.stream(lane.stream):
                rows_NB = lane.rows(len(batch), kind.row_bytes)
                checks_N = kind.pack(places_of(batch), rows_NB)
                found.append((indices, checks_N.to("cpu", non_blocking=True)))
                for start, part in self._runs(units_of(batch), rows_NB.view(-1)):
                    self.memory[start : start + len(part)].copy_(part, non_blocking=True)
        return self._wait(found, len(rows))

    def load(self, contents: CacheContents, rows: Sequence[RowPlace]) -> list[int]:
        found = []
        for lane, (kind, indices, batch) in zip(cycle(self._lanes), batches(contents, rows)):
            with torch.cuda.stream(lane.stream):
                rows_NB = lane.rows(len(batch), kind.row_bytes)
                for start, part in self._runs(units_of(batch), rows_NB.view(-1)):
                    part.copy_(self.memory[start : start + len(part)], non_blocking=True)
                checks_N = kind.unpack(rows_NB, places_of(batch))
                found.append((indices, checks_N.to("cpu", non_blocking=True)))
        return self._wait(found, len(rows))

    def _runs(
        self, units: Sequence[int], buffer: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the first byte in the memory and the part of the buffer of units side by side.

        No part crosses a border between bytes that were pinned by two calls, because no copy may.
        """
        size, first = self.unit_bytes, 0
        for index in range(1, len(units) + 1):
            if index < len(units) and units[index] == units[index - 1] + 1:
                continue
            start, at = units[first] * size, first * size
            end = start + (index - first) * size
            while start < end:
                length = min(end, (start // REGISTER_BYTES + 1) * REGISTER_BYTES) - start
                yield start, buffer[at : at + length]
                start, at = start + length, at + length
            first = index

    def _wait(self, found: list[tuple[list[int], torch.Tensor]], num_rows: int) -> list[int]:
        for lane in self._lanes:
            lane.stream.synchronize()
        checks = [0] * num_rows
        for indices, checks_N in found:
            for index, check in zip(indices, checks_N.tolist(), strict=True):
                checks[index] = check
        return checks
