"""What of flashinfer's backend needs no GPU: lists of pages, where long sequences are cut, why it cannot run."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import flashinfer
from kernels.attention.flashinfer import FlashInferAttention
from kernels.attention.flashinfer_decodes import Pages, chunk_pages, few_are_even
from kernels.attention.flashinfer_graphs import GraphPlans
from kernels.interface.attention_spec import AttentionSpec
from tests.unit.test_kernels_select import CUDA


@given(
    st.lists(st.integers(1, 5000), max_size=90),
    st.integers(0, 40),
    st.integers(1, 66),
    st.integers(0, 200),
)
@settings(max_examples=300)
def test_chunks_never_exceed_their_bound(
    blocks: list[int], empty: int, num_blocks: int, max_chunks: int
):
    num_pages, num_rows = np.array(blocks, dtype=np.int32), len(blocks) + empty
    chunk = chunk_pages(num_pages, num_rows, max_chunks, num_blocks)
    if chunk is not None:
        assert 1 <= chunk < num_pages.max()
        assert (-(-num_pages // chunk)).sum() + empty <= max_chunks


def test_only_long_sequences_among_many_are_cut():
    many, few = np.array([32] * 126 + [2048] * 2), np.array([32] * 6 + [2048])
    assert chunk_pages(many, 128, 191, 66) == -(-many.sum() // 63)
    assert chunk_pages(many, 128, 128, 66) is None
    assert chunk_pages(np.array([90] * 126 + [128] * 2), 128, 191, 66) is None
    assert chunk_pages(few, 7, 13, 66) is None


def test_shorter_sequences_keep_the_pages_of_their_plan():
    """The kernels compute (pages - 1) * page size + tokens of the last page, where a row has pages."""
    planned, lens = np.array([33, 16, 48, 1], np.int32), torch.tensor([15, 16, 33, 1, 0, 0])
    pages, buffers = Pages(planned, 16, 6), torch.zeros(40, dtype=torch.int32)
    pages.ship(torch.zeros(pages.total, dtype=torch.int32), buffers)
    plans = object.__new__(GraphPlans)
    plans._block_size, plans._decode_pages = 16, SimpleNamespace(lengths=buffers)
    plans.shorten(lens.to(torch.int32))
    counts = pages.starts.diff()
    assert counts.tolist() == [3, 1, 3, 1, 0, 0]
    found = torch.where(counts > 0, (counts - 1) * 16 + pages.last_lens, 0)
    assert found.tolist() == lens.tolist()


@pytest.mark.parametrize(
    ("lens", "even"),
    [
        ([], True),
        ([0, 0], True),
        ([160] * 8, True),  # 6 us whole, 10 cut (a layer's attention, H200)
        ([640] * 32, True),  # 14, 17
        ([1024, 2048] * 20, True),  # 41, 45
        ([8192] * 48, True),  # 191, 199
        ([8192] * 32, False),  # 140, 132
        ([2048] * 8, False),  # 29, 16
        ([1536] * 16, False),  # 25, 20
        ([384] * 31 + [8192], False),
    ],
)
def test_a_few_short_decodes_are_left_whole(lens: list[int], even: bool):
    assert few_are_even(np.array(lens, dtype=np.int32), 66) == even


def test_pages_of_rows_with_and_without_a_sequence():
    lens = np.array([16, 17, 1], dtype=np.int32)
    pages = Pages(lens, 16)
    assert pages.starts_cpu.tolist() == [0, 1, 3, 4] and pages.last_lens_cpu.tolist() == [16, 1, 1]
    padded = Pages(lens, 16, 5)
    assert padded.starts_cpu.tolist() == [0, 1, 3, 4, 4, 4]
    assert padded.last_lens_cpu.tolist() == [16, 1, 1, 0, 0]
    buffer = torch.full((20,), 9, dtype=torch.int32)
    padded.ship(torch.empty(4), buffer)
    assert padded.starts.data_ptr() == buffer.data_ptr()
    assert torch.equal(padded.starts, padded.starts_cpu) and buffer[11:].unique().tolist() == [9]
    assert torch.equal(padded.last_lens, padded.last_lens_cpu)


@pytest.fixture
def gpu_machine(monkeypatch: pytest.MonkeyPatch) -> dict:
    """A machine on which it runs; change an entry to break it."""
    machine = {
        "version": "0.6.6",
        "capability": (9, 0),
        "packages": {"triton", "tvm_ffi"},
        "nvcc": "nvcc",
        "programs": {"ninja", "c++"},
    }

    def version(name: str) -> str:
        if machine["version"] is None:
            raise flashinfer.PackageNotFoundError(name)
        return machine["version"]

    monkeypatch.setattr(flashinfer, "version", version)
    monkeypatch.setattr(
        flashinfer, "find_spec", lambda name: name if name in machine["packages"] else None
    )
    monkeypatch.setattr(flashinfer, "_nvcc", lambda: machine["nvcc"])
    monkeypatch.setattr(
        flashinfer.shutil,
        "which",
        lambda name, path=None: name if name in machine["programs"] else None,
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: machine["capability"])
    return machine


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("version", None, "flashinfer-python is not installed, 0.6.6 or newer"),
        ("version", "0.6.5.post1", "flashinfer-python 0.6.5.post1 is installed, 0.6.6 or newer"),
        ("version", "0.5.9", "0.6.6 or newer is needed"),
        ("capability", (7, 5), "needs compute capability 8.0, found 7.5"),
        ("packages", {"tvm_ffi"}, "triton is not installed"),
        ("packages", {"triton"}, "tvm_ffi is not installed"),
        ("nvcc", None, "no nvcc was found to compile its kernels with (install the CUDA toolkit"),
        ("programs", {"c++"}, "no ninja was found to compile its kernels with (pip install ninja)"),
        ("programs", {}, "no ninja and no c++ was found to compile its kernels with (pip install"),
    ],
)
def test_what_is_missing_is_named(gpu_machine: dict, key: str, value: object, says: str):
    device = torch.device("cuda")
    assert FlashInferAttention.unavailable(device) is None
    gpu_machine[key] = value
    assert says in str(FlashInferAttention.unavailable(device))


def test_a_machine_without_compilers_is_told_all_of_them(gpu_machine: dict):
    gpu_machine |= {"nvcc": None, "programs": {}}
    reason = str(FlashInferAttention.unavailable(torch.device("cuda")))
    assert reason.startswith("no nvcc and no ninja and no c++ was found")
    assert reason.endswith(", nor flashinfer-jit-cache, which contains them")


def test_kernels_compiled_ahead_need_no_compiler(gpu_machine: dict):
    gpu_machine |= {
        "nvcc": None,
        "programs": {},
        "packages": {"triton", "tvm_ffi", "flashinfer_jit_cache"},
    }
    assert FlashInferAttention.unavailable(torch.device("cuda")) is None


def test_shapes():
    def reason(dtype: torch.dtype, *head_dims: int) -> str | None:
        specs = tuple(AttentionSpec(4, 2, head_dim, 1.0) for head_dim in head_dims)
        shape = replace(CUDA, dtype=dtype, attention_specs=specs)
        return FlashInferAttention.unsupported_reason(shape)

    assert reason(torch.bfloat16, 128) is None
    assert reason(torch.float16) is None
    assert "model.dtype is float32" in str(reason(torch.float32, 128))
    assert "64, 128, 256, the model's is 96" in str(reason(torch.bfloat16, 128, 96))
