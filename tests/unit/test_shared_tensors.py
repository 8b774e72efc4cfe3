"""CPU tensors in memory that another process maps."""

import json
import multiprocessing
import os

import pytest
import torch

from kernels.host.shared_tensors import SharedTensors, open_shared


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(3, 4, 5),
        torch.randn(3, 5, 4).transpose(1, 2),
        torch.randn(7, 4)[2:5],
        torch.randint(0, 255, (3, 6), dtype=torch.uint8),
        torch.empty(0, 4),
    ]


def read(texts: list[str], answers) -> None:
    answers.put([open_shared(json.loads(text)).double().sum().item() for text in texts])


def test_another_process_reads_the_values_in_place():
    shared, found = SharedTensors(), tensors()
    same = list(found)
    handles = shared.share(found)
    for tensor, expected in zip(found, tensors(), strict=True):
        assert torch.equal(tensor, expected) and tensor.stride() == expected.stride()
    assert all(a is b for a, b in zip(same, found, strict=True))
    found[0].fill_(2.0)  # after it was shared
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    reader = context.Process(target=read, args=([json.dumps(it) for it in handles], answers))
    reader.start()
    sums = answers.get(timeout=60)
    reader.join()
    assert sums == pytest.approx([tensor.double().sum().item() for tensor in found])
    mapped = open_shared(handles[0])
    shared.close()
    assert (mapped == 2.0).all(), "a map outlives the descriptor"
    with pytest.raises(OSError, match="No such file"):
        open_shared(handles[0])


def test_what_is_shared_stays_where_it_is_and_what_is_gone_is_closed():
    shared, (first, second, *_) = SharedTensors(), tensors()
    before = shared.share([first, second])
    address = first.data_ptr()
    assert shared.share([first]) == before[:1] and first.data_ptr() == address
    os.fstat(before[0]["fd"])
    with pytest.raises(OSError):
        os.fstat(before[1]["fd"])
    shared.close()


def test_a_process_of_before_is_an_error():
    shared = SharedTensors()
    (handle,) = shared.share([torch.ones(3)])
    with pytest.raises(OSError, match="has ended"):
        open_shared({**handle, "started": handle["started"] + 1})
    shared.close()
