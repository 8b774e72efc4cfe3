"""The output of a batch on a disk that fails: no torn line counts, and no line follows one."""

import asyncio
import os
from pathlib import Path

import pytest

from cluster.bench.progress import Progress
from cluster.offline import batch_output
from cluster.offline.batch import BatchRun
from cluster.offline.batch_input import BatchError, BatchInput
from cluster.offline.batch_output import BatchOutput
from tests.unit.test_batch import Recording, never, request, results, run, write


def test_a_broken_file_keeps_a_torn_line_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The line cannot be cut off; requests beside it end at the same time."""
    source, out = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    write(source, *(request(str(i)) for i in range(8)))
    real_write, num_writes = os.write, 0

    def tear_one(fd: int, data: bytes) -> int:
        nonlocal num_writes
        num_writes += 1
        if num_writes == 3:
            real_write(fd, data[:50])
            raise OSError(5, "Input/output error")
        return real_write(fd, data)

    def broken(fd: int, size: int) -> None:
        raise OSError(5, "Input/output error")

    output = BatchOutput(out)
    batch = BatchRun(BatchInput(source), output, Progress())
    monkeypatch.setattr(batch_output.os, "write", tear_one)
    monkeypatch.setattr(batch_output.os, "ftruncate", broken)
    with pytest.raises(BatchError, match=r"cannot write .*: Input/output error"):
        asyncio.run(batch.run(Recording(), 4, never))
    assert len(output.done) == 2 and num_writes == 3
    assert batch.summary.startswith("2 of 8 lines have a result")
    with pytest.raises(BatchError, match="Input/output error"):
        output.append(next(BatchInput(source).lines()), b"", is_error=False)
    output.close()
    monkeypatch.undo()
    data = out.read_bytes()
    assert data.count(b"\n") == 2 and len(data.rpartition(b"\n")[2]) == 50
    assert run(source, out, Recording()).complete and len(results(out)) == 8


def test_a_disk_that_is_full_at_the_end_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    write(source, request("a"))

    def full(fd: int) -> None:
        raise OSError(122, "Disk quota exceeded")

    monkeypatch.setattr(batch_output.os, "fsync", full)
    with pytest.raises(BatchError, match=r"cannot write .*: Disk quota exceeded"):
        run(source, out, Recording())
