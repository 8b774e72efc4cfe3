"""Reading tensors by several threads: every byte at its place, each failure told, whatever the sizes."""

import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from workers.weights import reader as weight_reader
from workers.weights.checkpoint_files import CheckpointError
from workers.weights.files import read_headers
from workers.weights.reader import SlotSource, copies, fill_slots
from workers.weights.slots import WeightSlot

CPU = torch.device("cpu")


@pytest.fixture
def tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Two files of tensors of 0 to 3 pieces."""
    monkeypatch.setattr(weight_reader, "PIECE", 4000)
    source = random.Random(1)
    found = {}
    for index in range(60):
        size = source.choice([0, 1, 7, 100, 999, 1000, 1001, 2500, 3000])
        found[f"t{index}"] = torch.randn(size, generator=torch.Generator().manual_seed(index))
    names = list(found)
    weight_map = {}
    for file, part in (("a", names[:25]), ("b", names[25:])):
        save_file({name: found[name] for name in part}, tmp_path / f"{file}.safetensors")
        weight_map |= dict.fromkeys(part, f'"{file}.safetensors"')
    entries = ", ".join(f'"{name}": {file}' for name, file in weight_map.items())
    index_file = tmp_path / "model.safetensors.index.json"
    index_file.write_text(f'{{"weight_map": {{{entries}}}}}')
    return found


def sources(path: Path) -> tuple[dict[str, torch.Tensor], list[SlotSource]]:
    """Empty tensors, and what fills them."""
    stored = read_headers(path)
    empty = {name: torch.full(entry.shape, float("nan")) for name, entry in stored.items()}
    return empty, [SlotSource(WeightSlot.plain(empty[n]), [stored[n]]) for n in stored]


@pytest.mark.parametrize("num_threads", [1, 5])
def test_every_tensor_is_filled(tmp_path: Path, tensors, num_threads: int) -> None:
    filled, todo = sources(tmp_path)
    seen: list[tuple[int, int]] = []
    fill_slots(todo, CPU, num_threads=num_threads, progress=lambda *now: seen.append(now))
    assert filled.keys() == tensors.keys()
    assert all(torch.equal(filled[name], tensor) for name, tensor in tensors.items())
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert seen[-1] == (total, total) and len(seen) > 20
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_copies_cover_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read into each copy and copied on gives the tensors, side by side or with gaps."""
    monkeypatch.setattr(weight_reader, "PIECE", 64)
    source = random.Random(2)
    for _ in range(300):
        sizes = [source.choice([0, 1, 3, 16, 50, 63, 64, 65, 200]) for _ in range(8)]
        starts, end = [], 0
        for size in sizes:
            starts.append(end)
            end += size + source.choice([0, 0, 5, 70])
        contents = [source.randbytes(size) for size in sizes]
        buffer = bytearray(end)
        for base, reads in copies(sizes, starts):
            pinned = bytearray(64)
            for index, skip, at, count in reads:
                assert count > 0 and at + count <= 64
                pinned[at : at + count] = contents[index][skip : skip + count]
            used = at + count
            assert base + used <= end
            buffer[base : base + used] = pinned[:used]
        for start, size, content in zip(starts, sizes, contents, strict=True):
            assert buffer[start : start + size] == content


@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_file_that_shrinks_is_named(tmp_path: Path, tensors, num_threads: int) -> None:
    _, todo = sources(tmp_path)
    file = tmp_path / "b.safetensors"
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(CheckpointError, match=r"b\.safetensors became shorter"):
        fill_slots(todo, CPU, num_threads=num_threads)


def test_a_failed_read_is_named_and_stops_all_threads(
    tmp_path: Path, tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, todo = sources(tmp_path)
    reads: list[int] = []

    def fail(file: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(offset)
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(weight_reader.os, "preadv", fail)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match=r"a\.safetensors cannot be read: .*Input/output"):
        fill_slots(todo, CPU, num_threads=3)
    assert len(reads) <= 3
    assert len(os.listdir("/proc/self/fd")) == before, "a file was left open"


def test_reads_in_small_parts_are_joined(
    tmp_path: Path, tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_read = os.preadv
    monkeypatch.setattr(
        weight_reader.os, "preadv", lambda f, views, at: real_read(f, [views[0][:100]], at)
    )
    filled, todo = sources(tmp_path)
    fill_slots(todo, CPU, num_threads=2)
    assert all(torch.equal(filled[name], tensor) for name, tensor in tensors.items())
