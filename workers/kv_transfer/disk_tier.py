"""The file tier below a node's memory: one file for the contents of each name, within a number of bytes.

A file gets its name when it is whole. A header describes the contents, and the reader of its rows compares their check
value, so a torn, damaged or deleted file, a full disk and a file of another version cost a computation and nothing
else: each is counted. A folder belongs to one server at a time; files of contents of another form are deleted.
Needs the standard library alone.
"""

import logging
import math
import os
import queue
import struct
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from kernels.host.file_locks import lock_byte
from kernels.host.owned import start_thread
from workers.kv_transfer.host_index import Place

logger = logging.getLogger(__name__)

FOLDER, SUFFIX, DRAFT = "phalanx-kv", ".kv", ".draft"
QUEUE_BYTES = 2**28
"""Bytes that wait to be written; what comes on top of them is not kept in a file."""
FULL_PAUSE_S = 10.0
"""Time without writes after one has failed."""
_MAGIC = b"PHXKV\0\0\1"
_HEADER = struct.Struct(
    "<8s16s40s32sqqqq"
)  # magic, compatibility, name, parent, number, units, bytes, check


class DiskTier:
    """The files of one form of contents.

    `changes` has the names that have got (True) or lost (False) their file, in order, until the owner clears it. Files
    of an earlier server come first.
    """

    def __init__(self, path: str, num_bytes: int, compatibility: bytes):
        self._folder, self._limit = Path(path) / FOLDER, num_bytes
        self._compatibility = compatibility
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # of files, the longest unused first
        self._used = self._queued = 0
        self._counts: Counter[str] = Counter()
        self.changes: deque[tuple[bytes, bool]] = deque()
        # Contents that are to be written, without the forgotten ones.
        self._waiting: dict[bytes, list[bytes]] = {}
        self._writes: queue.SimpleQueue[tuple[bytes, bytes, list[bytes]] | None] = (
            queue.SimpleQueue()
        )
        self._lock = threading.Lock()
        self._blocked_until = 0.0
        self._fd = self._take_folder()
        if self._fd >= 0:
            self._find_files()
            self._writer = start_thread(self._write_all, self._fail, "kv-files")

    def __contains__(self, name: bytes) -> bool:
        return name in self._sizes

    def names(self) -> list[bytes]:
        """Return the names with a file."""
        with self._lock:
            return list(self._sizes)

    def offer(self, place: Place, check: int, rows: Iterable[memoryview]) -> None:
        """Write contents to a file, unless they have one or too many wait."""
        has_file = place.name in self._sizes or place.name in self._waiting
        if self._fd < 0 or has_file or time.monotonic() < self._blocked_until:
            return
        data = [bytes(row) for row in rows]
        size = sum(map(len, data))
        if self._writes.qsize() and self._queued + size > QUEUE_BYTES:
            self._counts["disk_skipped"] += 1
            return
        name = place.name.ljust(40, b"\0")
        header = _HEADER.pack(
            *(_MAGIC, self._compatibility, name, place.parent.ljust(32, b"\0")),
            *(place.number, place.num_units, size, check),
        )
        with self._lock:
            self._queued += size
            self._waiting[place.name] = data
        self._writes.put((place.name, header, data))

    def place_of(self, name: bytes) -> Place | None:
        """Return the place of contents with a file; None without a file that can be read."""
        if name not in self._sizes:
            return None
        header = self._header(name)
        if header is None:
            self.forget(name)
            return None
        _, _, _, parent, number, num_units, _, _ = header
        key, suffix = name[:32], name[32:]
        return Place(key, suffix, parent if any(parent) else b"", number, num_units)

    def read(self, name: bytes, rows: list[memoryview]) -> int | None:
        """Fill rows with the contents, and return their check value; None if the file is not what it has to be."""
        header = self._header(name)
        if header is not None and header[6] == sum(map(len, rows)):
            with suppress(OSError), self._path(name).open("rb", buffering=0) as file:
                file.seek(_HEADER.size)
                if all(_fill(file.fileno(), row) for row in rows):
                    os.utime(file.fileno())
                    with self._lock:
                        if name in self._sizes:  # it may have made room for another file meanwhile
                            self._sizes.move_to_end(name)
                    self._counts["disk_read_bytes"] += header[6]
                    return int(header[7])
            self._counts["disk_damaged"] += 1
        self.forget(name)
        return None

    def forget(self, name: bytes) -> None:
        """Delete the file of a name, if it has one, also one that is being written."""
        with self._lock:
            self._waiting.pop(name, None)
            self._delete(name)

    def counts(self) -> dict[str, float]:
        """Return counters and gauges by name."""
        names = ("read_bytes", "written_bytes", "missing", "damaged", "stale", "errors", "skipped")
        found: dict[str, float] = {"disk_used_bytes": self._used, "disk_queued_bytes": self._queued}
        return found | {f"disk_{name}": self._counts[f"disk_{name}"] for name in names}

    def close(self) -> None:
        """Write what waits, and give the folder back."""
        if self._fd < 0:
            return
        self._writes.put(None)
        self._writer.join()
        os.close(self._fd)
        self._fd = -1

    def _take_folder(self) -> int:
        """Return a descriptor with the lock of the folder; -1 if another server has it, or it cannot be written."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            fd = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                lock_byte(fd, 0)
            except OSError:
                os.close(fd)
                raise
        except OSError as error:
            logger.warning("no file tier in %s: %s", self._folder, error)
            self._counts["disk_errors"] += 1
            return -1
        return fd

    def _find_files(self) -> None:
        found = []
        for path in self._folder.iterdir():
            form, _, name = path.name.removesuffix(SUFFIX).partition("-")
            with suppress(OSError, ValueError):
                if path.suffix == DRAFT or (path.suffix == SUFFIX and form != self._form):
                    path.unlink()
                    self._counts["disk_stale"] += 1
                elif path.suffix == SUFFIX:
                    facts = path.stat()
                    found.append((facts.st_mtime, bytes.fromhex(name), facts.st_size))
        for _, name_bytes, size in sorted(found):
            self._sizes[name_bytes] = size
            self._used += size
        self._make_room(0)
        self.changes.clear()  # these names were never entered
        self.changes += ((name, True) for name in self._sizes)

    def _fail(self, error: BaseException) -> None:
        """Write no more files: the thread that writes them has ended."""
        self._blocked_until = math.inf
        self._counts["disk_errors"] += 1
        logger.error("the file tier has ended", exc_info=error)

    def _write_all(self) -> None:
        while (job := self._writes.get()) is not None:
            name, header, data = job
            size = sum(map(len, data))
            try:
                if self._waiting.get(name) is data:
                    self._write(name, header, data, size + len(header))
                    self._counts["disk_written_bytes"] += size
            except OSError as error:
                self._counts["disk_errors"] += 1
                self._blocked_until = time.monotonic() + FULL_PAUSE_S
                logger.warning("the file tier pauses: %s", error)
            with self._lock:
                self._queued -= size
                if self._waiting.get(name) is data:
                    del self._waiting[name]

    def _write(self, name: bytes, header: bytes, data: list[bytes], size: int) -> None:
        path = self._path(name)
        draft = path.with_suffix(DRAFT)
        if size > self._limit:
            raise OSError(f"{size} bytes are more than the limit of {self._limit} bytes")
        with self._lock:
            self._make_room(size)
        try:
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with open(fd, "wb", buffering=0) as file:
                for part in (header, *data):
                    left = memoryview(part)
                    while left:
                        left = left[file.write(left) :]
            with self._lock:
                if self._waiting.get(name) is not data:
                    draft.unlink()
                    return
                draft.rename(path)
                self._delete_entry(name)
                self._sizes[name] = size
                self._used += size
                self.changes.append((name, True))
        except OSError:
            draft.unlink(missing_ok=True)
            raise

    def _make_room(self, size: int) -> None:
        while self._sizes and self._used + size > self._limit:
            self._delete(next(iter(self._sizes)))

    def _delete(self, name: bytes) -> None:
        if self._delete_entry(name):
            with suppress(OSError):
                self._path(name).unlink()

    def _delete_entry(self, name: bytes) -> bool:
        size = self._sizes.pop(name, None)
        if size is None:
            return False
        self._used -= size
        self.changes.append((name, False))
        return True

    def _header(self, name: bytes) -> tuple[bytes, bytes, bytes, bytes, int, int, int, int] | None:
        """Return the fields of a file's header; None, counted, if the file is not what it has to be."""
        path = self._path(name)
        try:
            with path.open("rb") as file:
                fields = _HEADER.unpack(file.read(_HEADER.size))
                whole = os.fstat(file.fileno()).st_size == _HEADER.size + fields[6]
        except FileNotFoundError:
            self._counts["disk_missing"] += 1
            return None
        except (OSError, struct.error):
            self._counts["disk_damaged"] += 1
            return None
        expected = _MAGIC, self._compatibility, name.ljust(40, b"\0")
        if fields[:2] != expected[:2]:
            self._counts["disk_stale"] += 1
            return None
        if fields[:3] != expected or not whole:
            self._counts["disk_damaged"] += 1
            return None
        return fields

    @property
    def _form(self) -> str:
        return self._compatibility.hex()

    def _path(self, name: bytes) -> Path:
        return self._folder / f"{self._form}-{name.hex()}{SUFFIX}"


def _fill(fd: int, row: memoryview) -> bool:
    """Fill a row from the file; return whether it had so many bytes."""
    while row:
        count = os.readv(fd, [row])
        if not count:
            return False
        row = row[count:]
    return True
